"""`policies`: what is published, and publishing by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands import options as opts
from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.options import Whole, device_of
from spectune.optimizer.commands.printing import Group, as_json, emit, note, say, table
from spectune.optimizer.commands.shared import (
    open_store,
    pair_spec,
    policy_named,
)

if TYPE_CHECKING:
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.traces.store import TraceStore
    from spectune.traces.tables import Acknowledgement, Publication


ABOUT = ("policy", "label", "temperature", "created_at")
"""Columns of every list of publications."""


@click.group(cls=Group)
def policies() -> None:
    """Policies: deployments, list, show, diff, activate, rollback, export."""


def _looked_up(*names: str) -> AbstractContextManager[TraceStore]:
    """The store to look policies up in; it may be missing where each is a file or a document."""
    from spectune.optimizer.inputs import named_policy

    return open_store(create=all(map(named_policy, names)))


def _policies(spec: PairSpec, kw: dict[str, Any], *names: str) -> list[Policy]:
    """Policies by name; ``active`` is what is in force for a pair where the options say."""
    with _looked_up(*names) as store:
        return [
            policy_named(store, name, spec.id, device_of(kw), kw["deployment"]) for name in names
        ]


@policies.command("deployments")
def policies_deployments() -> None:
    """What is published, where, and what each server did with it: a line for every deployment, pair
    and device. A server that refuses goes on with the last policy that it applied.

    \b
    Example:  cli.py policies deployments
    """
    from spectune.optimizer.deployment import answers_in_words

    with open_store(create=False) as store:
        names = {pair.id: pair.name for pair in store.list_pairs()}
        newest = [(p, store.acknowledgements(p.version)) for p in store.in_force()]
    rows = [
        {**_row(published, names), "servers": _servers(answers)} for published, answers in newest
    ]
    told = [
        {
            **row,
            "pair": f"{row['pair']} ({row['pair_id']})",
            "servers": answers_in_words(answers),
        }
        for row, (_, answers) in zip(rows, newest, strict=True)
    ]
    columns = ("deployment", "pair", "device", "version", *ABOUT, "servers")
    view = table(told, columns, "published") if rows else "nothing is published"
    emit({"deployments": rows}, view)


def _servers(answers: Iterable[Acknowledgement]) -> list[dict[str, Any]]:
    """What each server did with a publication, the newest of its answers."""
    return [
        {"server": a.node, "status": a.status, "reason": a.reason, "at": a.at.isoformat()}
        for a in {a.node: a for a in answers}.values()
    ]


@policies.command("list")
@opts.pair
@opts.device
@option("--deployment", "Only publications of this one; default: of all.")
def policies_list(deployment: str | None, **kw: Any) -> None:
    """Publications, newest first, and what runtimes acknowledged: all there are, or those of a pair
    and its device where one is named.

    For each deployment, pair and device the newest is in force (active); the others were until the
    next.

    \b
    Example:  cli.py policies list
              cli.py policies list --pair demo --device cpu
    """
    spec = pair_spec(kw) if any(kw[name] for name in ("pair", "target", "drafts")) else None
    pair_id = None if spec is None else spec.id
    device = device_of(kw) if spec or kw["device"] != "auto" else None
    with open_store(create=False) as store:
        rows = _listed(store, store.list_publications(pair_id, device, deployment))
        known = [
            {"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()}
            for p in store.list_policies()
        ]
    where = () if spec else ("pair", "device")
    last = ("actor", "applied", "refused", "reason")
    columns = ("version", "deployment", *where, "active", *ABOUT, "until", *last)
    data = {"pair": pair_id, "device": device, "publications": rows, "policies": known}
    of = f" for pair {spec.id} on {device}" if spec else ""
    emit(data, table(rows, columns, f"publications{of}") if rows else f"nothing is published{of}")


def _listed(store: TraceStore, found: Iterable[Publication]) -> list[dict[str, Any]]:
    from spectune.traces.store.query import in_force

    rows: list[dict[str, Any]] = []
    names = {pair.id: pair.name for pair in store.list_pairs()}
    until = {row["version"]: row["until"] for row in in_force(store)}
    for p in found:
        end = until[p.version]
        acks = store.acknowledgements(p.version)
        rows.append(
            {
                **_row(p, names),
                "active": end is None,
                "until": end and end.isoformat(),
                "actor": p.actor,
                "reason": p.reason,
                "applied": sum(a.status == "applied" for a in acks),
                "refused": [f"{a.node}: {a.reason}" for a in acks if a.status == "refused"],
            }
        )
    return rows


def _row(published: Publication, pairs: Mapping[str, str]) -> dict[str, Any]:
    """A publication in a list; ``pairs`` are names by id."""
    return {
        "version": published.version,
        "deployment": published.deployment,
        "pair": pairs.get(published.pair_id, ""),
        "pair_id": published.pair_id,
        "device": published.device,
        "policy": published.policy_id,
        "label": published.label,
        "sampling": published.sampling,
        "temperature": published.sampling.get("temperature") if published.sampling else None,
        "created_at": published.created_at.isoformat(),
    }


@policies.command("show")
@click.argument("policy_name", metavar="POLICY", default="active")
@opts.place
def policies_show(policy_name: str, **kw: Any) -> None:
    """A policy document with every default spelled out, and the evidence it was published with.

    \b
    Example:  cli.py policies show active
              cli.py policies show '{"draft": "small"}'
    """
    is_anywhere = policy_name != "active" and not any(kw[n] for n in ("pair", "target", "drafts"))
    pair_id, device = ("", "") if is_anywhere else (pair_spec(kw).id, device_of(kw))
    with _looked_up(policy_name) as store:
        policy = policy_named(store, policy_name, pair_id, device, kw["deployment"])
        every = store.list_publications(pair_id or None, device or None, kw["deployment"])
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
    if as_json():
        emit(data)
    else:
        say(text)


@policies.command("diff")
@click.argument("left")
@click.argument("right", default="active")
@opts.place
def policies_diff(left: str, right: str, **kw: Any) -> None:
    """What differs between two policies, key by key, defaults spelled out.

    \b
    Example:  cli.py policies diff candidate.json active
    """
    one, other = _policies(pair_spec(kw), kw, left, right)
    from spectune.runtime.policies.document import differences

    rows = differences(one, other)
    view = table(rows, ("key", "left", "right"), f"{one.id} and {other.id}")
    data = {"left": one.id, "right": other.id, "differences": rows}
    emit(data, view if rows else "no difference")


@policies.command("activate")
@click.argument("policy_name", metavar="POLICY")
@option("--reason", "Kept with it; default: activated by hand, or what was promoted.")
@option(
    "--from source",
    "Where `active` is looked up: promotes that to --deployment.",
    metavar="DEPLOYMENT",
)
@opts.place
def policies_activate(
    policy_name: str, reason: str | None, source: str | None, deployment: str, **kw: Any
) -> None:
    """Publish a policy: running decoders of the deployment take it up between two rounds, and
    `policies deployments` shows who did. In a deployment of an engine's name what that engine
    cannot run is refused.

    A policy that was tuned keeps what sampling it was tuned for.

    \b
    Example:  cli.py policies activate policy.json --reason "trying a longer window"
              cli.py policies activate policy.json --deployment canary
              cli.py policies activate active --from canary
    """
    if source is not None and policy_name != "active":
        raise click.UsageError(
            f"--from {source} promotes what is in force there, `active`; leave it out to put "
            "another policy in force"
        )
    spec, device = pair_spec(kw), device_of(kw)
    with _looked_up(policy_name) as store:
        if source is not None and store.active_publication(spec.id, device, source) is None:
            raise click.UsageError(
                f"--from {source}: nothing is in force there for pair {spec.id} on {device} (see "
                "`policies list`)"
            )
        policy = policy_named(store, policy_name, spec.id, device, source or deployment)
        from spectune.optimizer.artifacts import fitted
        from spectune.optimizer.deployment import refusal
        from spectune.runtime.policies.plan import prepare
        from spectune.traces.errors import PolicyError

        # What every runtime would refuse later is refused now.
        if why := refusal(deployment, policy):
            raise PolicyError(why)
        profile = store.profile_of(spec.id, device=device)
        prepare(policy, spec.draft_names, profile=profile, artifacts=fitted(store, spec.id))
        store.put_pair(spec.id, spec.name, spec.to_json())
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        before = store.list_publications(spec.id, device, source)
        tuned = (p.sampling for p in before if p.policy_id == policy.id and p.sampling is not None)
        published = store.publish(
            spec.id,
            device,
            policy.id,
            actor="cli",
            deployment=deployment,
            sampling=next(tuned, None),
            reason=reason or (f"promoted from {source}" if source else "activated by hand"),
        )
        _emit_published(store, published, "is published")


def _emit_published(store: TraceStore, published: Publication, verb: str) -> None:
    from spectune.optimizer.deployment import answers_in_words

    answers = store.acknowledgements(published.version)
    said = f"version {published.version}: {published.label} {verb} in deployment"
    emit(
        {**published.told(), "servers": _servers(answers)},
        f"{said} {published.deployment}; {answers_in_words(answers)}",
    )


def _can_return(publication: Publication) -> bool:
    """Whether it holds a policy, and one that the deployment's engine can run."""
    from spectune.optimizer.deployment import refusal
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    try:
        return not refusal(publication.deployment, published_policy(publication))
    except PolicyError:
        return False


