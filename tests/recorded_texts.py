"""Texts of a pair: decoded without a draft, kept as recordings, and decoded again under a
policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spectune.db import open_database
from spectune.optimizer.simulate.replay_trace import ReplayTrace
from spectune.runtime.decoder import Decoded, Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.runtime.policies.prepare import prepare
from spectune.runtime.recording.chains import record_panorama
from spectune.runtime.recording.trees import record_tree_panorama
from spectune.traces.schema import Request, Sampling, Trajectory
from spectune.traces.store import TraceStore


def plain_texts(
    pair: LoadedPair, prompts: Mapping[str, str], sampling: Sampling, tokens: int
) -> list[Trajectory]:
    """The target's own texts, by request id."""
    decoder, found = Decoder(pair, StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))), []
    for name, prompt in prompts.items():
        request = decoder.request(
            Request(name, "x", (prompt,)), pair.encode(prompt), sampling, tokens
        )
        found.append(decoder.decode(request).trajectory)
    return found


def request_of(decoder: Decoder, text: Trajectory) -> DecodeRequest:
    """What was asked for when a text was recorded."""
    return decoder.request(
        Request(text.request_id, "x", ("",)),
        text.prompt_ids.tolist(),
        text.sampling,
        text.max_new_tokens,
    )


def decoded_again(decoder: Decoder, text: Trajectory) -> Decoded:
    """A text decoded once more; it must be the same."""
    done = decoder.decode(request_of(decoder, text))
    assert done.trajectory.output_ids.tolist() == text.output_ids.tolist()
    return done


@contextmanager
def store_of(pair: LoadedPair, folder: Path) -> Iterator[TraceStore]:
    """A store in a new file that knows the pair."""
    with open_database(str(folder / "spectune.db")) as database:
        store = TraceStore(database)
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
        yield store


def keep(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    texts: Sequence[Trajectory],
    first: int,
    size: tuple[int, int, int],
    *drafts: str,
) -> None:
    """Stores texts from an ordinal on with panoramas of drafts: ``size`` is gamma of their chains,
    width and depth of their trees."""
    gamma, width, depth = size
    for n, text in enumerate(texts, first):
        store.append_trajectory(recording, n, text)
        store.put_panoramas(recording, [(n, record_panorama(pair, text, d, gamma)) for d in drafts])
        store.put_panoramas(
            recording, [(n, record_tree_panorama(pair, text, d, width, depth)) for d in drafts]
        )


def trace_of(
    store: TraceStore, recording: str, drafts: Sequence[str], ranks: Any = None
) -> ReplayTrace:
    """A recording with the chains and trees of drafts, and with ranks by draft and artifact."""
    loaded = store.load(recording, trees=True)
    return ReplayTrace(
        loaded.trajectories,
        {d: loaded.panoramas(d) for d in drafts},
        trees={(d, "coupled"): loaded.trees(d) for d in drafts},
        ranks=ranks,
    )
