"""Recording: decode a workload, keep every text, then look around from every start of it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from spectune.db.errors import DatabaseError
from spectune.engines.abilities import engine_named
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.execute import DecodeOptions, encode, warm
from spectune.optimizer.processes import on_every_core
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.artifacts import Artifacts, Fitted
from spectune.runtime.policies.document import (
    DEFAULT_TOP_N,
    GAMMA_LIMIT,
    Policy,
    parse_policy,
)
from spectune.runtime.policies.rules import compile_tree
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.panoramas import Cover, base_covers, cover_name, record_panorama
from spectune.runtime.trees.grow import TreeRule
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import ACCEPTANCE, Workload
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.traffic import TrafficWriter
from spectune.traces.tables import DESIGNED, Panorama, Recording, Trajectory

BATCH = 4
"""Panoramas of a draft stored in one transaction; with trees each takes a second to make."""


def whole_texts(trajectories: Iterable[Trajectory]) -> list[list[int]]:
    """Token ids of each text, prompt and output: what a profile is measured on."""
    return [[*t.prompt_ids.tolist(), *t.output_ids.tolist()] for t in trajectories]


def texts_to_profile(
    store: TraceStore, pair_id: str, recording: str | None
) -> tuple[str | None, Sequence[Trajectory]]:
    """A recording's id and texts: the one named, else the pair's newest that is complete and holds
    any; (None, ()) where there is none.

    Raises NotFoundError where none has that name, TraceError where the one named holds no text.
    """
    if recording is None:
        done = store.list_recordings(pair_id, state="complete")
        names = [r.id for r in done if r.source != DESIGNED]
    else:
        names = [recording]
    for name in names:
        found = store.load(name, (), skip_corrupted=True)
        if found.requests:
            return found.info.id, found.trajectories
        if recording is not None:
            raise TraceError(f"recording {found.info.id} holds no text; name another, or none")
    return None, ()


def recording_options(pair: LoadedPair, options: DecodeOptions) -> dict[str, Any]:
    """What else a recording's texts depend on, as stored with it."""
    return {
        "stop_strings": list(options.stop_strings),
        "chat": options.chat,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.device.type,
    }


def asked_of(pair: LoadedPair, workload_id: str, options: DecodeOptions, slot: str = "") -> Asked:
    """What a store finds or makes a recording by."""
    about = recording_options(pair, options) | ({"slot": slot} if slot else {})
    most, verifier = options.max_new_tokens, options.verifier
    return Asked(pair.id, workload_id, options.sampling, most, verifier, about)


@dataclass(frozen=True)
class Look:
    """What to record of texts: the panoramas of ``drafts``, with chains of ``gamma_max`` tokens
    and, with a ``tree_width`` above 0, trees of so many children and ``tree_depth`` levels.

    ``covers`` are growths beside EAGLE-2's, by draft; all are recorded to the same depth, so width
    and depth are raised to the largest cover's. What replaces a panorama holds all that any stored
    one of the draft holds. A draft that cannot grow trees has none.
    """

    drafts: Collection[str]
    gamma_max: int = 16
    tree_width: int = 0
    tree_depth: int = 0
    covers: Mapping[str, Sequence[Cover]] = field(default_factory=dict)


def record(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    wanted: Look,
    source: PolicySource,
    *,
    slot: str = "",
    fresh: bool = False,
    reuse_complete: bool = False,
    begun: Recording | None = None,
    progress: Progress = silent,
) -> Recording:
    """Decodes and stores every request, and what a look around its texts finds; what is stored
    already is not done again. Other cores look at texts while this one decodes the next.

    A recording that was begun with the same arguments and not finished is resumed, unless
    ``fresh``; with ``reuse_complete`` a finished one counts as well. A ``slot`` makes it a
    recording of its own: only who names the same one resumes it or finds it complete. ``begun`` is
    the one to go on with (:func:`begun_as` has its arguments). The policy in ``source`` changes how
    fast this goes, never what is recorded. Every request is committed as it ends, so that a kill
    loses at most the one in hand.
    """
    encoded = encode(pair, workload, options, wanted.drafts)
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json())
    asked = asked_of(pair, store.put_workload(workload), options, slot)
    info = begun
    if info is None and not fresh:
        info = store.find_recording(asked, state="recording")
        if info is None and reuse_complete:
            info = store.find_recording(asked, state="complete")
    if info is None:
        info = store.create_recording(asked)
    put_policies(store, [source.current().policy])
    have = store.recorded_ordinals(info.id)
    new = {n: one for n, one in enumerate(encoded.items) if n not in have}
    jobs = _jobs(store, pair, info.id, wanted, new)

    def decoded() -> Iterator[tuple[int, Trajectory]]:
        if not new:
            return
        warm(pair, encoded)
        decoder = Decoder(pair, source, options.verifier)
        for ordinal, (item, request) in new.items():
            made = decoder.decode(request, item.category)
            store.append_trajectory(info.id, ordinal, made.trajectory, made.steps)
            progress("decode", ordinal + 1, len(encoded.items))
            yield ordinal, made.trajectory

    texts = chain(_stored(store, info.id, jobs, new), decoded())
    _look(store, pair, info.id, jobs, texts, progress)
    if info.state != "complete":
        store.finish_recording(info.id)
    return store.get_recording(info.id)


