"""`policies`: what is published, and publishing by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from spectune.engines.server_settings import engine_line, engine_settings
from spectune.optimizer.commands.common import (
    Talk,
    device_of,
    names_pair,
    open_store,
    pair_of,
    policy_named,
)
from spectune.optimizer.commands.results import Result, Table, listed
from spectune.optimizer.deployment import refusal
from spectune.optimizer.followed_servers import (
    Servers,
    able_servers,
    answers_in_words,
    newest_answers,
    wait_for_answers,
)
from spectune.optimizer.inputs import named_policy, published_policy
from spectune.optimizer.rollback import earlier, origin
from spectune.optimizer.rollout.rollout_words import progress_of
from spectune.optimizer.stored_artifacts import fitted
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
from spectune.traces.schema import devices_of
from spectune.traces.store import TraceStore
from spectune.traces.store.query import in_force
from spectune.traces.tables import Acknowledgement, FollowedServer, Publication


def _lookup(s: Placed, *names: str) -> AbstractContextManager[TraceStore]:
    """The store to look policies up in; it may be missing where each is a file or a document."""
    return open_store(s, create=all(map(named_policy, names)))


def list_publications(s: PoliciesList, talk: Talk) -> Result:
    spec = pair_of(s) if names_pair(s) else None
    pair_id = None if spec is None else spec.id
    device = device_of(s.device) if spec or s.device != "auto" else None
    with open_store(s) as store:
        names = {pair.id: pair.name for pair in store.list_pairs()}
        every = store.list_publications(pair_id, device, s.deployment)
        rows, texts = publication_rows(store, every, names, in_force_alone=s.in_force)
        policies = [
            {"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()}
            for p in store.list_policies()
        ]
    shown = [{**row, "servers": text} for row, text in zip(rows, texts, strict=True)]
    where = ("deployment",) if spec else ("deployment", "pair", "pair_id", "device")
    ends = ("servers",) if s.in_force else ("active", "until", "actor", "servers", "reason")
    columns = ("version", *where, "policy", "label", "temperature", "created_at", *ends)
    title = f"publications for pair {spec.id} ({spec.name}) on {device}" if spec else "publications"
    about: dict[str, Any] = {"pair": pair_id, "device": device, "policies": policies}
    return listed("publications", rows, Table(shown, columns, title), **about)


def publication_rows(
    store: TraceStore,
    every: Iterable[Publication],
    pairs: Mapping[str, str],
    *,
    in_force_alone: bool = False,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Publications, by the names of ``pairs``, and what each server did with them; and that in
    words."""
    # After them, so that it says of each of them until when it held.
    until = {row["version"]: row["until"] for row in in_force(store)}
    servers = Servers.of(store)
    publications = [
        (p, store.acknowledgements(p.version))
        for p in every
        if not in_force_alone or until[p.version] is None
    ]
    rows = [
        {
            "version": p.version,
            "deployment": p.deployment,
            "pair": pairs.get(p.pair_id, ""),
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
            "servers": (told := _servers(answers, servers)),
            "applied": sum(a["status"] == "applied" for a in told),
            "refused": [f"{a['server']}: {a['reason']}" for a in told if a["status"] == "refused"],
        }
        for p, answers in publications
    ]
    return rows, [answers_in_words(answers, servers) for _, answers in publications]


def _servers(answers: Iterable[Acknowledgement], servers: Servers) -> list[dict[str, Any]]:
    """What each server did with a publication, the newest of its answers; ``silent``: since when
    nothing is known of it."""
    return [
        {
            "server": a.node,
            "status": a.status,
            "reason": a.reason,
            "at": a.at.isoformat(),
            "silent": servers.silence(a.node),
        }
        for a in newest_answers(answers, servers)
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
        rollouts = [r for r in store.rollouts(s.deployment) if r.policy_id == policy.id]
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
    data["rollouts"] = [progress_of(r) for r in rollouts]
    for one in data["rollouts"][:1]:
        looks = one["standing"].get("looks", ())
        shown = [f"\n  {o['ratio']:.3f} times as fast by {o['pairs']} pairs" for o in looks]
        text += f"\n{one['text']}{''.join(shown)}"
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
                f"--from {source}: nothing is in force there for pair {spec.id} ({spec.name}) on "
                f"{device} (see `policies list`)"
            )
        policy = policy_named(store, s.policy, spec.id, device, source or s.deployment, talk)
        # What every runtime would refuse later is refused now.
        if why := refusal(s.deployment, policy):
            raise PolicyError(why)
        profile = store.profile_of(spec.id, device=device)
        prepare(policy, spec.draft_names, profile=profile, artifacts=fitted(store, spec.id))
        there = Servers.of(store).of_deployment(s.deployment)
        able = able_servers(there, policy, (spec.name, spec.models), device, talk.tell)
        store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
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
        return _published(store, publication, "", able, s.wait)


