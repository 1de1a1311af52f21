"""What a server's responses say of its drafts, where no plugin of ours runs in it.

vLLM (``--per-request-spec-decode-metrics detailed``) says of every round how many tokens it drafted
and kept, and, asked for ``return_token_ids``, the tokens of prompt and text. SGLang's ``meta_info``
has how often how many were kept. Counts are censored: a round that kept all that it drafted would
have kept more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.engines.protocol import chain_round, text_of
from spectune.runtime.pair import PairSpec
from spectune.traces.errors import TraceError
from spectune.traces.files import parse_json, read_text
from spectune.traces.schema import Finish, Sampling, Step, Trajectory, Verifier
from spectune.traces.store import Asked, TraceStore

Round = tuple[int, int]
"""Tokens drafted, tokens of them accepted."""
HOW = (
    "vLLM says it when started with --per-request-spec-decode-metrics detailed, "
    "SGLang in meta_info with --speculative-algorithm"
)


@dataclass(frozen=True)
class Ingested:
    """A file of responses. ``requests``: their texts and rounds where every response has its token
    ids, else none. ``rounds``: how often which round was. ``without``: responses that say nothing
    of rounds."""

    engine: str
    requests: tuple[tuple[Trajectory, tuple[Step, ...]], ...]
    rounds: Mapping[Round, int]
    responses: int
    without: int

    def counts(self) -> dict[str, list[int]]:
        """Rounds by tokens drafted, and of those by tokens accepted, from 0 on; JSON-ready."""
        return {
            str(drafted): [self.rounds.get((drafted, kept), 0) for kept in range(drafted + 1)]
            for drafted in sorted({drafted for drafted, _ in self.rounds})
        }


def read_responses(path: str, draft: str, sampling: Sampling) -> Ingested:
    """Reads a file with a response a line, of requests drafted with ``draft`` and drawn by
    ``sampling``. Raises TraceError, by line, for what is no response, and for a file that says
    nothing of rounds."""
    found: list[tuple[Trajectory, tuple[Step, ...]]] = []
    rounds: Counter[Round] = Counter()
    engines: set[str] = set()
    count = told = 0
    # Not splitlines: a text may hold other line separators, such as U+2028.
    for number, line in enumerate(read_text(path, path, TraceError).split("\n"), 1):
        if not line.strip():
            continue
        where, count = f"{path}: line {number}", count + 1
        response = parse_json(line, where, TraceError)
        if not isinstance(response, dict):
            raise TraceError(f"{where}: a response is a JSON object")
        try:
            engine, own = _rounds(response)
            text = _trajectory(response, f"{number}", sampling)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise TraceError(f"{where}: no response of vLLM or SGLang: {error!r}") from None
        if engine:
            engines.add(engine)
            told += 1
            rounds.update(own)
            if text is not None:
                found.append((text, _steps(own, text, draft) if engine == "vllm" else ()))
    if not rounds:
        raise TraceError(f"{path}: no response says how drafts fared; {HOW}")
    if len(engines) > 1:
        raise TraceError(
            f"{path}: responses of {' and '.join(sorted(engines))}; give each its file"
        )
    requests = tuple(found) if len(found) == told else ()
    return Ingested(engines.pop(), requests, dict(rounds), count, count - told)


def keep(store: TraceStore, spec: PairSpec, found: Ingested, draft: str, sampling: Sampling) -> str:
    """Stores a pair's responses as a recording; its id. Where they hold no texts it has counts
    among its options, and no requests."""
    options: dict[str, Any] = {"engine": found.engine, "draft": draft}
    if not found.requests:
        options |= {"counts": found.counts(), "responses": found.responses - found.without}
    store.put_pair(spec.id, spec.name, spec.to_json())
    longest = max((text.max_new_tokens for text, _ in found.requests), default=1)
    verifier: Verifier = "coupled" if sampling.greedy else "greedy"
    made = store.create_recording(
        Asked(spec.id, None, sampling, longest, verifier, options, source="serve")
    )
    store.append_trajectories(made.id, [(i, *one) for i, one in enumerate(found.requests)])
    store.finish_recording(made.id)
    return made.id


def _rounds(response: Mapping[str, Any]) -> tuple[str, list[Round]]:
    """The engine that answered so, "" where it says nothing of rounds, and its rounds; vLLM's are
    in their order."""
    if (info := response.get("meta_info")) is not None:
        kept = info.get("spec_correct_drafts_histogram")
        if not kept:
            return "", []
        drafted, rest = divmod(int(info["spec_num_proposed_drafts"]), int(info["spec_verify_ct"]))
        if rest or drafted < len(kept) - 1:
            raise ValueError("its histogram does not fit one number of draft tokens")
        return "sglang", [
            (drafted, i) for i, times in enumerate(kept) for _ in range(_whole(times))
        ]
    told = (response.get("metrics") or {}).get("speculative_decoding")
    if told is None:
        return "", []
    if "per_step_drafted" in told:
        pairs = list(zip(told["per_step_drafted"], told["per_step_accepted"], strict=True))
    elif (histograms := told.get("acceptance_histogram_by_draft_length")) is None:
        return "", []
    else:
        pairs = [
            (int(drafted), kept)
            for drafted, histogram in histograms.items()
            for kept, times in enumerate(histogram)
            for _ in range(_whole(times))
        ]
    found = [(_whole(drafted), _whole(kept)) for drafted, kept in pairs]
    if any(kept > drafted for drafted, kept in found):
        raise ValueError("a round keeps more than it drafted")
    return "vllm", found


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _trajectory(response: Mapping[str, Any], name: str, sampling: Sampling) -> Trajectory | None:
    """The text of a response of vLLM that has its token ids, else None."""
    choices = response.get("choices")
    if not choices:
        return None
    (choice,) = choices
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    tokens = choice.get("token_ids")
    if not prompt or not tokens:
        return None
    finish: Finish = "length"
    if choice["finish_reason"] == "stop":
        finish = "eos" if choice.get("stop_reason") is None else "stop"
    return text_of(
        str(response.get("id") or name),
        "serve",
        [_whole(t) for t in prompt],
        [_whole(t) for t in tokens],
        sampling=sampling,
        max_new_tokens=len(tokens),
        finish=finish,
    )


def _steps(rounds: Sequence[Round], text: Trajectory, draft: str) -> tuple[Step, ...]:
    """A text's rounds, the prompt's pass first; none where they are not all there: vLLM does not
    tell those that drafted nothing."""
    steps = [Step(0, 0, 1, 0, 1, 0)]
    length = len(text.output_ids)
    for drafted, kept in rounds:
        start = steps[-1].start + steps[-1].emitted
        emitted = min(kept + 1, length - start)
        step = chain_round(start, drafted, min(kept, emitted), emitted, draft=draft, policy="")
        steps.append(step)
        if emitted <= 0:
            return ()
    return tuple(steps) if steps[-1].start + steps[-1].emitted == length else ()
