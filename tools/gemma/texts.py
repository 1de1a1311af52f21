"""Writes prompts that any machine has: the demo's, and beginnings of modules of Python's library.

    PYTHONPATH=tools python -m gemma.texts --out build/real/texts.jsonl

The demo's are of code, prose and mathematics, 40 to 200 tokens each. A module's beginning is about
600 tokens, so that texts go beyond the window of a model that sees 512.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from spectune.demo.corpus import code_documents
from spectune.demo.prompts import demo_workload

EACH = 32
"""Prompts of a category."""
LENGTH = 2400
"""Characters of a module's beginning."""


def prompts() -> Iterator[dict[str, str]]:
    """Rows of a workload: id, category and prompt."""
    for prompt in demo_workload()[: 3 * EACH]:  # the categories come in turn
        yield {"id": prompt["id"], "category": prompt["category"], "prompt": prompt["turns"][0]}
    modules = (text for d in code_documents(True) if len(text := d.text) > LENGTH)
    for index, text in zip(range(EACH), modules, strict=False):
        beginning = text[: text.rindex("\n", 0, LENGTH) + 1]
        yield {"id": f"module-{index:03d}", "category": "module", "prompt": beginning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    out = parser.parse_args().out
    rows = [json.dumps(row) + "\n" for row in prompts()]
    out.write_text("".join(rows))
    print(f"{out}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
