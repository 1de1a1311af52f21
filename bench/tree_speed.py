"""What drafting and verifying a tree costs beside the models: seconds of a round, part by part.

    python bench/tree_speed.py [--requests 12] [--max-new-tokens 96] [--clock cpu] [--out bench/results/tree_speed.json]

The tree is EAGLE-2's: width 10, 6 levels, 60 nodes verified, on the demo pair. Every part is timed without what it calls of the others:

- models: the transformers modules, canonical passes included;
- vocabulary: what is as wide as the vocabulary (best children, normaliser, noise);
- codes: a law's whole numbers, and which of them rounding could change;
- tree: growing, settling, selecting, reading the nodes out;
- draft_tensors, verify_tensors: ids, positions, slots and masks made ready for passes;
- walk: the target's tokens, from the root down;
- commit: cache entries moved to where the text continues;
- loop: everything else of the round.

``building_ms`` is codes and tree together: making a tree out of what the draft said. ``--clock cpu`` (the default) counts the seconds of
this thread on its core, which other processes do not disturb; everything runs on one thread. ``wall`` is for a quiet machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spectune.runtime.decoder
import spectune.runtime.distributions
import spectune.runtime.drafts.language_model
import spectune.runtime.trees.draft
import torch
from spectune.optimizer.execute import DecodeOptions, encode, warm
from spectune.optimizer.inputs import load_workload
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.sampling import Noise
from spectune.traces.schema import Sampling

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("models", "vocabulary", "codes", "tree", "draft_tensors", "verify_tensors", "walk", "commit", "loop")
POLICY = {
    "draft": "small",
    "growth": {"kind": "top_k", "width": 10},
    "window": {"kind": "fixed", "gamma": 6},
    "select": {"top_n": 60},
}


class Parts:
    """Seconds of each part; a part's clock stands still while another runs inside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running = ["loop"]
        self._clock = clock
        self._since = clock()

    def enter(self, part: str) -> None:
        now = self._clock()
        self.seconds[self._running[-1]] += now - self._since
        self._running.append(part)
        self._since = self._clock()

    def leave(self) -> None:
        now = self._clock()
        self.seconds[self._running.pop()] += now - self._since
        self._since = self._clock()

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap."""
        self.enter("loop")
        self.leave()
        found, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return found

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Counts what ``owner.name`` takes as ``part``."""
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return inner(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, name, timed)

    def watch(self, model: CausalModel) -> None:
        """Counts a model's decoder stack and head as models."""
        for module in (model._decoder, model.model.get_output_embeddings()):
            module.register_forward_pre_hook(lambda *_: self.enter("models"))
            module.register_forward_hook(lambda *_: self.leave())


def watch(pair: LoadedPair, clock: Callable[[], float]) -> Parts:
    """A clock over everything that a round of a tree calls."""
    parts = Parts(clock)
    for model in (pair.target, *pair.drafts.values()):
        parts.watch(model)
    parts.wrap(spectune.runtime.distributions, "best_of", "vocabulary")
    parts.wrap(Noise, "row", "vocabulary")
    parts.wrap(Noise, "rows", "vocabulary")
    parts.wrap(spectune.runtime.trees.draft, "read_distributions", "codes")
    parts.wrap(spectune.runtime.decoder, "grow", "tree")
    parts.wrap(spectune.runtime.drafts.language_model.LanguageModelReader, "root", "draft_tensors")
    parts.wrap(spectune.runtime.drafts.language_model.LanguageModelReader, "level", "draft_tensors")
    parts.wrap(spectune.runtime.decoder.ModelBackend, "_verify_tree", "verify_tensors")
    parts.wrap(spectune.runtime.decoder, "verify_tree", "walk")
    parts.wrap(spectune.runtime.decoder.ModelBackend, "commit", "commit")
    return parts


def measure(pair: LoadedPair, parts: Parts, temperature: float, requests: int, tokens: int) -> dict[str, Any]:
    """Over rounds, in milliseconds: medians, and of building the mean too, since what rounding leaves undecided costs some rounds more."""
    policy = parse_policy(POLICY)
    encoded = encode(pair, load_workload(["demo"], limit=requests), DecodeOptions(Sampling(temperature), tokens))
    warm(pair, encoded)
    decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)))
    decoder.decode(encoded.items[0][1])
    rounds: list[dict[str, float]] = []
    emitted = 0
    for _, request in encoded.items:
        for n, item in enumerate(decoder.rounds(request)):
            lap = parts.lap()
            if n and item.step.depth == 6:  # the first includes the prefill; the last may be cut short
                rounds.append(lap)
                emitted += len(item.tokens)
    medians = {part: 1e3 * statistics.median(lap[part] for lap in rounds) for part in PARTS}
    return {
        "policy": policy.label(),
        "temperature": temperature,
        "rounds": len(rounds),
        "tokens_per_round": emitted / len(rounds),
        "round_ms": 1e3 * statistics.median(sum(lap.values()) for lap in rounds),
        "building_ms": 1e3 * statistics.median(lap["codes"] + lap["tree"] for lap in rounds),
        "building_mean_ms": 1e3 * statistics.fmean(lap["codes"] + lap["tree"] for lap in rounds),
        "not_models_ms": 1e3 * statistics.median(sum(lap.values()) - lap["models"] for lap in rounds),
        "parts_ms": medians,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "tree_speed.json"))
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    pair = load_pair(read_pair("demo"), device="cpu")
    parts = watch(pair, time.thread_time if wanted.clock == "cpu" else time.perf_counter)
    rows = [measure(pair, parts, t, wanted.requests, wanted.max_new_tokens) for t in (0.0, 1.0)]
    for row in rows:
        shown = ", ".join(f"{part} {row['parts_ms'][part]:.2f}" for part in PARTS)
        print(
            f"T={row['temperature']:.0f} {row['policy']}: round {row['round_ms']:.2f} ms, not the models {row['not_models_ms']:.2f}, "
            f"building and selecting {row['building_ms']:.2f}, mean {row['building_mean_ms']:.2f} ({shown})"
        )
    result = {"vocabulary": pair.target.vocab_size, "clock": wanted.clock, "rounds": rows}
    Path(wanted.out).parent.mkdir(parents=True, exist_ok=True)
    Path(wanted.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
