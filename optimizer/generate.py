"""Streaming one text to a terminal, token by token in the colour of where it came from."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice
from typing import Any

from rich.console import Console
from rich.text import Text

from spectune.optimizer.execute import WARM_TOKENS, DecodeOptions, counts_of, first_token_s
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair
from spectune.runtime.loop import DecodeRequest, Round, StaticSource
from spectune.runtime.policies.document import AUTOREGRESSIVE
from spectune.runtime.policies.plan import Plan, prepare
from spectune.traces.schema import Request
from spectune.traces.text import printable

ACCEPTED, OWN = "green", "bold yellow"


def generate(
    pair: LoadedPair,
    prepared: Plan,
    prompt: str,
    options: DecodeOptions,
    console: Console,
    *,
    compare: bool = True,
) -> dict[str, Any]:
    """Streams the continuation of ``prompt``: drafted and accepted tokens in green, the target's
    own in yellow.

    Returns ``text``, ``token_ids``, ``rounds``, ``tau``, ``tokens_per_s``,
    ``time_to_first_token_s`` and, with ``compare``, ``autoregressive_tokens_per_s`` and
    whether the texts are equal. Raises WorkloadError when the prompt does not fit.
    """
    item = Request("prompt", "prompt", prompt)
    ids = pair.encode_request(item, chat=options.chat)
    decoder = Decoder(pair, StaticSource(prepared), options.verifier)
    request = decoder.request(
        item, ids, options.sampling, options.max_new_tokens, options.stop_strings
    )
    plain = StaticSource(prepare(AUTOREGRESSIVE, pair.draft_names))
    pair.reserve(len(ids) + options.max_new_tokens + 1)
    first = replace(request, prompt_ids=ids[:WARM_TOKENS])
    for source in (plain, StaticSource(prepared)):  # first touches of the weights are not timed
        list(islice(Decoder(pair, source, options.verifier).rounds(first), 4))
    rounds, seconds = _stream(decoder, request, console)
    output = [token for r in rounds for token in r.tokens]
    steps = [r.step for r in rounds]
    counts, first_s = counts_of(steps, seconds), first_token_s(steps, seconds)
    result: dict[str, Any] = {
        "text": pair.text(output),
        "token_ids": output,
        "policy": prepared.policy.spelled_out(),
        "rounds": counts.rounds,
        "tau": counts.mean_accepted_length,
        "drafted_tokens": counts.drafted_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "tokens_per_s": counts.tokens_per_s,
        "time_to_first_token_s": first_s,
    }
    console.print()
    colours = (("accepted draft tokens", ACCEPTED), "  ", ("the target's own", OWN))
    console.print(Text.assemble(*colours, f"   policy: {prepared.policy.label()}"))
    line = (
        f"{counts.emitted_tokens} tokens in {counts.rounds} rounds, tau "
        f"{counts.mean_accepted_length:.2f}, first token after {first_s * 1e3:.0f} ms, "
        f"{counts.tokens_per_s:.1f} tokens/s"
    )
    if compare and any(p.speculates for p in prepared.policy.candidates):
        again = Decoder(pair, plain, options.verifier).decode(request)
        speed = len(output) / again.seconds
        result["autoregressive_tokens_per_s"] = speed
        result["same_text"] = again.trajectory.output_ids.tolist() == output
        line += f" against {speed:.1f} autoregressively ({counts.tokens_per_s / speed:.2f} times)"
        if options.verifier == "coupled":
            dtype = str(pair.target.dtype).removeprefix("torch.")
            line += (
                ", same text" if result["same_text"] else f", ANOTHER TEXT (rounding in {dtype})"
            )
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