def _published(
    store: TraceStore,
    publication: Publication,
    chain: str,
    able: Collection[FollowedServer],
    wait: float | None,
) -> Result:
    """Says what was published, and who took it up, with exit code 1 where that was waited for and
    somebody did not. ``able``: the followed servers that are to."""
    nodes = {server.node for server in able}
    version, deployment = publication.version, publication.deployment
    is_taken = wait is None or wait_for_answers(store, version, nodes, wait)
    answers, servers = store.acknowledgements(version), Servers.of(store)
    said = answers_in_words(answers, servers)
    others = [name for name in servers.deployments() if name != deployment]
    if not answers and others and deployment not in servers.deployments():
        said = f"no server follows deployment {deployment}; these do: {', '.join(others)}"
    elif missing := sorted(nodes - {a.node for a in answers}):
        said = f"{f'{said}; ' * bool(answers)}not yet applied by {', '.join(missing)}"
    return Result(
        f"version {version}: {chain}{publication.label} is published in deployment {deployment}; "
        f"{said}",
        {**publication.told(), "servers": _servers(answers, servers)},
        exit_code=0 if is_taken else 1,
    )


def rollback(s: PoliciesRollback, talk: Talk) -> Result:
    spec, device = pair_of(s), device_of(s.device)
    pair_id = spec.id
    where = f"for pair {spec.id} ({spec.name}) on {device}"
    with open_store(s) as store:
        publications = store.list_publications(pair_id, device, s.deployment)
        there, pair = Servers.of(store).of_deployment(s.deployment), (spec.name, spec.models)
        every = store.list_publications(pair_id, None, s.deployment)
        named = next((p for p in every if device in devices_of(p.device)), None)
        if named is not None and named.device != device:
            raise PolicyError(
                f"version {named.version} of deployment {s.deployment} is newer than what is "
                f"published for all of {device}, and for {named.device} alone: say "
                f"--device '{named.device}'"
            )

        def able(publication: Publication, tell: Callable[[str], None]) -> list[FollowedServer]:
            """Raises PolicyError for no policy, and for one that nobody there can run."""
            policy = published_policy(publication)
            if why := refusal(s.deployment, policy):
                raise PolicyError(why)
            return able_servers(there, policy, pair, device, tell)

        def can_run(publication: Publication) -> bool:
            with suppress(PolicyError):
                able(publication, lambda line: None)
                return True
            return False

        if s.to is None:
            to = earlier(publications, store.acknowledgements, can_run)
        else:
            to = next((p for p in publications if p.version == s.to), None)
        if to is None:
            raise PolicyError(
                f"deployment {s.deployment} has no earlier policy to go back to {where}; "
                "`policies activate autoregressive` decodes without a draft"
                if s.to is None
                else f"--to {s.to}: deployment {s.deployment} has no such version {where} (see "
                "`policies list`)"
            )
        servers = able(to, talk.tell)
        newest, back = publications[0].version, origin(to)
        publication = store.publish(
            pair_id,
            device,
            to.policy_id,
            actor="cli",
            deployment=s.deployment,
            sampling=to.sampling,
            evidence={"rollback": {"from": newest, "to": back}},
            reason=f"rollback of version {newest} to {back}",
            expected=newest,
        )
        chain = f"version {newest} -> back to version {back}: "
        return _published(store, publication, chain, servers, s.wait)


def export(s: PoliciesExport, talk: Talk) -> Result:
    spec = pair_of(s)
    (policy,) = _policies(s, talk, s.policy)
    if s.for_ == "spectune":
        return Result.document(policy.spelled_out())
    data = engine_settings(policy, spec, s.for_)
    talk.tell(engine_line(data, spec, s.for_))
    return Result.document(data)
