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
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.chains import record_panorama
from spectune.runtime.recording.trees import Cover, base_covers, cover_name, record_tree_panorama
from spectune.runtime.trees.grow import TreeRule
from spectune.runtime.trees.rules import compile_tree
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.recording import DESIGNED
from spectune.traces.schema import Trajectory, Workload
from spectune.traces.store import Asked, RecordingInfo, TraceStore
from spectune.traces.store.traffic import TrafficWriter

BATCH = 4
"""Panoramas of a draft stored in one transaction; of trees each takes a second to make."""


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
    """What to record of texts: the panoramas of ``drafts`` up to ``gamma_max`` (0: no chains), and,
    with a ``tree_width`` above 0, trees of so many children and ``tree_depth`` levels.

    ``covers`` are growths beside EAGLE-2's, by draft; all are recorded to the same depth, so width
    and depth are raised to the largest cover's. What replaces narrower trees holds all that any
    stored tree of the draft holds. EAGLE heads have no chain panorama: what they propose depends on
    where a round began, so trees hold their chains. A draft that cannot grow trees has none.
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
    begun: RecordingInfo | None = None,
    progress: Progress = silent,
) -> RecordingInfo:
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
    _look(pair, info.id, jobs, texts, progress)
    if info.state != "complete":
        store.finish_recording(info.id)
    return store.get_recording(info.id)


def begun_as(
    store: TraceStore, pair: LoadedPair, info: RecordingInfo
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


Work = Callable[[LoadedPair, Trajectory], Any]


@dataclass(frozen=True)
class _Job:
    """Panoramas to be made of one draft: ``work`` of each missing request, stored by ``put``."""

    phase: str
    draft: str
    missing: Collection[int]
    work: Work
    put: Callable[[str, list[tuple[int, Any]]], int]


def look_around(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    wanted: Look,
    *,
    progress: Progress = silent,
) -> int:
    """Records the panoramas and trees that a recording lacks, of drafts that may be newer than it;
    how many were made."""
    jobs = _jobs(store, pair, recording, wanted)
    return _look(pair, recording, jobs, _stored(store, recording, jobs), progress)


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
    pair: LoadedPair,
    recording: str,
    jobs: Sequence[_Job],
    texts: Iterable[tuple[int, Trajectory]],
    progress: Progress,
) -> int:
    """Makes what is missing on every core, and stores it a batch at a time; how many were new."""
    asked: deque[tuple[int, int]] = deque()
    batches: list[list[tuple[int, Any]]] = [[] for _ in jobs]
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
                made += jobs[n].put(recording, batches[n])
                batches[n] = []
            progress(jobs[n].phase, done[n], len(jobs[n].missing))
    rest = zip(jobs, batches, strict=True)
    return made + sum(job.put(recording, batch) for job, batch in rest if batch)


def _check_context(pair: LoadedPair, draft: str, text: Trajectory) -> None:
    """Raises TraceError for a text that a draft does not hold: it was decoded without it."""
    size, context = len(text.prompt_ids) + len(text.output_ids), pair.context([draft])
    if size > context.positions:
        raise TraceError(
            f"request {text.request_id}: its text of {size} tokens exceeds {context}; leave that "
            "draft out of the pair, or record shorter texts"
        )


def _work(pair: LoadedPair, item: tuple[Work, Trajectory]) -> Any:
    work, trajectory = item
    return work(pair, trajectory)


def _jobs(
    store: TraceStore, pair: LoadedPair, recording: str, wanted: Look, new: Collection[int] = ()
) -> list[_Job]:
    """What a recording lacks, draft by draft; all of ``new``, requests that are still to be
    decoded."""
    gamma, covers = wanted.gamma_max, wanted.covers
    jobs = []
    for draft in wanted.drafts:
        if draft in pair.chain_drafts and gamma:
            missing = {*store.missing_panoramas(recording, draft, gamma), *new}
            work = partial(record_panorama, draft=draft, gamma_max=gamma)
            jobs.append(_Job(f"panorama {draft}", draft, missing, work, store.put_panoramas))

    def grow(phase: str, trees: _Trees) -> None:
        missing = {*_lacking(store, recording, trees), *new}
        made = _united(store, recording, trees) if missing else trees
        work = partial(record_tree_panorama, **vars(made))
        jobs.append(_Job(f"{phase} {trees.draft}", trees.draft, missing, work, store.put_panoramas))

    for draft in (d for d in wanted.drafts if d != "ngram"):
        own = tuple(covers.get(draft, ()))
        chains = 0 if draft in pair.chain_drafts else gamma
        if wanted.tree_width:
            width = max([wanted.tree_width, *(c.rule.width for c in own)])
            depth = max([wanted.tree_depth, *(c.depth for c in own)])
            grow("trees", _Trees(draft, width, depth, own, chains))
        elif chains:
            grow("panorama", _Trees(draft, 1, 1, (), chains))
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
class _Trees:
    """What one draft's trees are to hold at least, as :func:`record_tree_panorama` is told;
    ``chain_depth`` is that of a head's chains."""

    draft: str
    width: int
    depth: int
    covers: tuple[Cover, ...]
    chain_depth: int


def _lacking(store: TraceStore, recording: str, wanted: _Trees) -> set[int]:
    """Ordinals whose stored trees do not hold what is wanted. Chains are held by trees as deep, or
    by a chain's cover."""

    def ask(depth: int, *also: str) -> set[int]:
        found = store.missing_panoramas(
            recording,
            wanted.draft,
            depth,
            width=wanted.width,
            covers=(*(c.name for c in wanted.covers), *also),
        )
        return set(found)

    missing = ask(max(wanted.depth, wanted.chain_depth))
    if missing and wanted.chain_depth > wanted.depth:
        for name in store.tree_limits(recording, wanted.draft)[2]:
            if _chain_depth(name) >= wanted.chain_depth:
                missing &= ask(wanted.depth, name)
    return missing


def _united(store: TraceStore, recording: str, wanted: _Trees) -> _Trees:
    """What is wanted and all that any stored tree of the draft holds, so that recording it again
    loses nothing."""
    width, depth, names = store.tree_limits(recording, wanted.draft)
    width, depth = max(width, wanted.width), max(depth, wanted.depth)
    chains = {c for name in names if (c := _chain_depth(name))} | {wanted.chain_depth}
    if width == 1:
        depth = max(depth, *chains)
    sampled = not store.get_recording(recording).sampling.greedy
    base = base_covers(width, depth, sampled=sampled)
    by_itself = {c.name for c in base}
    rules = {c.name: c.rule for c in wanted.covers}
    for name in names:
        if name not in rules and name not in by_itself and not _chain_depth(name):
            rules[name] = _stored_rule(name, wanted.draft, sampled, fitted(store))
    covers = [Cover(name, rule, depth) for name, rule in rules.items() if name not in by_itself]
    one = TreeRule(width=1, frontier=1)
    for c in sorted(chains - {0}):
        name = json.dumps({"depth": c, "kind": "chain"}, separators=(",", ":"))
        covers.append(Cover(name, one, c))
    deepest = max(chains) if max(chains) > depth else 0
    return _Trees(wanted.draft, width, depth, tuple(covers), deepest)


def _chain_depth(name: str) -> int:
    """The depth that a cover's name tells, of those that say how deep chains were recorded where
    that is deeper than the trees; else 0."""
    data = json.loads(name)
    return int(data["depth"]) if data["kind"] == "chain" else 0


def _stored_rule(name: str, draft: str, sampled: bool, artifacts: Artifacts) -> TreeRule:
    """The growth that a cover's name tells (:func:`runtime.recording.trees.cover_name`). Raises
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
