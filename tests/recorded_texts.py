"""Texts of a pair: decoded without a draft, kept as recordings, and decoded again under a
policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from databases import opened

from spectune.optimizer.replay.replay_trace import Replay, ReplayTrace
from spectune.runtime.decoder import Decoded, Decoder, prepare_for
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.policies.artifacts import Artifacts
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.recording.panoramas import record_panorama
from spectune.traces.schema import Request, Sampling, Step
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile, Trajectory

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4)]


def shape(step: Step) -> tuple[int, ...]:
    """What must agree of a round: all but its times."""
    return (
        step.start, step.drafted, step.verified, step.accepted, step.emitted, step.draft_steps,
        step.lag, step.depth, step.bin,
    )  # fmt: skip


class Looked:
    """A source whose plan depends on how often it has been looked at."""

    def __init__(self, plan_at: Callable[[int], Plan]) -> None:
        self.looks, self.plan_at = 0, plan_at

    def current(self) -> Plan:
        self.looks += 1
        return self.plan_at(self.looks)


def alternating(plans: Sequence[Plan]) -> Looked:
    """Another plan every second look."""
    return Looked(lambda n: plans[n // 2 % len(plans)])


def asked(
    decoder: Decoder, prompt: str, sampling: Sampling, tokens: int, name: str = "r"
) -> DecodeRequest:
    """A request for so many tokens after a prompt."""
    ids = decoder.pair.encode(prompt)
    return decoder.request(Request(name, "x", prompt), ids, sampling, tokens)


def plain_texts(
    pair: LoadedPair, prompts: Mapping[str, str], sampling: Sampling, tokens: int
) -> list[Trajectory]:
    """The target's own texts, by request id."""
    decoder = Decoder(pair, StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names)))
    requests = (asked(decoder, prompt, sampling, tokens, name) for name, prompt in prompts.items())
    return [decoder.decode(request).trajectory for request in requests]


def request_of(decoder: Decoder, text: Trajectory) -> DecodeRequest:
    """What was asked for when a text was recorded."""
    return decoder.request(
        Request(text.request_id, "x", ""),
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
    with opened(folder / "spectune.db") as store:
        store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
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
        made = [(n, record_panorama(pair, text, d, gamma, width, depth)) for d in drafts]
        store.put_panoramas(recording, made)


def trace_of(store: TraceStore, recording: str, drafts: Sequence[str]) -> ReplayTrace:
    """A recording with the panoramas of drafts."""
    loaded = store.load(recording)
    return ReplayTrace(loaded.trajectories, {d: loaded.panoramas(d) for d in drafts})


def executed(
    pair: LoadedPair,
    policy: Policy,
    texts: Sequence[Trajectory],
    artifacts: Artifacts | None = None,
    profile: LatencyProfile | None = None,
) -> Iterator[Decoded]:
    """The texts decoded again under a policy, by one decoder."""
    prepared = prepare_for(pair, policy, profile=profile, artifacts=artifacts)
    decoder = Decoder(pair, StaticSource(prepared))
    for text in texts:
        yield decoded_again(decoder, text)


def same_rounds(
    pair: LoadedPair,
    policy: Policy,
    replayed: Replay,
    texts: Sequence[Trajectory],
    artifacts: Artifacts | None = None,
    profile: LatencyProfile | None = None,
) -> list[Step]:
    """The rounds of a replay, all of which the texts, decoded again under the policy, must have."""
    found = []
    runs = executed(pair, policy, texts, artifacts, profile)
    for run, steps in zip(runs, replayed.steps(), strict=True):
        same = [shape(s) for s in run.steps] == [shape(s) for s in steps]
        assert same, (policy.label(), run.trajectory.request_id)
        found += steps
    return found


def by_frequency(texts: Sequence[Trajectory], vocab: int) -> Frequencies:
    """The vocabulary by its frequency in every second text, so that the others hold tokens beyond a
    shortlist."""
    counts = np.bincount(np.concatenate([t.output_ids for t in texts[::2]]), minlength=vocab)
    return Frequencies(np.argsort(-counts, kind="stable").astype(np.int64), 2)


def under_windows(
    draft: str, windows: Sequence[Any], shortlists: Sequence[Any], every: int
) -> list[Policy]:
    """Every shortlist under the second window, and one in ``every`` of them, in turn, under each of
    the others."""
    return [
        parse_policy({"draft": draft, "window": window, "shortlist": shortlist})
        for i, window in enumerate(windows)
        for j, shortlist in enumerate(shortlists)
        if i == 1 or (i + j) % every == 0
    ]