@policies.command("rollback")
@option("--to", "Version to go back to; default: the one before the active.", Whole(1))
@opts.place
def policies_rollback(to: int | None, deployment: str, **kw: Any) -> None:
    """Publish an earlier policy of the deployment again. Nothing is erased: the rollback is a new
    version. Publications that hold no policy, or none that the deployment's engine can run, are
    passed over.

    \b
    Example:  cli.py policies rollback
    """
    from spectune.optimizer.deployment import refusal
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    pair_id, device = pair_spec(kw).id, device_of(kw)
    where = f"for pair {pair_id} on {device}"
    with open_store(create=False) as store:
        found = store.list_publications(pair_id, device, deployment)
        if to is None:
            others = (p for p in found[1:] if p.policy_id != found[0].policy_id)
            earlier = next(filter(_can_return, others), None)
        else:
            earlier = next((p for p in found if p.version == to), None)
            # What every runtime would refuse is refused here.
            if earlier and (why := refusal(deployment, published_policy(earlier))):
                raise PolicyError(why)
        if earlier is None:
            raise PolicyError(
                f"deployment {deployment} has no earlier policy to go back to {where}; "
                "`policies activate autoregressive` decodes without a draft"
                if to is None
                else f"--to {to}: deployment {deployment} has no such version {where} (see "
                "`policies list`)"
            )
        published = store.publish(
            pair_id,
            device,
            earlier.policy_id,
            actor="cli",
            deployment=deployment,
            sampling=earlier.sampling,
            reason=f"rollback of version {found[0].version} to {earlier.version}",
            expected=found[0].version,
        )
        _emit_published(store, published, "is published again")


@policies.command("export")
@click.argument("policy_name", metavar="POLICY", default="active")
@option(
    "--for engine",
    type=click.Choice(["spectune", "vllm", "sglang", "llamacpp"]),
    default="spectune",
)
@opts.place
def policies_export(policy_name: str, engine: str, **kw: Any) -> None:
    """Print a policy as a document, or as another engine's settings where they can say the same:
    JSON on stdout, and on stderr the line that serves with them.

    \b
    Example:  cli.py policies export active > policy.json
              cli.py policies export active --for vllm
    """
    spec = pair_spec(kw)
    (policy,) = _policies(spec, kw, policy_name)
    from spectune.engines.export import engine_line, engine_settings

    ours = engine == "spectune"
    data = policy.spelled_out() if ours else engine_settings(policy, spec, engine)
    click.echo(json.dumps(data, indent=None if as_json() else 2))
    if not ours and not as_json():
        note(engine_line(data, spec, engine))
