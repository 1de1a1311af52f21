"""Which publications are for a server: those whose pair has the target and the draft that it has
loaded, whatever the pair is called and wherever its checkpoints lie."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from spectune.engines.vllm.folder import ServerDescription, table_of
from spectune.runtime.checkpoints import identity
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import PairError, PolicyError
from spectune.traces.schema import devices_of
from spectune.traces.tables import FollowedServer


class Models(NamedTuple):
    """What a server has loaded: the identities of its target and of its draft (empty where it
    drafts without a checkpoint of its own), and what drafts, ``ngram``, ``none`` or vLLM's name of
    the method."""

    target: str
    draft: str
    method: str

    def draft_in(self, pair: Mapping[str, Any]) -> str | None:
        """The name of what drafts here in a pair (:attr:`PairSpec.models`); None where that is of
        other models."""
        if pair.get("target") != self.target:
            return None
        if not self.draft or self.method in pair["methods"]:
            return self.method
        return next((name for name, found in pair["drafts"].items() if found == self.draft), None)


def method_of(engine: ServerDescription) -> tuple[str, str | None]:
    """What drafts in a server, ``ngram``, ``none`` or vLLM's name of the method; and its draft's
    checkpoint, None where it has none of its own."""
    loaded = engine.draft_model if engine.draft_model != engine.model else None
    method = engine.method or "none"
    return "ngram" if method.startswith("ngram") else method, loaded


def models_of(engine: ServerDescription) -> Models:
    """Raises PairError where the target cannot be read."""
    method, loaded = method_of(engine)
    draft = ""
    if loaded is not None:
        with suppress(PairError):  # of what only vLLM reads
            draft = identity(loaded)
    return Models(identity(engine.model), draft, method)


def why_not(
    server: FollowedServer, policy: Policy, name: str, pair: Mapping[str, Any], device: str
) -> str:
    """Why a server will not run a policy that is published on a device for a pair, by its name and
    its :attr:`PairSpec.models`; empty where it can."""
    engine = ServerDescription.model_validate(server.engine)
    if device not in devices_of(engine.device_name):
        name = engine.device_name
        return f"it runs on {name}, and this is for {device}: say --device {name}"
    draft = Models(**server.models).draft_in(pair)
    if draft is None:
        loaded = f" with {engine.draft_model}" if engine.draft_model else ""
        return f"it serves {engine.model}{loaded}, which are not of pair {name}"
    try:
        table_of(policy, engine, draft)
    except PolicyError as error:
        return str(error)
    return ""
