"""`policies`: what is published, and publishing by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from spectune.engines.export import engine_line, engine_settings
from spectune.optimizer.artifacts import fitted
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.optimizer.commands.session import (
    Talk,
    device_of,
    names_pair,
    open_store,
    pair_of,
    policy_named,
)
from spectune.optimizer.deployment import answers_in_words, refusal
from spectune.optimizer.inputs import named_policy, published_policy
from spectune.runtime.policies.document import Policy, differences
from spectune.runtime.policies.plan import prepare
from spectune.settings import (
    Placed,
    PoliciesActivate,
    PoliciesExport,
    PoliciesList,
    PoliciesRollback,
    PoliciesShow,
)
from spectune.traces.errors import ConfigError, PolicyError
from spectune.traces.store import TraceStore
from spectune.traces.store.query import in_force
from spectune.traces.tables import Acknowledgement, Publication


def _lookup(s: Placed, *names: str) -> AbstractContextManager[TraceStore]:
    """The store to look policies up in; it may be missing where each is a file or a document."""
    return open_store(s, create=all(map(named_policy, names)))


def list_publications(s: PoliciesList, talk: Talk) -> Result:
    spec = pair_of(s) if names_pair(s) else None
    pair_id = None if spec is None else spec.id
    device = device_of(s.device) if spec or s.device != "auto" else None
    with open_store(s) as store:
        names = {pair.id: pair.name for pair in store.list_pairs()}
        until = {row["version"]: row["until"] for row in in_force(store)}
        publications = [
            (p, store.acknowledgements(p.version))
            for p in store.list_publications(pair_id, device, s.deployment)
            if not s.in_force or until[p.version] is None
        ]
        policies = [
            {"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()}
            for p in store.list_policies()
        ]
    rows = [
        {
            "version": p.version,
            "deployment": p.deployment,
            "pair": names.get(p.pair_id, ""),
            "pair_id": p.pair_id,
            "device": p.device,
            "policy": p.policy_id,
            "label": p.label,
            "sampling": p.sampling,
            "temperature": p.sampling.get("temperature") if p.sampling else None,
            "created_at": p.created_at.isoformat(),
            "active": until[p.version] is None,
            "until": (end := until[p.version]) and end.isoformat(),
            "actor": p.actor,
            "reason": p.reason,
            "servers": _servers(answers),
            "applied": sum(a.status == "applied" for a in answers),
            "refused": [f"{a.node}: {a.reason}" for a in answers if a.status == "refused"],
        }
        for p, answers in publications
    ]
    texts = (answers_in_words(answers) for _, answers in publications)
    shown = [{**row, "servers": text} for row, text in zip(rows, texts, strict=True)]
    where = ("deployment",) if spec else ("deployment", "pair", "pair_id", "device")
    ends = ("servers",) if s.in_force else ("active", "until", "actor", "servers", "reason")
    columns = ("version", *where, "policy", "label", "temperature", "created_at", *ends)
    title = f"publications for pair {spec.id} on {device}" if spec else "publications"
    about: dict[str, Any] = {"pair": pair_id, "device": device, "policies": policies}
    return listed("publications", rows, Table(shown, columns, title), **about)


def _servers(answers: Iterable[Acknowledgement]) -> list[dict[str, Any]]:
    """What each server did with a publication, the newest of its answers."""
    return [
        {"server": a.node, "status": a.status, "reason": a.reason, "at": a.at.isoformat()}
        for a in {a.node: a for a in answers}.values()
    ]


def show(s: PoliciesShow, talk: Talk) -> Result:
    if s.other is not None:
        one, other = _policies(s, talk, s.policy, s.other)
        rows = differences(one, other)
        sides = {"left": one.id, "right": other.id, "differences": rows}
        table = Table(rows, ("key", "left", "right"), f"{one.id} and {other.id}")
        return Result("" if rows else "no difference", sides, rows, [table] if rows else [])
    anywhere = s.policy != "active" and not s.pair
    pair_id, device = ("", "") if anywhere else (pair_of(s).id, device_of(s.device))
    with _lookup(s, s.policy) as store:
        policy = policy_named(store, s.policy, pair_id, device, s.deployment, talk)
        every = store.list_publications(pair_id or None, device or None, s.deployment)
    document = policy.spelled_out()
    data: dict[str, Any] = {"id": policy.id, "label": policy.label(), "policy": document}
    text = f"{policy.id}  {policy.label()}\n{json.dumps(document, indent=2)}"
    if newest := next((p for p in every if p.policy_id == policy.id), None):
        data["publication"] = {
            "version": newest.version,
            "deployment": newest.deployment,
            "sampling": newest.sampling,
            "reason": newest.reason,
            "created_at": newest.created_at.isoformat(),
            "evidence": dict(newest.evidence),
        }
        text += (
            f"\npublished as version {newest.version} in deployment {newest.deployment} "
            f"({newest.created_at:%Y-%m-%d %H:%M} UTC): {newest.reason}"
        )
    return Result(text, data)


def _policies(s: Placed, talk: Talk, *names: str) -> list[Policy]:
    """Policies by name; ``active`` is what is in force for a pair where the settings say."""
    spec = pair_of(s)
    with _lookup(s, *names) as store:
        where = spec.id, device_of(s.device), s.deployment
        return [policy_named(store, name, *where, talk) for name in names]


def activate(s: PoliciesActivate, talk: Talk) -> Result:
    source = s.from_
    if source is not None and s.policy != "active":
        raise ConfigError(
            f"--from {source} promotes what is in force there, `active`; leave it out to put "
            "another policy in force"
        )
    spec, device = pair_of(s), device_of(s.device)
    with _lookup(s, s.policy) as store:
        if source is not None and store.active_publication(spec.id, device, source) is None:
            raise ConfigError(
                f"--from {source}: nothing is in force there for pair {spec.id} on {device} (see "
                "`policies list`)"
            )
        policy = policy_named(store, s.policy, spec.id, device, source or s.deployment, talk)
        # What every runtime would refuse later is refused now.
        if why := refusal(s.deployment, policy):
            raise PolicyError(why)
        profile = store.profile_of(spec.id, device=device)
        prepare(policy, spec.draft_names, profile=profile, artifacts=fitted(store, spec.id))
        store.put_pair(spec.id, spec.name, spec.to_json())
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        before = store.list_publications(spec.id, device, source)
        tuned = (p.sampling for p in before if p.policy_id == policy.id and p.sampling is not None)
        publication = store.publish(
            spec.id,
            device,
            policy.id,
            actor="cli",
            deployment=s.deployment,
            sampling=next(tuned, None),
            reason=s.reason or (f"promoted from {source}" if source else "activated by hand"),
        )
        return _published(store, publication, "is published")


def _published(store: TraceStore, publication: Publication, verb: str) -> Result:
    answers = store.acknowledgements(publication.version)
    return Result(
        f"version {publication.version}: {publication.label} {verb} in deployment "
        f"{publication.deployment}; {answers_in_words(answers)}",
        {**publication.told(), "servers": _servers(answers)},
    )


def _can_return(publication: Publication) -> bool:
    """Whether it holds a policy, and one that the deployment's engine can run."""
    try:
        return not refusal(publication.deployment, published_policy(publication))
    except PolicyError:
        return False


