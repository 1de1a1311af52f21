"""What ``import spectune`` offers: tune, record, simulate, run and open, with results that
notebooks show."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any

from spectune.db import open_database
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.deployment import deployment_of
from spectune.optimizer.execute import DecodeOptions, encode, outcome
from spectune.optimizer.execute import run as execute
from spectune.optimizer.inputs import load_workload, narrowed, outcome_json, policy_of
from spectune.optimizer.overlong import Overlong, made_to_fit
from spectune.optimizer.record import PanoramaSpec
from spectune.optimizer.record import record as do_record
from spectune.optimizer.serving import last_good
from spectune.optimizer.simulate.trace import simulate as do_simulate
from spectune.optimizer.tune import TuneOptions
from spectune.optimizer.tune import tune as do_tune
from spectune.runtime.decoder import drafts_of, prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import PairSpec, read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.progress import Progress, silent
from spectune.runtime.text_codec import check_conversations
from spectune.traces.acceptance import hardly_accepted
from spectune.traces.errors import PairError, WorkloadError
from spectune.traces.sanity import checked
from spectune.traces.schema import Outcome, Sampling, Workload
from spectune.traces.store import TraceStore
from spectune.traces.store.publications import DEFAULT_DEPLOYMENT
from spectune.traces.store.query import first_positions
from spectune.traces.workloads import Line, make_workload

AnyPath = str | os.PathLike[str]
Prompts = AnyPath | Workload | Iterable[str | Mapping[str, Any]]
"""A workload as ``--workload`` names it (a file, ``demo``), or texts, or objects as a
workload's lines are."""
SHOWN = 50
"""Rows of a result that a notebook shows."""


@dataclass(frozen=True)
class Result:
    """What a call found. ``data`` is what the command prints with ``--json``, also by
    ``result[key]``; ``rows`` its table."""

    text: str
    data: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __repr__(self) -> str:
        return self.text

    @property
    def policy(self) -> Mapping[str, Any]:
        """The policy's document: the winner's of a tuning. Raises KeyError where no policy was
        concerned."""
        found: Mapping[str, Any] = self.data.get("winner", self.data)["policy"]
        return found

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame. Raises ImportError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "to_pandas() needs pandas: pip install pandas (`rows` has the same as dictionaries)"
            ) from None
        return pandas.DataFrame(list(self.rows))

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>"
            for row in self.rows[:SHOWN]
        )
        more = f"<p>{len(self.rows) - SHOWN} more rows</p>" if len(self.rows) > SHOWN else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{escape(self.text)}</p>{table}{more}"


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = value if isinstance(value, int) else format(value, ".4g")
        return f'<td style="text-align:right">{number}</td>'
    shown = "" if value is None else str(value)
    cut = shown if len(shown) <= 120 else shown[:117] + "..."
    return f'<td style="text-align:left">{escape(cut)}</td>'


@contextmanager
def open(db: AnyPath | None = None, *, create: bool = False) -> Iterator[TraceStore]:
    """The store of a database, closed at the end of the block: recordings, studies, publications.
    Without ``create`` it must exist, with it a new one is made by what is stored first.

    ``db`` is a file or a URL; by default what SPECTUNE_DB says, else ``spectune.db``. Raises
    DatabaseError.
    """
    with open_database(
        os.fspath(db or os.environ.get("SPECTUNE_DB") or "spectune.db"), create=create
    ) as database:
        yield TraceStore(database)


def record(
    target: str | None = None,
    drafts: Mapping[str, str] | None = None,
    prompts: Prompts = "demo",
    *,
    pair: AnyPath | LoadedPair | None = None,
    db: AnyPath | None = None,
    gamma_max: int = 16,
    **how: Any,
) -> Result:
    """Decodes prompts and stores the texts, with what every draft would have proposed from every
    start of them.

    ``target`` and ``drafts`` are checkpoints, or ``pair`` a pair's file, ``demo`` or a loaded pair
    (by default SPECTUNE_PAIR's). ``how`` takes the fields of DecodeOptions and Sampling,
    ``device``, ``dtype``, ``threads``, and of a workload ``limit``, ``limit_seed``, ``categories``,
    ``overlong``, ``turns`` and ``bad_rows`` (of no Workload) and ``column`` (of a file). A row is a
    request.
    """
    loaded, workload, options, overlong = _prepared("record", target, drafts, prompts, pair, how)
    workload = _fitted(loaded, workload, options, overlong)
    plain = StaticSource(prepare(AUTOREGRESSIVE, loaded.draft_names))
    with open(db, create=True) as store, loaded.torch_threads():
        info = do_record(
            store, loaded, workload, options, PanoramaSpec(loaded.draft_names, gamma_max), plain
        )
        texts = store.load(info.id, (), skip_corrupted=True).trajectories
        first = first_positions(store, info.id)
    found = checked(texts)
    _warn([*found.lines(), *hardly_accepted(first, loaded.heads)])
    rows = [
        {
            "request": t.request_id,
            "category": t.category,
            "prompt_tokens": len(t.prompt_ids),
            "output_tokens": len(t.output_ids),
            "finish": t.finish,
            "text": loaded.text(t.output_ids.tolist()),
        }
        for t in texts
    ]
    data = {"recording": info.id, "pair": info.pair_id, **info.to_json()}
    data["first_position"] = {draft: one.to_json() for draft, one in first.items()}
    said = f"recording {info.id}: {info.n_requests} requests, {info.n_output_tokens} tokens"
    return Result(said, {**data, "workload": found.to_json()}, rows)


