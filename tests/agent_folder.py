"""A folder as vLLM's agent writes it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from token_ids import encoded

from spectune.runtime.pair import read_pair
from spectune.traces.recording import RecordedRequest

PAIR = read_pair("demo")
BEGAN = time.time() - 3600


class Agent:
    """Writes a folder as vLLM's agent does."""

    def __init__(self, folder: Path, boot: str = "a1b2c3d4e5", draft: str | None = "small") -> None:
        self.folder, self.boot, self.number, self.count = folder, boot, 0, 0
        folder.mkdir(exist_ok=True)
        self.engine = {
            "engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "dtype": "float32",
            "method": "draft_model" if draft else None, "model": PAIR.target,
            "draft_model": PAIR.drafts[draft] if draft else None, "prompt_lookup": None,
            "num_speculative_tokens": 6, "above_zero": "greedy",
            "serving": {"max_num_seqs": 8, "max_batched_tokens": 512, "max_len": 400, "ahead": 1},
        }  # fmt: skip
        self.status()

    def status(self, version: int = 0, policy_id: str = "", **further: Any) -> None:
        document = {
            "format": 1, "boot": self.boot, "pid": 7, "at": time.time(), "engine": self.engine,
            "in_force": {"version": version, "policy": policy_id, "since": time.time()},
            "refused": None, "fault": None, "noted": self.count, "dropped": 0, **further,
        }  # fmt: skip
        part = self.folder / "status.json.part"
        part.write_text(json.dumps(document))
        part.replace(self.folder / "status.json")

    @property
    def file(self) -> Path:
        return self.folder / f"rounds-{self.boot}-{self.number:06d}.jsonl"

    def line(self, *, version: int = 0, tokens: bool = True, **further: Any) -> dict[str, Any]:
        """The next request: a prompt of 5 tokens, and 7 that were served in three rounds."""
        n, self.count = self.count, self.count + 1
        at = BEGAN + n
        rounds = [
            [0, 0, 0, 1, version, 0.02, 2, at + 0.02],
            [1, 3, 2, 3, version, 0.01, 2, at + 0.03],
            [4, 3, 3, 3, version, 0.01, 1, at + 0.04],
        ]
        prompt, output = [n % 97, 5, 6, 7, 8], [n % 91, 1, 2, 3, 4, 5, 6]
        text = {"prompt": encoded(prompt), "output": encoded(output)}
        sizes = {"prompt": None, "output": None, "n_prompt": 5, "n_output": 7}
        return {
            "id": f"r{n}", "arrived": at, "ended": at + 0.04, **(text if tokens else sizes),
            "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": None, "max_tokens": 7,
            "stop": [], "finish": "length", "label": None, "rounds": rounds, **further,
        }  # fmt: skip

    def write(self, count: int = 1, **further: Any) -> None:
        is_new = not self.file.exists()
        with self.file.open("a") as file:
            if is_new:
                file.write(json.dumps({"engine": self.engine}) + "\n")
            for _ in range(count):
                file.write(json.dumps(self.line(**further)) + "\n")
                file.flush()

    def policy(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads((self.folder / "policy.json").read_text())
        except FileNotFoundError:
            return {}
        return document

    def write_requests(
        self, requests: Iterable[RecordedRequest], name: str = "r", **further: Any
    ) -> None:
        """Lines of requests as they were served, each with the id of its ordinal after a name."""
        self.write(0)
        with self.file.open("a") as file:
            for r in requests:
                text, last = r.trajectory, r.steps[-1]
                rounds = [
                    [s.start, s.drafted, s.accepted, s.emitted, 0, s.round_s, s.batch, s.ended_s]
                    for s in r.steps
                ]
                line = self.line(
                    id=f"{name}{r.ordinal}", prompt=encoded(text.prompt_ids.tolist()),
                    output=encoded(text.output_ids.tolist()), arrived=r.steps[0].arrived_s,
                    ended=last.ended_s, max_tokens=text.max_new_tokens, rounds=rounds, **further,
                )  # fmt: skip
                file.write(json.dumps(line) + "\n")
