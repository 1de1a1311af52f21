"""Counters of the server, in Prometheus' text format: vLLM's names where vLLM counts the same, and
ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from spectune.runtime.loop import Round

MEANINGS = {
    "vllm:spec_decode_num_drafts_total": "Rounds in which something was drafted.",
    "vllm:spec_decode_num_draft_tokens_total": "Tokens that were drafted.",
    "vllm:spec_decode_num_accepted_tokens_total": "Drafted tokens that were accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "Accepted tokens by place in a draft.",
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    "vllm:generation_tokens_total": "Tokens of texts.",
    "vllm:num_requests_running": "Texts that have a seat.",
    "vllm:num_requests_waiting": "Texts that wait for one.",
    "spectune_steps_total": "Steps of the decoder.",
    "spectune_rounds_total": "Rounds, one of each text in a step.",
    "spectune_responses_total": "Answers and refusals by HTTP status; 499: the client left.",
    "spectune_first_token_seconds_sum": "Seconds to the first token.",
    "spectune_first_token_seconds_count": "Responses that had one.",
    "spectune_recorded": "Texts by what became of them on the way to the database.",
    "spectune_policy_version": "The publication in force; 0: none.",
}


class Metrics:
    """What is counted; :meth:`observe` is called by the decode thread, all else by the event
    loop."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, name: str, amount: float = 1, labels: str = "") -> None:
        self.counts[name, labels] += amount

    def observe(self, rounds: Sequence[Round]) -> None:
        """Counts a step."""
        self.add("spectune_steps_total")
        for one in rounds:
            step = one.step
            self.add("spectune_rounds_total")
            self.add("vllm:generation_tokens_total", step.emitted)
            if step.drafted:
                self.add("vllm:spec_decode_num_drafts_total")
                self.add("vllm:spec_decode_num_draft_tokens_total", step.drafted)
                self.add("vllm:spec_decode_num_accepted_tokens_total", step.accepted)
            for place in range(step.accepted):
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                self.add(name, labels=f'position="{place}"')

    def text(self, model: str, gauges: Mapping[tuple[str, str], float]) -> str:
        """All of it, with ``gauges``, labelled by the model's name."""
        return "\n".join([*self._lines(model, gauges), ""])

    def _lines(self, model: str, gauges: Mapping[tuple[str, str], float]) -> Iterator[str]:
        quoted = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", " ")
        values: dict[tuple[str, str], float] = {**self.counts, **gauges}
        for name, meaning in MEANINGS.items():
            kind = "counter" if name.endswith(("_total", "_sum", "_count")) else "gauge"
            found = sorted((labels, value) for (of, labels), value in values.items() if of == name)
            yield f"# HELP {name} {meaning}"
            yield f"# TYPE {name} {kind}"
            for labels, value in found or [("", 0)]:
                each = ",".join(filter(None, (f'model_name="{quoted}"', labels)))
                number = repr(value) if value % 1 else int(value)
                yield f"{name}{{{each}}} {number}"