def tune(
    target: str | None = None,
    drafts: Mapping[str, str] | None = None,
    prompts: Prompts = "demo",
    *,
    pair: AnyPath | LoadedPair | None = None,
    db: AnyPath | None = None,
    progress: Progress = silent,
    **how: Any,
) -> Result:
    """Finds the fastest policy, proves it by execution and publishes it, as the command does.
    Arguments are :func:`record`'s, and ``how`` takes TuneOptions' fields as well (``publish``,
    ``budget_s``, ``deployment``, ``tree_width`` ...). A row is a policy that was executed, fastest
    first (by the race: on other requests tokens/s do not compare)."""
    own = [f.name for f in fields(TuneOptions)]
    loaded, workload, options, overlong = _prepared("tune", target, drafts, prompts, pair, how, own)
    wanted = TuneOptions(**{"options": options, "tell": lambda line: _warn([line]), **how})
    workload = _fitted(loaded, workload, options, overlong, wanted.drafts or None)
    with open(db, create=True) as store, loaded.torch_threads():
        tuned = do_tune(store, loaded, workload, wanted, progress=progress)
    data, version = tuned.to_json(), tuned.published and tuned.published.version
    done = f"published as version {version}" if version else "nothing published"
    kinds = ("predicted", "predicted_after_factor", "measured")
    speeds = (f"{kind}_tokens_per_s" for kind in kinds)
    keys = ("role", "label", *speeds, "ratio_to_incumbent", "ratio_to_autoregressive")
    ranked = sorted(data["candidates"], key=lambda c: -float(c["ratio_to_leader"]))
    roles: dict[str, list[str]] = {}
    for c in ranked:
        roles.setdefault(c["id"], []).append(c["role"])
    rows = {
        c["id"]: {**{key: c[key] for key in keys}, "role": ", ".join(roles[c["id"]])}
        for c in ranked
    }
    return Result(
        f"{tuned.winner.policy.label()}: {tuned.reason}; {done}",
        data,
        list(rows.values()),
    )


def simulate(
    policy: str | Mapping[str, Any],
    recording: str = "latest",
    *,
    db: AnyPath | None = None,
    device: str | None = None,
    deployment: str | None = None,
    since: timedelta | datetime | None = None,
) -> Result:
    """Replays a recording, or all that its pair decoded ``since`` a moment (UTC where it says no
    zone; a timedelta is so long ago), under any policy: rounds and tokens exactly; seconds by the
    newest latency profile of its pair, 0 without one. ``policy`` is a document, or what
    ``--policy`` takes; ``active`` is by default that of the recorded engine's deployment. A row is
    a request."""
    with open(db) as store:
        info = store.get_recording(recording)
        on = device or str(info.options.get("device", "cpu"))
        where = deployment or deployment_of(info.engine)
        chosen = _policy(store, policy, info.pair_id, on, where)
        dtype = info.options.get("dtype")
        profile = store.profile_of(info.pair_id, device=on, dtype=dtype)
        moment = store.clock() - since if isinstance(since, timedelta) else since
        if moment is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        said: list[str] = []
        replayed, _, approximate = do_simulate(
            store, info.id, chosen, profile, since=moment, tell=said.append
        )
    _warn([*said, *([f"approximate: {approximate}"] if approximate else [])])
    return _outcome(replayed.outcome(), chosen, "predicted")


def run(
    policy: str | Mapping[str, Any] = "active",
    target: str | None = None,
    drafts: Mapping[str, str] | None = None,
    prompts: Prompts = "demo",
    *,
    pair: AnyPath | LoadedPair | None = None,
    db: AnyPath | None = None,
    deployment: str = DEFAULT_DEPLOYMENT,
    **how: Any,
) -> Result:
    """Executes a policy on prompts and measures it; nothing is stored. Arguments are
    :func:`record`'s. A row is a request, with its text."""
    loaded, workload, options, overlong = _prepared("run", target, drafts, prompts, pair, how)
    with open(db, create=True) as store, loaded.torch_threads():
        profile = store.profile_of(loaded.id, **loaded.place)
        if policy == "active":
            plan = last_good(store, loaded, profile, options.verifier, options.sampling, deployment)
        else:
            chosen = _policy(store, policy, loaded.id, loaded.device.type, deployment)
            find = fitted(store, loaded.id)
            plan = prepare_for(loaded, chosen, profile=profile, artifacts=find)
        used = drafts_of(plan.policy)
        workload = _fitted(loaded, workload, options, overlong, used)
        encoded = encode(loaded, workload, options, used)
        decoded = list(execute(loaded, StaticSource(plan), encoded))
    texts = [loaded.text(d.trajectory.output_ids.tolist()) for d in decoded]
    return _outcome(outcome(plan.policy.label(), decoded), plan.policy, "measured", texts)