def rollback(s: PoliciesRollback, talk: Talk) -> Result:
    pair_id, device = pair_of(s).id, device_of(s.device)
    where = f"for pair {pair_id} on {device}"
    with open_store(s) as store:
        publications = store.list_publications(pair_id, device, s.deployment)
        if s.to is None:
            others = (p for p in publications[1:] if p.policy_id != publications[0].policy_id)
            earlier = next(filter(_can_return, others), None)
        else:
            earlier = next((p for p in publications if p.version == s.to), None)
            # What every runtime would refuse is refused here.
            if earlier and (why := refusal(s.deployment, published_policy(earlier))):
                raise PolicyError(why)
        if earlier is None:
            raise PolicyError(
                f"deployment {s.deployment} has no earlier policy to go back to {where}; "
                "`policies activate autoregressive` decodes without a draft"
                if s.to is None
                else f"--to {s.to}: deployment {s.deployment} has no such version {where} (see "
                "`policies list`)"
            )
        publication = store.publish(
            pair_id,
            device,
            earlier.policy_id,
            actor="cli",
            deployment=s.deployment,
            sampling=earlier.sampling,
            reason=f"rollback of version {publications[0].version} to {earlier.version}",
            expected=publications[0].version,
        )
        return _published(store, publication, "is published again")


def export(s: PoliciesExport, talk: Talk) -> Result:
    spec = pair_of(s)
    (policy,) = _policies(s, talk, s.policy)
    if s.for_ == "spectune":
        return Result.document(policy.spelled_out())
    data = engine_settings(policy, spec, s.for_)
    talk.tell(engine_line(data, spec, s.for_))
    return Result.document(data)
