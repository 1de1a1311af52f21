"""What `run` writes of the requests that were served: texts and rounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from spectune.optimizer.commands.outputs import write_rounds
from spectune.optimizer.commands.shared import rounds_of

if TYPE_CHECKING:
    from spectune.engines.protocol import Answered
    from spectune.runtime.decoder import Decoded
    from spectune.runtime.words import Texts
    from spectune.traces.errors import OutputError


def texts_of(words: Texts, served: Iterable[Decoded | Answered]) -> list[dict[str, Any]]:
    """The rows of ``--outputs``."""
    outputs = [(d.trajectory.request_id, d.trajectory.output_ids.tolist()) for d in served]
    return [{"id": request, "token_ids": ids, "text": words.text(ids)} for request, ids in outputs]


def with_rounds(texts: Iterable[dict[str, Any]], served: Iterable[Decoded | Answered]) -> list[dict[str, Any]]:
    return [
        {**text, "seconds": d.seconds, "rounds": list(rounds_of(d.trajectory.request_id, d.steps))}
        for text, d in zip(texts, served, strict=True)
    ]


def write_results(
    kw: dict[str, Any], texts: Iterable[dict[str, Any]], served: Iterable[Decoded | Answered]
) -> OutputError | None:
    """Writes the files that ``run`` was asked for. An error is returned: what can be stored is to be stored first."""
    from spectune.traces.errors import OutputError

    try:
        if kw["outputs"]:
            write_rounds(kw["outputs"], texts)
        if kw["per_round"]:
            write_rounds(kw["per_round"], (row for d in served for row in rounds_of(d.trajectory.request_id, d.steps)))
    except OutputError as error:
        return error
    return None
