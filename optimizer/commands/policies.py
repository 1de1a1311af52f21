"""`policies`: what is published, and publishing by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.shared import (
    Whole,
    emit,
    json_option,
    open_store,
    pair_options,
    policy_named,
    profile_of,
    say,
    say_former,
    with_context,
)

if TYPE_CHECKING:
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import AnyPolicy
    from spectune.traces.store import Publication, TraceStore


@click.group()
def policies() -> None:
    """Policies: list, show, diff, activate, rollback, export."""


def _spec(kw: dict[str, Any]) -> PairSpec:
    from spectune.runtime.pair import read_pair

    return read_pair(kw.pop("pair"), kw.pop("target"), kw.pop("drafts"))


def _pair_id(kw: dict[str, Any]) -> str:
    return _spec(kw).id


def _device(kw: dict[str, Any]) -> str:
    wanted = str(kw.pop("device"))
    if wanted != "auto":
        return wanted
    from spectune.runtime.cuda.found import sees_cuda

    return "cuda" if sees_cuda() else "cpu"


on_device = click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)


@policies.command("list")
@pair_options
@on_device
@json_option
@with_context
def policies_list(ctx: click.Context, as_json: bool, **kw: Any) -> None:
    """Publications for a pair and device, newest first, and what runtimes acknowledged.

    \b
    Example:  cli.py policies list
    """
    spec, device = _spec(kw), _device(kw)
    with open_store(ctx) as store:
        say_former(store, spec)
        found = store.list_publications(spec.id, device)
        rows = []
        for i, p in enumerate(found):
            acks = store.acknowledgements(p.version)
            rows.append(
                {
                    "version": p.version,
                    "active": i == 0,
                    "policy": p.policy_id,
                    "label": p.label,
                    "created_at": p.created_at.isoformat(),
                    "actor": p.actor,
                    "reason": p.reason,
                    "applied": sum(a.status == "applied" for a in acks),
                    "refused": [f"{a.node}: {a.reason}" for a in acks if a.status == "refused"],
                }
            )
        known = [{"policy": p.id, "label": p.label, "created_at": p.created_at.isoformat()} for p in store.list_policies()]
    from spectune.optimizer.report.tables import rows_table

    columns = ("version", "active", "policy", "label", "created_at", "actor", "applied", "refused", "reason")
    data = {"pair": spec.id, "device": device, "publications": rows, "policies": known}
    emit(as_json, data, lambda: rows_table(rows, columns, f"publications for pair {spec.id} on {device}"))


@policies.command("show")
@click.argument("policy_name", metavar="POLICY", default="active")
@pair_options
@on_device
@json_option
@with_context
def policies_show(ctx: click.Context, as_json: bool, policy_name: str, **kw: Any) -> None:
    """A policy document with every default spelled out, and the evidence it was published with.

    \b
    Example:  cli.py policies show active
              cli.py policies show '{"draft": "small"}'
    """
    pair_id, device = _pair_id(kw), _device(kw)
    with open_store(ctx) as store:
        policy = policy_named(store, policy_name, pair_id, device)
        published = [p for p in store.list_publications(pair_id, device) if p.policy_id == policy.id]
    data: dict[str, Any] = {"id": policy.id, "label": policy.label(), "policy": policy.spelled_out()}
    if published:
        data["publication"] = {
            "version": published[0].version,
            "reason": published[0].reason,
            "created_at": published[0].created_at.isoformat(),
            "evidence": dict(published[0].evidence),
        }
    if as_json:
        emit(True, data, None)
    else:
        say(f"{policy.id}  {policy.label()}")
        click.echo(json.dumps(policy.spelled_out(), indent=2))
        if published:
            say(
                f"published as version {published[0].version} ({published[0].created_at:%Y-%m-%d %H:%M} UTC): {published[0].reason}"
            )


@policies.command("diff")
@click.argument("left")
@click.argument("right", default="active")
@pair_options
@on_device
@json_option
@with_context
def policies_diff(ctx: click.Context, as_json: bool, left: str, right: str, **kw: Any) -> None:
    """What differs between two policies, key by key, defaults spelled out.

    \b
    Example:  cli.py policies diff candidate.json active
    """
    pair_id, device = _pair_id(kw), _device(kw)
    with open_store(ctx) as store:
        one, other = (policy_named(store, name, pair_id, device) for name in (left, right))
    from spectune.optimizer.report.tables import rows_table
    from spectune.runtime.policies.document import differences

    rows = differences(one, other)
    emit(
        as_json,
        {"left": one.id, "right": other.id, "differences": rows},
        lambda: rows_table(rows, ("key", "left", "right"), f"{one.id} and {other.id}") if rows else "no difference",
    )


@policies.command("activate")
@click.argument("policy_name", metavar="POLICY")
@click.option("--reason", default="activated by hand", show_default=True)
@pair_options
@on_device
@json_option
@with_context
def policies_activate(ctx: click.Context, as_json: bool, policy_name: str, reason: str, **kw: Any) -> None:
    """Publish a policy: running decoders take it up between two rounds.

    \b
    Example:  cli.py policies activate policy.json --reason "trying a longer window"
    """
    spec, device = _spec(kw), _device(kw)
    with open_store(ctx) as store:
        policy = policy_named(store, policy_name, spec.id, device)
        _check_runs(store, policy, spec.id, spec.draft_names, device)
        store.put_pair(spec.id, spec.name, spec.to_json())
        store.put_policy(policy.id, policy.spelled_out(), policy.label())
        published = store.publish(spec.id, device, policy.id, actor="cli", reason=reason)
    emit(
        as_json, {"version": published.version, "policy": policy.id}, f"version {published.version}: {policy.label()} is in force"
    )


def _check_runs(store: TraceStore, policy: AnyPolicy, pair_id: str, drafts: tuple[str, ...], device: str) -> None:
    """Raises PolicyError now for what every runtime would refuse later."""
    from spectune.optimizer.artifacts import fitted
    from spectune.runtime.policies.prepare import prepare

    _, found = profile_of(store, None, pair_id, device)
    prepare(policy, drafts, profile=found, artifacts=fitted(store, pair_id))


def _holds_a_policy(publication: Publication) -> bool:
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    try:
        published_policy(publication)
    except PolicyError:
        return False
    return True


@policies.command("rollback")
@click.option("--to", type=Whole(1), help="Version to go back to; default: the one before the active.")
@pair_options
@on_device
@json_option
@with_context
def policies_rollback(ctx: click.Context, as_json: bool, to: int | None, **kw: Any) -> None:
    """Publish an earlier policy again. Nothing is erased: the rollback is a new version. Publications that hold no policy are passed over.

    \b
    Example:  cli.py policies rollback
    """
    from spectune.optimizer.inputs import published_policy
    from spectune.traces.errors import PolicyError

    pair_id, device = _pair_id(kw), _device(kw)
    with open_store(ctx) as store:
        found = store.list_publications(pair_id, device)
        active = found[0] if found else None
        if to is None:
            earlier = next((p for p in found[1:] if active and p.policy_id != active.policy_id and _holds_a_policy(p)), None)
        else:
            earlier = next((p for p in found if p.version == to), None)
            if earlier is not None:
                published_policy(earlier)  # refused here as every runtime would
        if active is None or earlier is None:
            raise PolicyError(
                f"no earlier policy to go back to for pair {pair_id} on {device}"
                if to is None
                else f"--to {to}: pair {pair_id} has no such version on {device} (see `policies list`)"
            )
        published = store.publish(
            pair_id,
            device,
            earlier.policy_id,
            actor="cli",
            reason=f"rollback of version {active.version} to {earlier.version}",
            expected=active.version,
        )
    emit(
        as_json,
        {"version": published.version, "policy": published.policy_id},
        f"version {published.version}: {published.label} is in force again",
    )


@policies.command("export")
@click.argument("policy_name", metavar="POLICY", default="active")
@click.option(
    "--for", "engine", type=click.Choice(["spectune", "vllm", "sglang", "tensorrt-llm"]), default="spectune", show_default=True
)
@pair_options
@on_device
@json_option
@with_context
def policies_export(ctx: click.Context, as_json: bool, policy_name: str, engine: str, **kw: Any) -> None:
    """Print a policy as a document, or as another engine's settings where they can say the same (JSON either way).

    \b
    Example:  cli.py policies export active > policy.json
              cli.py policies export active --for vllm
    """
    spec, device = _spec(kw), _device(kw)
    with open_store(ctx) as store:
        policy = policy_named(store, policy_name, spec.id, device)
    from spectune.optimizer.export import engine_settings

    data = policy.spelled_out() if engine == "spectune" else engine_settings(policy, spec, engine)
    click.echo(json.dumps(data, indent=None if as_json else 2))
