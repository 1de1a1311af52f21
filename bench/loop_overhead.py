"""What is not model time: loop, controller and bookkeeping as a share of a round, recording as a share of a decode, bytes on disk.

    python bench/loop_overhead.py [--requests 12] [--max-new-tokens 96] [--out bench/results/loop_overhead.json]

Model time is what the transformers modules take inside a round (passes of target and draft, timed at the module). Sampling is choosing
tokens from logits: filters, noise, argmax, near ties, which decoding without speculation does as well. The rest is the loop's own:
tensors and masks made ready, windows, commits, bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from spectune.db.database import open_database
from spectune.optimizer.execute import DecodeOptions, encode, warm
from spectune.optimizer.inputs import load_workload
from spectune.optimizer.record import RecordRequest, record
from spectune.runtime import verification
from spectune.runtime.decoder import Decoder
from spectune.runtime.drafts import language_model
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.sampling import Noise
from spectune.traces.schema import Sampling
from spectune.traces.store import TraceStore

ROOT = Path(__file__).resolve().parent.parent
POLICIES = [
    {},
    {"draft": "small", "window": {"kind": "fixed", "gamma": 4}},
    {"draft": "small", "window": {"kind": "cache_fsm", "gamma_max": 8}},
    {"draft": "small", "window": {"kind": "q_learning", "gamma_max": 8}},
    {"draft": "medium", "window": {"kind": "fixed", "gamma": 8}, "stop": {"kind": "max_prob", "threshold": 0.4}},
]


class ModelClock:
    """Seconds spent inside the models' own modules (decoder stack and head)."""

    def __init__(self, models: list[CausalModel]) -> None:
        self.seconds = 0.0
        for model in models:
            for name in ("_decoder",):
                self._wrap(model, name)
            head = model.model.get_output_embeddings()
            head.register_forward_pre_hook(self._enter)
            head.register_forward_hook(self._leave)
        self._began = 0.0

    def _wrap(self, model: CausalModel, name: str) -> None:
        module = getattr(model, name)
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


class SamplingClock:
    """Seconds spent choosing tokens: noise, filters, argmax and near-tie checks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0
        for owner, name in ((language_model, "choose"), (verification, "choose"), (Noise, "row"), (Noise, "rows")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside -= 1
                if not self._inside:
                    self.seconds += time.perf_counter() - began

        return timed


def share_of_rounds(
    pair: LoadedPair, clock: ModelClock, sampling: SamplingClock, requests: int, tokens: int
) -> list[dict[str, Any]]:
    """Per policy and temperature: median seconds of a round, and the shares of it that sampling and the loop take."""
    rows = []
    for temperature in (0.0, 1.0):
        options = DecodeOptions(Sampling(temperature), tokens)
        encoded = encode(pair, load_workload(["demo"], limit=requests), options)
        warm(pair, encoded)
        for document in POLICIES:
            policy: Policy = parse_policy(document)
            decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)))
            shares, lengths, chosen = [], [], []
            for _, request in encoded.items:
                before = picked = 0.0
                for n, item in enumerate(decoder.rounds(request)):
                    if n:
                        chosen.append((sampling.seconds - picked) / item.step.round_s)
                        shares.append(1 - (clock.seconds - before) / item.step.round_s - chosen[-1])
                        lengths.append(item.step.round_s)
                    before, picked = clock.seconds, sampling.seconds
            rows.append(
                {
                    "policy": policy.label(),
                    "temperature": temperature,
                    "round_ms": 1e3 * statistics.median(lengths),
                    "loop_share": statistics.median(shares),
                    "loop_us": 1e6 * statistics.median(s * r for s, r in zip(shares, lengths, strict=True)),
                    "sampling_share": statistics.median(chosen),
                    "sampling_us": 1e6 * statistics.median(s * r for s, r in zip(chosen, lengths, strict=True)),
                    "rounds": len(shares),
                }
            )
    return rows


def cost_of_recording(pair: LoadedPair, requests: int, tokens: int) -> dict[str, Any]:
    """A decode with and without storing it, request by request in turn; and what panoramas weigh on disk."""
    workload = load_workload(["demo"], limit=requests)
    options = DecodeOptions(Sampling(1.0), tokens)
    encoded = encode(pair, workload, options)
    policy = parse_policy({"draft": "small", "window": {"kind": "fixed", "gamma": 3}})
    decoder = Decoder(pair, StaticSource(prepare(policy, pair.draft_names)))
    with tempfile.TemporaryDirectory() as folder, open_database(f"{folder}/a.db") as database:
        store = TraceStore(database)
        store.put_pair(pair.id, "demo", pair.spec.to_json())
        info = store.create_recording(pair.id, None, options.sampling, max_new_tokens=tokens)
        decode_s, store_s = [], []
        for i, (_, request) in enumerate(encoded.items):
            began = time.perf_counter()
            decoded = decoder.decode(request)
            decode_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            store.append_trajectory(info.id, i, decoded.trajectory, decoded.steps)
            store_s.append(time.perf_counter() - began)
    sizes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in pair.draft_names:
            with open_database(f"{folder}/{name}.db") as database:
                store = TraceStore(database)
                source = StaticSource(prepare(policy, pair.draft_names))
                record(store, pair, RecordRequest(workload, options, (), 16), source)
                database.vacuum()
                before = _size(folder, name)
                info = record(store, pair, RecordRequest(workload, options, (name,), 16), source, reuse_complete=True)
                database.vacuum()
                sizes[name] = (_size(folder, name) - before) / info.n_output_tokens
    return {
        "recording_share": statistics.median(store_s) / statistics.median(decode_s),
        "append_ms": 1e3 * statistics.median(store_s),
        "decode_ms": 1e3 * statistics.median(decode_s),
        "panorama_bytes_per_position": sizes,
        "tokens": tokens,
    }


def _size(folder: str, name: str) -> int:
    return sum(p.stat().st_size for p in Path(folder).glob(f"{name}.db*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", default=str(ROOT / "bench" / "results" / "loop_overhead.json"))
    wanted = parser.parse_args()
    pair = load_pair(read_pair("demo"), device="cpu", drafts=("small", "medium"))
    recording = cost_of_recording(pair, wanted.requests, wanted.max_new_tokens)
    clock = ModelClock([pair.target, *pair.drafts.values()])
    rows = share_of_rounds(pair, clock, SamplingClock(), wanted.requests, wanted.max_new_tokens)
    for row in rows:
        print(
            f"T={row['temperature']:.0f} {row['policy']:44} round {row['round_ms']:6.2f} ms, loop "
            f"{100 * row['loop_share']:5.1f}% ({row['loop_us']:.0f} us), sampling {100 * row['sampling_share']:.1f}%"
        )
    print(
        f"recording adds {100 * recording['recording_share']:.2f}% to a decode; panoramas, bytes per position: "
        + ", ".join(f"{k} {v:.1f}" for k, v in recording["panorama_bytes_per_position"].items())
    )
    Path(wanted.out).parent.mkdir(parents=True, exist_ok=True)
    Path(wanted.out).write_text(json.dumps({"rounds": rows, **recording}, indent=1) + "\n")


if __name__ == "__main__":
    main()