def begun_as(
    store: TraceStore, pair: LoadedPair, info: Recording
) -> tuple[Workload, DecodeOptions]:
    """The arguments that an unfinished recording of a workload was begun with. Raises TraceError
    where the pair is loaded otherwise."""
    assert info.workload_id is not None
    kept = info.options
    if info.engine != "native":
        raise TraceError(
            f"recording {info.id} is unfinished and was begun on {info.engine}; repeat the "
            "`record` that began it"
        )
    options = DecodeOptions(
        info.sampling, info.max_new_tokens, info.verifier, tuple(kept["stop_strings"]), kept["chat"]
    )
    if not recording_options(pair, options).items() <= kept.items():
        raise TraceError(
            f"recording {info.id} is unfinished and was begun on {kept['device']} in "
            f"{kept['dtype']}; go on with --device {kept['device']} --dtype {kept['dtype']}"
        )
    return store.get_workload(info.workload_id), options


Work = Callable[[LoadedPair, Trajectory], Panorama]


@dataclass(frozen=True)
class _Job:
    """Panoramas to be made of one draft: ``work`` of each ``missing`` request."""

    draft: str
    missing: Collection[int]
    work: Work


def look_around(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    wanted: Look,
    *,
    progress: Progress = silent,
) -> int:
    """Records the panoramas that a recording lacks, of drafts that may be newer than it; how many
    were made."""
    jobs = _jobs(store, pair, recording, wanted)
    return _look(store, pair, recording, jobs, _stored(store, recording, jobs), progress)


def _stored(
    store: TraceStore, recording: str, jobs: Sequence[_Job], new: Collection[int] = ()
) -> list[tuple[int, Trajectory]]:
    """The texts that jobs ask for, but those that are ``new``."""
    asked = {ordinal for job in jobs for ordinal in job.missing} - set(new)
    past = GAMMA_LIMIT * engine_named(store.get_recording(recording).engine).past_end
    found = store.iterate(recording, drafts=(), ordinals=sorted(asked)) if asked else ()
    texts = ((request.ordinal, request.trajectory) for request in found)
    return [(ordinal, replace(t, max_new_tokens=t.max_new_tokens + past)) for ordinal, t in texts]


def _look(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    jobs: Sequence[_Job],
    texts: Iterable[tuple[int, Trajectory]],
    progress: Progress,
) -> int:
    """Makes what is missing on every core, and stores it a batch at a time; how many were new."""
    asked: deque[tuple[int, int]] = deque()
    batches: list[list[tuple[int, Panorama]]] = [[] for _ in jobs]
    done, made = [0] * len(jobs), 0

    def items() -> Iterator[tuple[Work, Trajectory]]:
        for ordinal, trajectory in texts:
            for n, job in enumerate(jobs):
                if ordinal in job.missing:
                    _check_context(pair, job.draft, trajectory)
                    asked.append((n, ordinal))
                    yield job.work, trajectory

    count = sum(len(job.missing) for job in jobs)
    with closing(on_every_core(pair, _work, items(), count)) as results:
        for result in results:
            n, ordinal = asked.popleft()
            batches[n].append((ordinal, result))
            done[n] += 1
            if len(batches[n]) == BATCH:
                made += store.put_panoramas(recording, batches[n])
                batches[n] = []
            progress(f"panorama {jobs[n].draft}", done[n], len(jobs[n].missing))
    return made + sum(store.put_panoramas(recording, batch) for batch in batches if batch)


def _check_context(pair: LoadedPair, draft: str, text: Trajectory) -> None:
    """Raises TraceError for a text that a draft does not hold: it was decoded without it."""
    size, context = len(text.prompt_ids) + len(text.output_ids), pair.context([draft])
    if size > context.positions:
        raise TraceError(
            f"request {text.request_id}: its text of {size} tokens exceeds {context}; leave that "
            "draft out of the pair, or record shorter texts"
        )


def _work(pair: LoadedPair, item: tuple[Work, Trajectory]) -> Panorama:
    work, trajectory = item
    return work(pair, trajectory)


