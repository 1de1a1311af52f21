"""Recording: decode a workload, store every text, and compute each draft's proposals at every
position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spectune.db.database_errors import DatabaseError
from spectune.engines.abilities import engine_named
from spectune.optimizer.execute import DecodeOptions, Encoded, encode, run, run_together
from spectune.optimizer.recording.processes import on_every_core
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import PolicySource
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import GAMMA_LIMIT, Policy
from spectune.runtime.policies.rules import ShortlistRule
from spectune.runtime.progress import Progress, silent
from spectune.runtime.recording.panoramas import extend_panorama, record_panorama
from spectune.traces.errors import TraceError
from spectune.traces.schema import Workload
from spectune.traces.store import Asked, TraceStore
from spectune.traces.store.traffic import TrafficWriter
from spectune.traces.tables import Panorama, Recording, Trajectory

Nodes = tuple[Any, Any]


def whole_texts(trajectories: Iterable[Trajectory]) -> list[list[int]]:
    """Token ids of each text, prompt and output: what a profile is measured on."""
    return [[*t.prompt_ids.tolist(), *t.output_ids.tolist()] for t in trajectories]


def recording_options(pair: LoadedPair, options: DecodeOptions) -> dict[str, Any]:
    """What else a recording's texts depend on, as stored with it."""
    return {
        "stop_strings": list(options.stop_strings),
        "chat": options.chat,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.device.type,
        **({"hardware": pair.place["hardware"]} if pair.device.type == "cuda" else {}),
    }


def asked_of(pair: LoadedPair, workload_id: str, options: DecodeOptions) -> Asked:
    """What a store finds or makes a recording by."""
    about = recording_options(pair, options)
    most, verifier = options.max_new_tokens, options.verifier
    return Asked(pair.id, workload_id, options.sampling, most, verifier, about)


@dataclass(frozen=True)
class PanoramaSpec:
    """Panoramas to record: of ``drafts``, with chains of ``gamma_max`` tokens and, with a
    ``tree_width`` above 0, trees of so many children and ``tree_depth`` levels (not of ``ngram``).
    """

    drafts: Collection[str]
    gamma_max: int = 16
    tree_width: int = 0
    tree_depth: int = 0

    def size_of(self, draft: str) -> tuple[int, int, int]:
        """Tokens of a draft's chains, children of a node of its trees, and their levels."""
        if draft == "ngram":
            return self.gamma_max, 1, 1
        depth = max(1, self.tree_depth)
        return max(self.gamma_max, depth), max(1, self.tree_width), depth


def record(
    store: TraceStore,
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    spec: PanoramaSpec,
    source: PolicySource,
    *,
    clients: int = 1,
    fresh: bool = False,
    reuse_complete: bool = False,
    progress: Progress = silent,
) -> Recording:
    """Decodes and stores every request, ``clients`` at a time, then the panoramas of its texts;
    what is stored already is not done again.

    A recording that was begun with the same arguments and not finished is resumed, unless
    ``fresh``; with ``reuse_complete`` a finished one counts as well. The policy in ``source``
    changes how fast this goes, never what is recorded. Every request is committed as it
    ends, so that a kill loses at most those in hand.
    """
    encoded = encode(pair, workload, options, spec.drafts)
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    request = asked_of(pair, store.put_workload(workload), options)
    info = None if fresh else store.find_recording(request, state="recording")
    if info is None and reuse_complete and not fresh:
        info = store.find_recording(request, state="complete")
    info = info or store.create_recording(request)
    put_policies(store, [source.current().policy])
    _decode(store, pair, info.id, encoded, source, clients, progress)
    record_panoramas(store, pair, info.id, spec, progress=progress)
    if info.state != "complete":
        store.finish_recording(info.id)
    return store.get_recording(info.id)


def _decode(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    encoded: Encoded,
    source: PolicySource,
    clients: int,
    progress: Progress,
) -> None:
    """Decodes and stores the requests whose texts a recording lacks."""
    stored, total = store.recorded_ordinals(recording), len(encoded.items)
    lacking = {
        request.id: ordinal
        for ordinal, (_, request) in enumerate(encoded.items)
        if ordinal not in stored
    }
    if not lacking:
        return
    items = tuple(item for n, item in enumerate(encoded.items) if n not in stored)
    part = replace(encoded, items=items)
    together = run_together(pair, source, part, clients) if clients > 1 else None
    decoding = together or run(pair, source, part)
    for done, decoded in enumerate(decoding, total - len(lacking) + 1):
        ordinal = lacking[decoded.trajectory.request_id]
        store.append_trajectory(recording, ordinal, decoded.trajectory, decoded.steps)
        progress("decode", done, total)


