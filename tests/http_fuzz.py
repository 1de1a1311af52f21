"""Requests made from a server's own OpenAPI document."""

from __future__ import annotations

from collections import Counter

import schemathesis
from http_server import MODEL, Served, error_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.generation import GenerationMode

ALLOWED, NOT_ALLOWED = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
MODES = ALLOWED, NOT_ALLOWED
"""Bodies that the document allows, and such that it does not."""
POSTED = "/v1/completions", "/v1/chat/completions"
ASKED = "/v1/models", "/health", "/ready", "/metrics"
PLAIN = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "seed", "stream"}
"""Keys of the bodies that have no other: most of the rest ask for what is not served."""


def send_made(server: Served, path: str, mode: GenerationMode, cases: int) -> Counter[int]:
    """How often each status was answered, to so many requests made by the document. Raises
    AssertionError for a 500, for a status that the document lacks, and for a refusal without
    OpenAI's error object."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = document[path]["POST" if path in POSTED else "GET"]
    documented, told = operation.definition.raw["responses"], Counter[int]()

    @settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 9))
    def send(case: Case, among_ten: int) -> None:
        _serve_soon(case, is_for_our_model=among_ten > 0, is_plain=among_ten > 5)
        response = case.call(timeout=240)
        told[response.status_code] += 1
        code = str(response.status_code)
        assert response.status_code != 500, (case.body, response.text)
        assert code in documented or f"{code[0]}XX" in documented, (code, response.text)
        if response.status_code >= 400:
            error_of(response, response.status_code)

    send()
    return told


def _serve_soon(case: Case, *, is_for_our_model: bool, is_plain: bool) -> None:
    """Has a body ask for few tokens, mostly of the model that there is, and often for little
    else."""
    body = case.body
    if isinstance(body, dict):
        if is_plain:
            for key in body.keys() - PLAIN:
                del body[key]
        if is_for_our_model:
            body["model"] = MODEL
        for key in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(key), int):
                body[key] = min(body[key], 3)