def _prepared(
    call: str,
    target: str | None,
    drafts: Mapping[str, str] | None,
    prompts: Prompts,
    pair: AnyPath | LoadedPair | None,
    how: dict[str, Any],
    own: Sequence[str] = (),
) -> tuple[LoadedPair, Workload, DecodeOptions, Overlong]:
    """A pair, prompts, how they are decoded and what is done with those that do not fit
    (:func:`_fitted`); what is used of ``how`` is taken out of it. Raises TypeError, before anything
    is read, where more is left than what is the ``call``'s ``own``."""

    def taken(names: Iterable[str]) -> dict[str, Any]:
        return {name: how.pop(name) for name in names if name in how}

    sampling = Sampling(**taken(f.name for f in fields(Sampling)))
    options = DecodeOptions(sampling, **taken(f.name for f in fields(DecodeOptions)[1:]))
    read, drawn = (
        taken(("turns", "column", "bad_rows")),
        taken(("limit", "limit_seed", "categories")),
    )
    overlong, where = how.pop("overlong", "error"), taken(("device", "dtype", "threads"))
    if left := how.keys() - set(own):
        raise TypeError(f"spectune.{call}() got unexpected arguments: {', '.join(sorted(left))}")
    found = _pair(target, drafts, pair, where)
    workload = narrowed(_workload(prompts, read), **drawn)
    if not isinstance(found, LoadedPair):
        check_conversations(found.target, workload.requests, chat=options.chat)
    loaded = found if isinstance(found, LoadedPair) else load_pair(found, **where)
    return loaded, workload, options, overlong


def _fitted(
    pair: LoadedPair,
    workload: Workload,
    options: DecodeOptions,
    overlong: Overlong,
    drafts: Collection[str] | None = None,
) -> Workload:
    """The workload with its prompts in the context of the target and the ``drafts`` that are used
    (None: all); warns of what was done."""
    kept, done = made_to_fit(pair, workload, options, overlong, drafts)
    _warn([*workload.notes, *([done] if done else [])])
    return kept


def _pair(
    target: str | None,
    drafts: Mapping[str, str] | None,
    pair: AnyPath | LoadedPair | None,
    where: Mapping[str, Any],
) -> PairSpec | LoadedPair:
    """The pair meant. Raises PairError as the command line does, and for what a loaded one cannot
    take."""
    if isinstance(pair, LoadedPair):
        beside = {"target": target, "drafts": drafts, **where}
        if given := [name for name, value in beside.items() if value is not None]:
            raise PairError(
                f"{', '.join(given)}: the pair is loaded already; say them where it is loaded"
            )
        return pair
    if target is None and not drafts:
        pair = pair or os.environ.get("SPECTUNE_PAIR")
    return read_pair(
        None if pair is None else os.fspath(pair),
        None if target is None else os.fspath(target),
        [f"{name}={os.fspath(path)}" for name, path in (drafts or {}).items()],
    )


def _workload(prompts: Prompts, read: dict[str, Any]) -> Workload:
    if isinstance(prompts, (str, os.PathLike)):
        return load_workload([os.fspath(prompts)], **read)
    is_whole = isinstance(prompts, Workload)
    if refused := sorted(read.keys() - (set() if is_whole else {"turns", "bad_rows"})):
        kind = "a Workload" if is_whole else "a list of them"
        raise WorkloadError(f"{', '.join(refused)}: for prompts of a file, not for {kind}")
    if isinstance(prompts, Workload):
        return prompts
    given = [{"prompt": p} if isinstance(p, str) else p for p in prompts]
    lines = (Line(f"prompts[{n}]", prompt, str(n)) for n, prompt in enumerate(given))
    return make_workload("prompts", lines, **read)


def _policy(
    store: TraceStore, policy: str | Mapping[str, Any], pair_id: str, device: str, deployment: str
) -> Policy:
    if isinstance(policy, Mapping):
        return parse_policy(json.loads(json.dumps(policy)), where="policy")
    return policy_of(store, policy, pair_id, device, deployment) or AUTOREGRESSIVE


def _outcome(found: Outcome, policy: Policy, verb: str, texts: Sequence[str] = ()) -> Result:
    tokens = ("emitted_tokens", "accepted_tokens", "drafted_tokens", "mean_accepted_length")
    rows = []
    for n, request in enumerate(found.per_request):
        counts = request.counts.to_json()
        row = {"request": request.request_id, "category": request.category}
        row |= {key: counts[key] for key in ("rounds", *tokens, "seconds", "tokens_per_s")}
        rows.append({**row, "text": texts[n]} if texts else row)
    total = found.total
    speed = f", {total.tokens_per_s:.1f} tokens/s {verb}" if total.seconds else ""
    said = (
        f"{policy.label()}: {total.emitted_tokens} tokens in {total.rounds} rounds, "
        f"{total.mean_accepted_length:.2f} a round{speed}"
    )
    return Result(said, outcome_json(found, policy), rows)


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        warnings.warn(line, stacklevel=3)