def record_panoramas(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    spec: PanoramaSpec,
    *,
    ordinals: Collection[int] | None = None,
    progress: Progress = silent,
) -> int:
    """Records, on every core, the panoramas that a recording lacks, of some requests or all, and
    returns how many. Raises TraceError for a text that a draft does not hold."""
    info, added = store.get_recording(recording), 0
    for draft in spec.drafts:
        gamma_max, width, depth = spec.size_of(draft)
        lacking = set(store.missing_panoramas(recording, draft, gamma_max, width, depth))
        if ordinals is not None:
            lacking &= set(ordinals)
        if (extent := info.drafts.get(draft)) is not None:  # what replaces a panorama is as large
            gamma_max, width = max(gamma_max, extent.gamma_max), max(width, extent.width)
            depth = max(depth, extent.depth)
        size: dict[str, Any] = {"gamma_max": gamma_max, "width": width, "depth": depth}
        make = partial(record_panorama, draft=draft, **size)
        added += make_panoramas(store, pair, recording, draft, make, lacking, progress=progress)
    return added


def make_panoramas(
    store: TraceStore,
    pair: LoadedPair,
    recording: str,
    draft: str,
    make: Callable[[LoadedPair, Trajectory], Panorama],
    ordinals: Collection[int],
    *,
    progress: Progress = silent,
) -> int:
    """Stores the panorama of a draft that ``make`` returns of each of some requests' texts, made on
    every core; how many. Raises TraceError for a text that the draft does not hold."""
    stored = [*store.iterate(recording, drafts=(), ordinals=sorted(ordinals))] if ordinals else []
    past = GAMMA_LIMIT * engine_named(store.get_recording(recording).engine).past_end
    texts = []
    for text in (request.trajectory for request in stored):
        texts.append(replace(text, max_new_tokens=text.max_new_tokens + past))
    _check_context(pair, draft, texts)
    with closing(on_every_core(pair, make, texts, len(texts))) as panoramas:
        for n, panorama in enumerate(panoramas):
            store.put_panoramas(recording, [(stored[n].ordinal, panorama)])
            progress(f"panorama {draft}", n + 1, len(texts))
    return len(texts)


def _check_context(pair: LoadedPair, draft: str, texts: Iterable[Trajectory]) -> None:
    """Raises TraceError for a text that a draft does not hold: it was decoded without it."""
    context = pair.context([draft])
    for text in texts:
        size = len(text.prompt_ids) + len(text.output_ids)
        if size > context.positions:
            raise TraceError(
                f"request {text.request_id}: its text of {size} tokens exceeds {context}; leave "
                "that draft out of the pair, or record shorter texts"
            )


def draft_reader(
    store: TraceStore,
    pair: LoadedPair | Callable[[], LoadedPair],
    recording: str,
    trajectories: Sequence[Trajectory],
    panoramas: Mapping[str, Sequence[Panorama]],
    ordinals: Sequence[int],
    progress: Progress = silent,
    rules: Mapping[str, ShortlistRule] | None = None,
) -> Callable[[str, Mapping[int, Nodes]], dict[int, Panorama]]:
    """Returns what reads the distributions that a replay lacks and stores them
    (:attr:`optimizer.replay.replay_trace.ReplayTrace.reader`). ``pair`` may be loaded when it is
    first needed. ``rules``: shortlists by the names under which drafts were recorded with them."""

    def read(draft: str, nodes: Mapping[int, Nodes]) -> dict[int, Panorama]:
        nonlocal pair
        if not isinstance(pair, LoadedPair):
            pair = pair()
        rule = (rules or {}).get(draft)
        items = [(trajectories[i], panoramas[draft][i], *nodes[i], rule) for i in nodes]
        extended: dict[int, Panorama] = {}
        with closing(on_every_core(pair, _extend, items, len(items))) as results:
            for i, panorama in zip(nodes, results, strict=True):
                extended[i] = panorama
                progress(f"trees of {draft}", len(extended), len(items))
        store.put_panoramas(recording, [(ordinals[i], p) for i, p in extended.items()])
        return extended

    return read


def _extend(pair: LoadedPair, item: tuple[Trajectory, Panorama, Any, Any, Any]) -> Panorama:
    return extend_panorama(pair, *item)


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
    store.put_pair(pair_id, spec.name, spec.to_json(), spec.models)
    put_policies(store, policies)
    most, verifier = options.max_new_tokens, options.verifier
    request = Asked(pair_id, None, options.sampling, most, verifier, about, source="serve")
    info = store.create_recording(request)
    with TrafficWriter(store, info.id) as writer:
        try:
            yield writer
        finally:
            writer.close()
            with suppress(DatabaseError):  # what serving itself raises matters more
                store.finish_recording(info.id)
