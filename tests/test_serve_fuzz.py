"""Whatever the server's own OpenAPI document allows or forbids is answered, and as it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_fuzz import ALLOWED, ASKED, MODES, POSTED, send_made
from http_server import TEMPLATE, Served, served
from pairs import chain, make_pair, top_k
from recorded_texts import alternating
from schemathesis.generation import GenerationMode

from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import load_pair
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import parse_policy

CASES = 50
"""Of a route and a mode; `bench/run.py serve_clients` sends thousands."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose policy changes every second step."""
    file = str(make_pair(tmp_path_factory.mktemp("serve")))
    pair = load_pair(read_pair(file), device="cpu", dtype="float64")
    pair.tokenizer.chat_template = TEMPLATE
    documents = {"draft": "none"}, chain("near", 4), top_k("near", 3, 3, 8)
    plans = [prepare_for(pair, parse_policy(document)) for document in documents]
    with served(pair, alternating(plans)) as running:
        yield running


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", POSTED)
def test_whatever_is_posted_is_answered(server: Served, path: str, mode: GenerationMode) -> None:
    told = send_made(server, path, mode, CASES)
    assert told[200 if mode is ALLOWED else 400] > 0
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize("path", ASKED)
def test_what_is_asked_for_is_there(server: Served, path: str) -> None:
    assert send_made(server, path, ALLOWED, 2)[200] > 0
