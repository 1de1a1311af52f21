"""What a rollback goes back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spectune.traces.tables import Acknowledgement, Publication


def earlier(
    publications: Sequence[Publication],
    answers: Callable[[int], Sequence[Acknowledgement]],
    can_run: Callable[[Publication], bool],
) -> Publication | None:
    """The publication to go back to from the newest of a list (newest first): the last one before
    it of another policy that a server applied, else that none refused; among those that ``can_run``
    and that no rollback has left. ``answers``: what servers did with a version."""
    others = [p for p in _before(publications) if p.policy_id != publications[0].policy_id]
    unanswered = None
    for publication in filter(can_run, others):
        statuses = {a.status for a in answers(publication.version)}
        if statuses - {"refused"}:
            return publication
        if unanswered is None and not statuses:
            unanswered = publication
    return unanswered


def origin(publication: Publication) -> int:
    """The version that a publication repeats where it is a rollback, else its own."""
    rollback = publication.evidence.get("rollback") or {}
    return int(rollback.get("to", publication.version))


def _before(publications: Sequence[Publication]) -> list[Publication]:
    """What was in force before the newest, the last first, as undoing walks it: a rollback goes
    back to its version, and what came after that is undone."""
    by_version = {p.version: p for p in publications}
    stack: list[int] = []
    for publication in reversed(publications):
        version = origin(publication)
        if version in stack:
            del stack[stack.index(version) + 1 :]
        else:
            stack.append(version)
    return [by_version[version] for version in stack[-2::-1] if version in by_version]
