"""What measures this project: see bench/README.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
sys.path += [str(ROOT / name) for name in ("tests", "tools")]