def _jobs(
    store: TraceStore, pair: LoadedPair, recording: str, wanted: Look, new: Collection[int] = ()
) -> list[_Job]:
    """What a recording lacks, draft by draft; all of ``new``, requests that are still to be
    decoded."""
    sampled = not store.get_recording(recording).sampling.greedy
    jobs = []
    for draft in wanted.drafts:
        least = _Held(draft, wanted.gamma_max)
        if draft != "ngram":
            covers = tuple(wanted.covers.get(draft, ()))
            width = max([1, wanted.tree_width, *(c.rule.width for c in covers)])
            depth = max([1, wanted.tree_depth, *(c.depth for c in covers)])
            least = _Held(draft, max(wanted.gamma_max, depth), width, depth, covers)
        asked = (least.gamma_max, least.width, least.depth, [c.name for c in least.covers])
        missing = {*store.missing_panoramas(recording, draft, *asked), *new}
        made = _united(store, recording, least, sampled=sampled) if missing else least
        jobs.append(_Job(draft, missing, partial(record_panorama, **vars(made))))
    return jobs


def cover_of(policy: Policy, *, sampled: bool, artifacts: Artifacts | None = None) -> Cover:
    """A policy's growth as something to record, to the deepest level that the policy can draft.
    Raises PolicyError for a chain."""
    if not policy.is_tree:
        raise PolicyError(f"policy {policy.id} drafts a chain; every recording covers those")
    return Cover(
        cover_name(policy.growth, sampled=sampled),
        compile_tree(policy, sampled=sampled, artifacts=artifacts),
        policy.depth_max,
    )


@dataclass(frozen=True)
class _Held:
    """What the panoramas of one draft are to hold at least, as :func:`record_panorama` is told."""

    draft: str
    gamma_max: int
    width: int = 1
    depth: int = 1
    covers: tuple[Cover, ...] = ()


def _united(store: TraceStore, recording: str, wanted: _Held, *, sampled: bool) -> _Held:
    """What is wanted and all that any stored panorama of the draft holds, so that recording it
    again loses nothing."""
    draft, (*held, names) = wanted.draft, store.most_held(recording, wanted.draft)
    gamma_max, width, depth = map(max, held, (wanted.gamma_max, wanted.width, wanted.depth))
    by_itself = {c.name for c in base_covers(gamma_max, width, depth, sampled=sampled)}
    rules = {c.name: c.rule for c in wanted.covers}
    for name in set(names) - by_itself - {ACCEPTANCE}:
        rules[name] = rules.get(name) or _stored_rule(name, draft, sampled, fitted(store))
    covers = tuple(Cover(name, rules[name], depth) for name in sorted(rules.keys() - by_itself))
    return _Held(draft, gamma_max, width, depth, covers)


def _stored_rule(name: str, draft: str, sampled: bool, artifacts: Artifacts) -> TreeRule:
    """The growth that a cover's name tells (:func:`runtime.recording.panoramas.cover_name`). Raises
    PolicyError when its artifact is gone."""
    data = json.loads(name)
    growth: dict[str, Any] = {"kind": data["kind"]}
    if data["kind"] == "static":
        growth["artifact" if isinstance(data["paths"], str) else "paths"] = data["paths"]
    else:
        growth |= {key: data[key] for key in ("width", "cap", "beta", "artifact") if key in data}
        score, _, sharpness = str(data.get("score", "probability")).removesuffix(")").partition("(")
        growth |= {"score": score} | ({"sharpness": float(sharpness)} if sharpness else {})
    # The depth is no part of a growth's name, nor of its rule.
    document = {"draft": draft, "growth": growth, "window": {"kind": "fixed", "gamma": 1}}
    if data["kind"] == "top_k":
        document["select"] = {"top_n": DEFAULT_TOP_N}

    def find(artifact: str) -> Fitted:
        found = artifacts(artifact)
        return replace(found, document={k: v for k, v in found.document.items() if k != "draft"})

    return compile_tree(
        parse_policy(document, where=f"stored cover {name}"), sampled=sampled, artifacts=find
    )


def put_policies(store: TraceStore, policies: Iterable[Policy]) -> None:
    """Stores policies and what their rounds name, so that whoever reads these can look it up."""
    for policy in policies:
        for named in {p.id: p for p in (policy, *policy.candidates)}.values():
            store.put_policy(named.id, named.spelled_out(), named.label())


@contextmanager
def record_served(
    store: TraceStore,
    pair_id: str,
    spec: PairSpec,
    options: DecodeOptions,
    about: Mapping[str, Any],
    policies: Iterable[Policy],
) -> Iterator[TrafficWriter]:
    """A new recording of what is served (source ``serve``), written while serving goes on, and
    ended however that ends: tokens and rounds only; panoramas are made when it is tuned on.
    ``about``: what else its texts depend on; ``policies``: those in force as it begins. What could
    not be written is in the writer's status.
    """
    store.put_pair(pair_id, spec.name, spec.to_json())
    put_policies(store, policies)
    most, verifier = options.max_new_tokens, options.verifier
    asked = Asked(pair_id, None, options.sampling, most, verifier, about, source="serve")
    info = store.create_recording(asked)
    with TrafficWriter(store, info.id) as writer:
        try:
            yield writer
        finally:
            writer.close()
            with suppress(DatabaseError):  # what serving itself raises matters more
                store.finish_recording(info.id)
