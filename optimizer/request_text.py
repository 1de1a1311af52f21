"""One request of a recording, its texts decoded where the pair's tokenizer is at hand."""

from __future__ import annotations

from typing import Any

from spectune.runtime.pair import PairSpec
from spectune.runtime.text_codec import target_tokenizer
from spectune.traces.errors import PairError, TraceError
from spectune.traces.store import TraceStore
from spectune.traces.store.query import TraceFilter, requests, rounds


def request_text(store: TraceStore, recording: str, request: str) -> dict[str, Any]:
    """One request of a recording: token ids of its prompt and its output, both decoded by the
    tokenizer of the pair (None where that is not at hand, and ``undecoded`` says why), and its
    ``rounds``. Raises TraceError where the recording has no such request, or not its text."""
    info = store.get_recording(recording)
    only = TraceFilter(recordings=(info.id,), request=request)
    rows = requests(store, only)
    if not rows:
        raise TraceError(
            f"recording {info.id} has no request {request!r} (see `traces show {info.id}`)"
        )
    place = rows[-1]["recording_id"], rows[-1]["ordinal"]
    found = [*store.iterate(place[0], (), ordinals=[place[1]])]
    if not found:
        raise TraceError(f"the text of request {request!r} of recording {info.id} is not stored")
    (stored,) = found
    ids = [stored.trajectory.prompt_ids.tolist(), stored.trajectory.output_ids.tolist()]
    texts, undecoded = [None, None], ""
    try:
        spec = PairSpec.from_json(store.get_pair(info.pair_id).document, where="its pair")
        tokenizer = target_tokenizer(spec)
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in ids]
    except PairError as error:
        undecoded = str(error)
    return {
        "recording": info.id,
        "request": request,
        "category": stored.trajectory.category,
        "prompt": texts[0],
        "text": texts[1],
        "undecoded": undecoded,
        "prompt_ids": ids[0],
        "output_ids": ids[1],
        "rounds": [
            row for row in rounds(store, only) if (row["recording_id"], row["ordinal"]) == place
        ],
    }
