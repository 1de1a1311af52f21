"""A chooser of drafts made ready to decode with: its candidates prepared, its costs resolved, its
choice for one prompt.

Fitting predicts the accuracies of every recorded prompt and keeps them with the artifact, so that a
replay decides as a decoder does, by the same costs, without a model to read prompts with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from spectune.runtime.policies.artifacts import DRAFT_CHOOSER, Artifacts, read_artifact
from spectune.runtime.policies.document import AnyPolicy, ChooserPolicy, Policy
from spectune.runtime.policies.draft_choice import TARGET, Chooser, Option
from spectune.runtime.policies.plan import Plan, compile_plan
from spectune.runtime.policies.prompt_features import Prompt
from spectune.runtime.policies.refusals import stored_numbers
from spectune.traces.errors import PolicyError, TraceError
from spectune.traces.schema import LatencyProfile, Sampling

PREDICTED: Final = "recorded"
"""The array, float64 [prompts, drafts], of accuracies predicted when it was fitted; the document's
list of this name says of whom."""


def prompt_key(ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """What a recorded prompt is found again by: 16 hex digits of a hash of its token ids."""
    return hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class ChooserPlan:
    """A chooser compiled: the runtime and a replay take a request's plan from it.

    ``plans``: those that may decode, by draft. ``options``: what they cost at temperature 0 and
    above; empty where the chooser does not choose. ``predicted``: float64 [drafts] by
    :func:`prompt_key`.
    """

    policy: ChooserPolicy
    chooser: Chooser
    plans: Mapping[str, Plan]
    options: tuple[tuple[Option, ...], ...]
    predicted: Mapping[str, npt.NDArray[np.float64]]
    version: int = 0

    @property
    def label(self) -> str:
        return self.policy.label()

    @property
    def candidates(self) -> tuple[Plan, ...]:
        """The plans that may decode."""
        return tuple(self.plans.values())

    @property
    def single(self) -> Plan | None:
        """The plan of every request, where the chooser does not choose."""
        return None if self.chooser.chooses else self.plans[self.chooser.single]

    def of_prompt(self, prompt: Prompt, new_tokens: int, sampling: Sampling) -> Plan:
        """The plan for a prompt that is to be answered with up to ``new_tokens`` tokens."""
        alphas = self.chooser.accuracies(self.chooser.features.transform([prompt]))
        return self._decided(alphas, prompt.tokens, new_tokens, sampling)

    def of_recorded(
        self, ids: Sequence[int] | npt.NDArray[np.integer], new_tokens: int, sampling: Sampling
    ) -> Plan:
        """The same for a prompt of the recording that the chooser was fitted to. Raises TraceError
        for any other."""
        if self.single is not None:
            return self.single
        found = self.predicted.get(prompt_key(ids))
        if found is None:
            raise TraceError(
                "the chooser was fitted to another recording, and only the pair's models can tell "
                "what it chooses for prompts of this one: `fit chooser --recording ID` on this "
                "one, or execute the policy (`run --policy POLICY`)"
            )
        return self._decided(found[None], len(ids), new_tokens, sampling)

    def _decided(
        self, alphas: npt.NDArray[np.float64], tokens: int, new_tokens: int, sampling: Sampling
    ) -> Plan:
        options = self.options[int(not sampling.greedy)]
        (chosen,) = self.chooser.decide(alphas, options, [tokens], [new_tokens])
        return self.plans[self.chooser.drafts[chosen]]


AnyPlan = Plan | ChooserPlan
"""A policy document compiled: a plan, or what takes one for each request."""


def stored_chooser(
    policy: ChooserPolicy, artifacts: Artifacts | None
) -> tuple[Chooser, dict[str, npt.NDArray[np.float64]]]:
    """The chooser that a policy names, and what it predicted of recorded prompts
    (:attr:`ChooserPlan.predicted`).

    Raises PolicyError where there is none, or it lacks a candidate's weights.
    """
    return read_artifact(policy, "draft", DRAFT_CHOOSER, artifacts, _read_chooser)


def plain_policies(policy: AnyPolicy, artifacts: Artifacts | None) -> tuple[Policy, ...]:
    """The policies that may decode: a chooser's candidates that are used, or the policy itself.
    Raises PolicyError as :func:`stored_chooser`."""
    if isinstance(policy, ChooserPolicy):
        return tuple(stored_chooser(policy, artifacts)[0].used.values())
    return (policy,)


def _read_chooser(
    document: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> tuple[Chooser, dict[str, npt.NDArray[np.float64]]]:
    chooser = Chooser.from_document(document, arrays)
    names = [str(row["prompt"]) for row in document.get(PREDICTED, ())]
    none = {PREDICTED: np.zeros((0, len(chooser.drafts)))}
    predicted = stored_numbers({**none, **arrays}, PREDICTED).astype(np.float64)
    if predicted.shape != (len(names), len(chooser.drafts)):
        raise ValueError(
            f"{len(names)} recorded prompts and predictions of shape {predicted.shape} do not go "
            "together; `fit chooser --recording ID` fits another"
        )
    return chooser, dict(zip(names, predicted, strict=True))


def prepare_chooser(
    policy: ChooserPolicy,
    drafts: Collection[str],
    *,
    profile: LatencyProfile | None = None,
    version: int = 0,
    artifacts: Artifacts | None = None,
) -> ChooserPlan:
    """:func:`runtime.policies.prepare.prepare` for a chooser: every candidate that may decode is
    prepared.

    Raises PolicyError where the artifact is missing or no chooser, a candidate cannot be prepared,
    the pair lacks the draft that reads prompts, or there is no profile to weigh the drafts by.
    """
    chooser, predicted = stored_chooser(policy, artifacts)
    if chooser.reader not in (None, TARGET, *drafts):
        raise PolicyError(
            f"draft.artifact: the chooser reads prompts with draft {chooser.reader!r}, which this "
            f"pair lacks (it has: {', '.join(sorted(drafts))}); fit one for it: "
            "`fit chooser --recording ID`"
        )
    if chooser.chooses and profile is None:
        raise PolicyError(
            "draft.ols weighs drafts by measured costs: run `profile` for this pair and "
            "device first"
        )
    ready: dict[str, Plan] = {}
    for name, candidate in chooser.used.items():
        try:
            ready[name] = compile_plan(
                candidate, drafts, profile=profile, version=version, artifacts=artifacts
            )
        except PolicyError as error:
            raise PolicyError(f"draft.artifact: candidate {name!r}: {error}") from None
    options: tuple[tuple[Option, ...], ...] = ()
    if chooser.chooses and profile is not None:
        options = tuple(chooser.options(profile, sampled=hot, ready=ready) for hot in (False, True))
    return ChooserPlan(policy, chooser, ready, options, predicted, version)
