"""The checks and measurements of this project, by name.

    python bench/run.py [NAME] [--quick] [--fresh] [--list]
    python bench/run.py NAME --help

Without a name it runs those of ``make acceptance``: exact checks two at a time, then timed ones
alone; what is done is not done again unless ``--fresh``. ``--quick`` proves that a check runs, in
``.acceptance/quick``, and leaves the results alone. bench/README.md says what there is.
"""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch is not imported yet
sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.harness import main

if __name__ == "__main__":
    # Servers, `control` and `follow` that it has begun end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:], __doc__))
