"""What counts of rounds say of other windows, where no texts were kept: acceptance by position, as
far as rounds drafted; one that kept all of a shorter draft is left out beyond it (Kaplan, Meier).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectune.runtime.policies.document import AnyPolicy, FixedWindow, NoStop, Policy
from spectune.traces.acceptance import Survival
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Counts, Outcome, RequestOutcome
from spectune.traces.store import RecordingInfo

APPROXIMATE = "counts without texts: under another window rounds begin elsewhere"
INSTEAD = (
    "record with the plugin (`engines vllm command`), or ingest responses with return_token_ids, "
    "whose texts say what every window would keep"
)


def holds_counts(info: RecordingInfo) -> bool:
    """Whether a recording has counts in the place of texts."""
    return "counts" in info.options


def survival_of(counts: Mapping[str, Sequence[int]]) -> Survival:
    """Sums over rounds by position; ``counts``: by tokens drafted, rounds by tokens accepted."""
    deepest = max((int(drafted) for drafted in counts), default=0)
    at_risk, survived = [0.0] * deepest, [0.0] * deepest
    for drafted, kept in counts.items():
        for j in range(int(drafted)):
            at_risk[j] += sum(kept[j:])
            survived[j] += sum(kept[j + 1 :])
    rounds = sum(sum(kept) for kept in counts.values())
    return Survival(rounds, tuple(at_risk), tuple(survived))


def counted(info: RecordingInfo, policy: AnyPolicy) -> tuple[Outcome, str]:
    """A policy's outcome by a recording's counts, without seconds, and why it is approximate: ""
    for the one window that was drafted.

    Raises PolicyError for what counts say nothing of, with what to record instead.
    """
    counts, draft = info.options["counts"], info.options["draft"]
    has = f"recording {info.id} has counts of rounds of draft {draft!r} without texts"
    if not isinstance(policy, Policy) or policy.is_tree or not isinstance(policy.stop, NoStop):
        raise PolicyError(f"{has}, which say nothing of trees, stops and choosers; {INSTEAD}")
    if policy.speculates and (policy.draft != draft or policy.shortlisted):
        raise PolicyError(f"{has}, which say nothing of {policy.label()!r}; {INSTEAD}")
    if not isinstance(policy.window, FixedWindow):
        raise PolicyError(f"{has}, which say nothing of a window that changes; {INSTEAD}")
    survival, gamma = survival_of(counts), policy.gamma_max
    known = survival.conditional[:gamma]
    if len(known) < gamma or not all(survival.at_risk[:gamma]):
        most = sum(risk > 0 for risk in survival.at_risk)
        raise PolicyError(f"{has}, at most {most} tokens, which say nothing of {gamma}; {INSTEAD}")
    length, reached = 1.0, 1.0
    for chance in known:
        reached *= chance
        length += reached
    emitted = sum((i + 1) * n for kept in counts.values() for i, n in enumerate(kept))
    rounds = round(emitted / length)
    drafted = gamma * rounds
    requests = int(info.options["responses"])
    total = Counts(requests, rounds, emitted, emitted - rounds, drafted, drafted, drafted + rounds)
    outcome = Outcome(policy.id, "replayed", (RequestOutcome("all", "serve", total),))
    return outcome, "" if set(counts) == {str(gamma)} else APPROXIMATE
