"""Streaming one text to a terminal, token by token in the colour of where it came from."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text

from spectune.optimizer.execute import Encoded, counts_of, first_token_s, warm
from spectune.runtime.cuda.graphs import prepare_graphs
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, Round, StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.text import printable

ACCEPTED, OWN = "green", "bold yellow"


def generate(
    pair: LoadedPair, plan: Plan, encoded: Encoded, console: Console, *, compare: bool = True
) -> dict[str, Any]:
    """Streams the continuation of the one request that is ``encoded``: drafted and accepted tokens
    in green, the target's own in yellow.

    Returns ``text``, ``token_ids``, ``rounds``, ``tau``, ``tokens_per_s``,
    ``time_to_first_token_s`` and, with ``compare``, ``autoregressive_tokens_per_s`` and
    whether the texts are equal.
    """
    ((_, request),) = encoded.items
    verifier = encoded.options.verifier
    warm(pair, encoded)
    prepare_graphs(pair, plan)
    rounds, seconds = _stream(Decoder(pair, StaticSource(plan), verifier), request, console)
    output, steps = [token for r in rounds for token in r.tokens], [r.step for r in rounds]
    counts, first_s = counts_of(steps, seconds), first_token_s(steps, seconds)
    result: dict[str, Any] = {
        "text": pair.text(output),
        "token_ids": output,
        "policy": plan.policy.spelled_out(),
        "rounds": counts.rounds,
        "tau": counts.mean_accepted_length,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tokens_per_s": counts.tokens_per_s,
        "time_to_first_token_s": first_s,
    }
    console.print()
    colours = (("accepted draft tokens", ACCEPTED), "  ", ("the target's own", OWN))
    console.print(Text.assemble(*colours, f"   policy: {plan.policy.label()}"))
    line = (
        f"{counts.emitted_tokens} tokens in {counts.rounds} rounds, tau "
        f"{counts.mean_accepted_length:.2f}, first token after {first_s * 1e3:.0f} ms, "
        f"{counts.tokens_per_s:.1f} tokens/s"
    )
    if compare and any(p.speculates for p in plan.policy.candidates):
        plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
        again = Decoder(pair, plain, verifier).decode(request)
        speed = len(output) / again.seconds
        same = again.trajectory.output_ids.tolist() == output
        result |= {"autoregressive_tokens_per_s": speed, "same_text": same}
        line += f" against {speed:.1f} autoregressively ({counts.tokens_per_s / speed:.2f} times)"
        if verifier == "coupled":
            dtype = str(pair.target.dtype).removeprefix("torch.")
            line += ", same text" if same else f", ANOTHER TEXT (rounding in {dtype})"
    console.print(line)
    return result


def _stream(
    decoder: Decoder, request: DecodeRequest, console: Console
) -> tuple[list[Round], float]:
    """Decodes a request and shows its tokens as they come. Its rounds, and the seconds that they
    took without the showing."""
    output: list[int] = []
    rounds: list[Round] = []
    shown = ""
    began, drawing = time.perf_counter(), 0.0
    for round_ in decoder.rounds(request):
        rounds.append(round_)
        drew = time.perf_counter()
        for i, token in enumerate(round_.tokens):
            output.append(token)
            text = decoder.pair.text(output)
            # A token may end inside a character; its bytes are shown with the token that completes
            # it.
            if not text.endswith("\ufffd"):
                style = ACCEPTED if i < round_.step.accepted else OWN
                console.print(Text(printable(text[len(shown) :]), style=style), end="")
                shown = text
        drawing += time.perf_counter() - drew
    return rounds, time.perf_counter() - began - drawing
