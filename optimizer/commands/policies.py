"""`policies`: what is published, and publishing by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import option
from spectune.optimizer.commands.shared import (
    Whole,
    deployment_option,
    emit,
    open_store,
    pair_options,
    pair_spec,
    policy_named,
    profile_of,
    say,
    say_former,
    with_json,
)

if TYPE_CHECKING:
    from spectune.traces.store import Publication, TraceStore


@click.group()
def policies() -> None:
    """Policies: deployments, list, show, diff, activate, rollback, export."""


def _device(kw: dict[str, Any]) -> str:
    wanted = str(kw.pop("device"))
    if wanted != "auto":
        return wanted
    from spectune.runtime.cuda.found import sees_cuda

    return "cuda" if sees_cuda() else "cpu"


def _looked_up(ctx: click.Context, *names: str) -> AbstractContextManager[TraceStore]:
    """The store to look policies up in; it may be missing where each is a file or a document."""
    from spectune.optimizer.inputs import named_policy

    return open_store(ctx, create=all(map(named_policy, names)))


on_device = option(
    "--device",
    key="device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
)


@policies.command("deployments")
@with_json
def policies_deployments(ctx: click.Context, as_json: bool) -> None:
    """What is in force, where: a line for every deployment, pair and device.

    \b
    Example:  cli.py policies deployments
    """
    with open_store(ctx, create=False) as store:
        names = {pair.id: pair.name for pair in store.list_pairs()}
        rows = [_row(published, names) for published in store.in_force()]
    from spectune.optimizer.report.tables import rows_table

    columns = (
        "deployment",
        "pair",
        "device",
        "version",
        "policy",
        "label",
        "temperature",
        "created_at",
    )
    told = [{**row, "pair": f"{row['pair']} ({row['pair_id']})"} for row in rows]
    emit(as_json, {"deployments": rows}, lambda: rows_table(told, columns, "in force"))


@policies.command("list")
@pair_options
@on_device
@click.option("--deployment", help="Only publications of this one; default: of all.")
@with_json
def policies_list(ctx: click.Context, as_json: bool, deployment: str | None, **kw: Any) -> None:
    """Publications, newest first, and what runtimes acknowledged: all there are, or those of a pair
    and its device where one is named.

    For each deployment, pair and device the newest is in force (active).

    \b
    Example:  cli.py policies list
              cli.py policies list --pair demo --device cpu
    """
    spec = pair_spec(kw) if any(kw[name] for name in ("pair", "target", "drafts")) else None
    device = _device(kw) if spec or kw["device"] != "auto" else None
    with open_store(ctx, create=False) as store:
        if spec is not None:
            say_former(store, spec)
        found = store.list_publications(spec.id if spec else None, device, deployment)
        rows = _listed(store, found)
        known = [
            {"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()}
            for p in store.list_policies()
        ]
    from spectune.optimizer.report.tables import rows_table

    columns = (
        *(
            "version",
            "deployment",
            *(() if spec else ("pair", "device")),
            "active",
            "policy",
            "label",
            "temperature",
            "created_at",
        ),
        *("actor", "applied", "refused", "reason"),
    )
    data = {
        "pair": spec.id if spec else None,
        "device": device,
        "publications": rows,
        "policies": known,
    }
    title = f"publications for pair {spec.id} on {device}" if spec else "publications"
    emit(as_json, data, lambda: rows_table(rows, columns, title))


def _listed(store: TraceStore, found: Iterable[Publication]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names = {pair.id: pair.name for pair in store.list_pairs()}
    seen: set[tuple[str, str, str]] = set()
    for p in found:
        place = (p.deployment, p.pair_id, p.device)
        acks = store.acknowledgements(p.version)
        rows.append(
            {
                **_row(p, names),
                "active": place not in seen,
                "actor": p.actor,
                "reason": p.reason,
                "applied": sum(a.status == "applied" for a in acks),
                "refused": [f"{a.node}: {a.reason}" for a in acks if a.status == "refused"],
            }
        )
        seen.add(place)
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
@pair_options
@on_device
@deployment_option
@with_json
def policies_show(ctx: click.Context, as_json: bool, policy_name: str, **kw: Any) -> None:
    """A policy document with every default spelled out, and the evidence it was published with.

    \b
    Example:  cli.py policies show active
              cli.py policies show '{"draft": "small"}'
    """
    pair_id, device = pair_spec(kw).id, _device(kw)
    with _looked_up(ctx, policy_name) as store:
        policy = policy_named(store, policy_name, pair_id, device, kw["deployment"])
        every = store.list_publications(pair_id, device, kw["deployment"])
        newest = next((p for p in every if p.policy_id == policy.id), None)
    data: dict[str, Any] = {
        "id": policy.id,
        "label": policy.label(),
        "policy": policy.spelled_out(),
    }
    if newest is not None:
        data["publication"] = {
            "version": newest.version,
            "deployment": newest.deployment,
            "sampling": newest.sampling,
            "reason": newest.reason,
            "created_at": newest.created_at.isoformat(),
            "evidence": dict(newest.evidence),
        }
    if as_json:
        emit(True, data, None)
        return
    say(f"{policy.id}  {policy.label()}")
    click.echo(json.dumps(policy.spelled_out(), indent=2))
    if newest is not None:
        say(
            f"published as version {newest.version} in deployment {newest.deployment} "
            f"({newest.created_at:%Y-%m-%d %H:%M} UTC): {newest.reason}"
        )


@policies.command("diff")
@click.argument("left")
@click.argument("right", default="active")
@pair_options
@on_device
@deployment_option
@with_json
def policies_diff(ctx: click.Context, as_json: bool, left: str, right: str, **kw: Any) -> None:
    """What differs between two policies, key by key, defaults spelled out.

    \b
    Example:  cli.py policies diff candidate.json active
    """
    pair_id, device = pair_spec(kw).id, _device(kw)
    with _looked_up(ctx, left, right) as store:
        one, other = (
            policy_named(store, name, pair_id, device, kw["deployment"]) for name in (left, right)
        )
    from spectune.optimizer.report.tables import rows_table
    from spectune.runtime.policies.document import differences

    rows = differences(one, other)
    emit(
        as_json,
        {"left": one.id, "right": other.id, "differences": rows},
        lambda: (
            rows_table(rows, ("key", "left", "right"), f"{one.id} and {other.id}")
            if rows
            else "no difference"
        ),
    )


@policies.command("activate")
@click.argument("policy_name", metavar="POLICY")
@click.option("--reason", help="Kept with it; default: activated by hand, or what was promoted.")
@click.option(
    "--from",
    "source",
    metavar="DEPLOYMENT",
    help="Where `active` is looked up: promotes that to --deployment.",
)
@pair_options
@on_device
@deployment_option
@with_json
def policies_activate(
    ctx: click.Context,
    as_json: bool,
    policy_name: str,
    reason: str | None,
    source: str | None,
    **kw: Any,
) -> None:
    """Publish a policy: running decoders of the deployment take it up between two rounds.

    A policy that was tuned keeps what sampling it was tuned for.

    \b
    Example:  cli.py policies activate policy.json --reason "trying a longer window"
              cli.py policies activate policy.json --deployment canary
              cli.py policies activate active --from canary
    """
    spec, device, deployment = pair_spec(kw), _device(kw), kw["deployment"]
    with _looked_up(ctx, policy_name) as store:
        if source is not None and store.active_publication(spec.id, device, source) is None:
            raise click.UsageError(
                f"--from {source}: nothing is in force there for pair {spec.id} on {device} (see "
                "`policies list`)"
            )
        policy = policy_named(store, policy_name, spec.id, device, source or deployment)
        from spectune.optimizer.artifacts import fitted
        from spectune.runtime.policies.prepare import prepare

        # What every runtime would refuse later is refused now.
        profile = profile_of(store, None, spec.id, device)
        prepare(policy, spec.draft_names, profile=profile, artifacts=fitted(store, spec.id))
        store.put_pair(spec.id, spec.name, spec.to_json())
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        before = store.list_publications(spec.id, deployment=source)
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
    _emit_published(as_json, published, "is in force")


def _emit_published(as_json: bool, published: Publication, verb: str) -> None:
    data = {
        "version": published.version,
        "policy": published.policy_id,
        "deployment": published.deployment,
    }
    emit(
        as_json,
        data,
        f"version {published.version}: {published.label} {verb} in deployment "
        f"{published.deployment}",
    )


def _holds_a_policy(publication: Publication) -> bool:
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    try:
        published_policy(publication)
    except PolicyError:
        return False
    return True


@policies.command("rollback")
@click.option(
    "--to", type=Whole(1), help="Version to go back to; default: the one before the active."
)
@pair_options
@on_device
@deployment_option
@with_json
def policies_rollback(ctx: click.Context, as_json: bool, to: int | None, **kw: Any) -> None:
    """Publish an earlier policy of the deployment again. Nothing is erased: the rollback is a new
    version. Publications that hold no policy are passed over.

    \b
    Example:  cli.py policies rollback
    """
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    pair_id, device = pair_spec(kw).id, _device(kw)
    with open_store(ctx, create=False) as store:
        found = store.list_publications(pair_id, device, kw["deployment"])
        active = found[0] if found else None
        if to is None:
            earlier = next(
                (
                    p
                    for p in found[1:]
                    if active and p.policy_id != active.policy_id and _holds_a_policy(p)
                ),
                None,
            )
        else:
            earlier = next((p for p in found if p.version == to), None)
            if earlier is not None:
                published_policy(earlier)  # refused here as every runtime would
        if active is None or earlier is None:
            where = f"for pair {pair_id} on {device}"
            raise PolicyError(
                f"deployment {kw['deployment']} has no earlier policy to go back to {where}; "
                "`policies activate autoregressive` decodes without a draft"
                if to is None
                else f"--to {to}: deployment {kw['deployment']} has no such version {where} (see "
                "`policies list`)"
            )
        published = store.publish(
            pair_id,
            device,
            earlier.policy_id,
            actor="cli",
            deployment=active.deployment,
            sampling=earlier.sampling,
            reason=f"rollback of version {active.version} to {earlier.version}",
            expected=active.version,
        )
    _emit_published(as_json, published, "is in force again")


@policies.command("export")
@click.argument("policy_name", metavar="POLICY", default="active")
@click.option(
    "--for",
    "engine",
    type=click.Choice(["spectune", "vllm", "sglang", "tensorrt-llm", "llamacpp"]),
    default="spectune",
    show_default=True,
)
@click.option(
    "--engine-version",
    metavar="VERSION",
    help="whose settings: what they mean changes from version to version",
)
@pair_options
@on_device
@deployment_option
@with_json
def policies_export(
    ctx: click.Context,
    as_json: bool,
    policy_name: str,
    engine: str,
    engine_version: str | None,
    **kw: Any,
) -> None:
    """Print a policy as a document, or as another engine's settings where they can say the same:
    JSON on stdout, and on stderr the line that serves with them.

    \b
    Example:  cli.py policies export active > policy.json
              cli.py policies export active --for vllm
              cli.py policies export active --for tensorrt-llm --engine-version 1.3.0
    """
    spec, device = pair_spec(kw), _device(kw)
    with _looked_up(ctx, policy_name) as store:
        policy = policy_named(store, policy_name, spec.id, device, kw["deployment"])
    from spectune.engines.export import engine_line, engine_settings

    data = (
        policy.spelled_out()
        if engine == "spectune"
        else engine_settings(policy, spec, engine, engine_version)
    )
    click.echo(json.dumps(data, indent=None if as_json else 2))
    if engine != "spectune" and not as_json:
        say(engine_line(data, spec, engine), err=True)
