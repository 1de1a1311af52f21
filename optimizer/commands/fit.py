"""`fit`: what trees, shortlists and a draft for each prompt need, fitted to a recording and stored
as an artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spectune.optimizer.commands.common import (
    Talk,
    open_store,
    pair_of,
    policy_named,
    recording_meant,
)
from spectune.optimizer.commands.decoding import load
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.fit.by_prompt import fit_recorded
from spectune.optimizer.fit.c2t import fit_c2t
from spectune.optimizer.fit.dynaspec import fit_router
from spectune.optimizer.fit.fr_spec import fit_fr_spec
from spectune.optimizer.fit.heterospec import fit_heterospec
from spectune.optimizer.fit.recorded_trees import tree_source
from spectune.optimizer.fit.sequoia import fit_sequoia
from spectune.optimizer.fit.shared import StoredFit
from spectune.optimizer.tuning.sources import sample_since
from spectune.options import options_of
from spectune.settings import Fit
from spectune.traces.errors import ConfigError, PolicyError
from spectune.traces.store import TraceStore

TREES: Mapping[str, Any] = {
    "bins": fit_heterospec,
    "classifier": fit_c2t,
    "static-tree": fit_sequoia,
}
"""Fits of recorded trees."""
HEADS: Mapping[str, Any] = {"frequencies": fit_fr_spec, "router": fit_router}
"""Fits that read the pair's models."""


def fit(s: Fit, talk: Talk) -> Result:
    talk.no_effect(s, [s.kind, "native"])
    taken = [o for o in options_of(type(s.fit)).values() if s.kind in o.acts]
    options = {o.key: v for o in taken if (v := getattr(s.fit, o.key)) not in (None, ())}
    with open_store(s, create=s.kind not in TREES) as store:
        if s.kind == "chooser":
            stored = _chooser(store, s, talk)
        elif s.kind in TREES:
            stored = _trees(store, s, talk, options)
        else:
            stored = _head(store, s, talk, options)
    return fit_result(stored)


def _recording(store: TraceStore, s: Fit, talk: Talk) -> str:
    """The id of a recording; with ``since`` that of a new one, a sample of what its pair decoded
    since then."""
    info = recording_meant(s, store, s.recording)
    if s.since is not None:
        info = sample_since(store, info.pair_id, s.since, tell=talk.tell)
    return info.id


def _trees(store: TraceStore, s: Fit, talk: Talk, options: dict[str, Any]) -> StoredFit:
    if s.draft is None:
        raise ConfigError("--draft is needed: whose trees are fitted to")
    source = tree_source(store, _recording(store, s, talk), s.draft)
    stored: StoredFit = TREES[s.kind](source, progress=talk.progress, **options)
    return stored


def _head(store: TraceStore, s: Fit, talk: Talk, options: dict[str, Any]) -> StoredFit:
    """A fit that reads the pair itself; frequencies are every draft's."""
    if s.kind == "router" and s.draft is None:
        raise ConfigError("--draft is needed: whose output head is fitted to")
    recording = "" if s.corpus else _recording(store, s, talk)
    pair = load(s, pair_of(s, store, recording or None), talk, notes=False)
    drafts = (s.draft,) if s.kind == "router" and s.draft is not None else ()
    options["corpus"] = s.corpus
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    function = HEADS[s.kind]
    stored: StoredFit = function(store, recording, pair, *drafts, progress=talk.progress, **options)
    return stored


def _chooser(store: TraceStore, s: Fit, talk: Talk) -> StoredFit:
    recording = _recording(store, s, talk)
    pair = load(s, pair_of(s, store, recording), talk, notes=False)
    policies = {}
    for name in s.policy:
        policy = policy_named(store, name, pair.id, pair.device_name, s.deployment, talk)
        if policy.candidates != (policy,) or policy.id in policies:
            raise PolicyError(f"--policy {name}: give different policies without by_prompt")
        policies[policy.id] = policy
    store.put_pair(pair.id, pair.spec.name, pair.spec.to_json(), pair.spec.models)
    options: dict[str, Any] = {"profile": s.profile, "progress": talk.progress}
    return fit_recorded(store, recording, pair, tuple(policies.values()), **options)


def fit_result(stored: StoredFit) -> Result:
    """What was fitted: its rows as tables, its figures as one, and the policy to begin with unless
    that is a draft alone."""
    data = stored.to_json()
    lists = {key: value for key, value in data.items() if isinstance(value, list) and value}
    figures = [
        {"figure": key, "value": value}
        for key, value in data.items()
        if isinstance(value, (str, int, float))
    ]
    tables = [Table(v, title=key) for key, v in lists.items() if isinstance(v[0], Mapping)]
    tables.append(Table(figures, title=f"{stored.kind} fitted"))
    is_draft = stored.policy.keys() == {"draft"} and isinstance(stored.policy["draft"], str)
    start = "" if is_draft else f"; a policy with it: {json.dumps(stored.policy)}"
    return Result(f"artifact {stored.artifact}{start}", data, tables[0].rows, tables)
