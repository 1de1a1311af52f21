"""`policies rollout`, `abort` and `thaw`: a policy that comes into force on proof, by blocks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sqlalchemy.orm import Session

from spectune.optimizer.commands.common import Talk, device_of, open_store, pair_of, policy_named
from spectune.optimizer.commands.results import Result
from spectune.optimizer.deployment import Place, refusal
from spectune.optimizer.followed_servers import Servers, able_servers
from spectune.optimizer.rollout.conductor import conduct
from spectune.optimizer.rollout.decision import BLOCK_S
from spectune.optimizer.rollout.rollout_words import in_words
from spectune.optimizer.signals import stop_on_signals
from spectune.runtime.policies.document import Policy
from spectune.settings import PoliciesAbort, PoliciesRollout, PoliciesThaw
from spectune.traces.errors import ConfigError, PolicyError
from spectune.traces.store import TraceStore
from spectune.traces.tables import FollowedServer, Rollout

SHORTEST_BLOCK_S = 3.0


def rollout(s: PoliciesRollout, talk: Talk) -> Result:
    spec, device = pair_of(s), device_of(s.device)
    check_block(s.block)
    if s.conduct:
        import_module("scipy.special")  # of its bounds: refused before anything begins
    with open_store(s) as store:
        policy = policy_named(store, s.policy, spec.id, device, s.deployment, talk)
        over = store.active_publication(spec.id, device, s.deployment)
        store.put_pair(spec.id, spec.name, spec.to_json(), spec.models)
        begun = begin(
            store,
            policy,
            spec.id,
            Place(device, s.deployment, over),
            talk.tell,
            block_s=s.block,
            first_token_limit_s=s.first_token,
            actor="cli",
            reason=s.reason or "rolled out by hand",
        )
        if not s.conduct:
            talk.tell(in_words(begun))
        else:
            left = "ended before, it waits for `schedule run`, `control` or this command again"
            talk.tell(f"rollout {begun.id} of {policy.label()} is conducted here; {left}")
            with stop_on_signals(stop := threading.Event()):
                conduct(store, stop, talk.tell, number=begun.id)
        ended = store.rollout(begun.id) or begun
    is_left = s.conduct and ended.verdict not in (None, "promoted")
    return Result(in_words(ended), ended.to_json(), exit_code=1 if is_left else 0)


def check_block(block_s: float) -> None:
    """Raises ConfigError where the blocks of a rollout cannot be so long."""
    if not SHORTEST_BLOCK_S <= block_s <= 600:
        raise ConfigError(f"--set block={block_s:g}: 3 s to 10 minutes are expected")


def servers_of(store: TraceStore, deployment: str) -> list[FollowedServer]:
    """Those that may take turns in a deployment. Raises PolicyError where none is there."""
    if there := Servers.of(store).of_deployment(deployment):
        return there
    raise PolicyError(
        f"no server follows deployment {deployment}: a rollout is judged by what servers decode; "
        "start `follow` there, or `serve`"
    )


def begin(
    store: TraceStore,
    policy: Policy,
    pair_id: str,
    place: Place,
    tell: Callable[[str], None],
    *,
    block_s: float = BLOCK_S,
    guard: Callable[[Session], None] | None = None,
    **how: Any,
) -> Rollout:
    """Begins a rollout of a policy of a stored pair in a place, or returns the one of the same
    policy that is open there. ``how``: further fields of it. Raises PolicyError where no server
    that is followed can run it, RolloutError and StaleVersionError."""
    device, deployment, over = place.device, place.deployment, place.over
    pair = store.get_pair(pair_id)
    if why := refusal(deployment, policy):
        raise PolicyError(why)
    if over is not None and over.policy_id == policy.id:
        raise PolicyError(f"{policy.label()} is in force already, as version {over.version}")
    able_servers(servers_of(store, deployment), policy, (pair.name, pair.models), device, tell)
    for open_one in store.rollouts(deployment, is_open=True):
        is_here = (open_one.pair_id, open_one.device) == (pair_id, device)
        if is_here and open_one.policy_id == policy.id:
            return open_one
    store.put_policy(policy.id, policy.spelled_out(), policy.label())
    before = store.list_publications(pair_id, device)
    tuned = (p.sampling for p in before if p.policy_id == policy.id and p.sampling is not None)
    rollout = Rollout(
        deployment=deployment,
        pair_id=pair_id,
        device=device,
        policy_id=policy.id,
        seed=secrets.randbelow(2**31),
        block_s=block_s,
        **{"sampling": next(tuned, None), **how},
    )
    return store.begin_rollout(rollout, expected=over.version if over else 0, guard=guard)


def abort(s: PoliciesAbort, talk: Talk) -> Result:
    spec, device = pair_of(s), device_of(s.device)
    with open_store(s) as store:
        found = store.rollouts(s.deployment, is_open=True)
        here = [r for r in found if (r.pair_id, r.device) == (spec.id, device)]
        if not here:
            others = ", ".join(f"{r.id} (pair {r.pair_id}, {r.device})" for r in found)
            where = f"in deployment {s.deployment} for pair {spec.id} ({spec.name}) on {device}"
            hint = f"; open there: {others}" if others else ""
            raise ConfigError(f"no rollout is open {where}{hint}")
        ended = store.abort_rollout(here[0].id, s.reason)
    return Result(in_words(ended), ended.to_json())


def thaw(s: PoliciesThaw, talk: Talk) -> Result:
    with open_store(s) as store:
        forgiven = store.thaw(s.deployment)
    text = f"deployment {s.deployment}: {forgiven} rollouts that did harm are forgiven"
    return Result(text, {"deployment": s.deployment, "forgiven": forgiven})
