"""The HTTP server as its clients see it: OpenAI's answers, at rest and while another policy comes
into force every few steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from http_server import MODEL, TEMPLATE, Served, chunks_of, deaf_client, error_of, served
from hypothesis import given
from hypothesis import strategies as st
from pairs import chain, make_pair, tokenizer, top_k
from recorded_texts import alternating
from test_docs import blocks
from transformers import AutoModelForCausalLM
from waiting import eventually

from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, parse_policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.text_codec import TextCodec
from spectune.service.app import BODY_BYTES
from spectune.service.text_stream import TextStream

DOCUMENTS: list[dict[str, Any]] = [
    {"draft": "none"},
    chain("near", 4),
    top_k("near", 3, 3, 8),
    chain("far", 6, stop={"kind": "max_prob", "threshold": 0.3}),
    chain("ngram", 5),
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "How many apples?"}]},
]
LONG = "def add(a, b):\n    return a + b\n"
BOTH = [("completions", {"prompt": LONG}), ("chat/completions", {"messages": TALK})]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    file = make_pair(tmp_path_factory.mktemp("serve"))
    loaded = load_pair(read_pair(str(file)), device="cpu", dtype="float64")
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def plans(pair: LoadedPair) -> list[Plan]:
    return [prepare_for(pair, parse_policy(document)) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def plain(pair: LoadedPair) -> Iterator[Served]:
    """A server that drafts nothing, one text at a time: what texts are held against."""
    file = str(Path(pair.spec.target).parent / "pair.json")
    own = load_pair(read_pair(file), device="cpu", dtype="float64", drafts=())
    own.tokenizer.chat_template = TEMPLATE
    with served(own, StaticSource(prepare(AUTOREGRESSIVE, own.draft_names)), seats=1) as running:
        yield running


@pytest.fixture(scope="module", params=["at rest", "published"])
def server(request: pytest.FixtureRequest, pair: LoadedPair, plans: list[Plan]) -> Iterator[Served]:
    """A server under one policy, and one whose policy changes every second step."""
    source = StaticSource(plans[1]) if request.param == "at rest" else alternating(plans)
    with served(pair, source) as running:
        yield running


def content(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


# -------------------------------------------------------------------------------------- the streams


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_stream_is_as_openai_has_it(server: Served, path: str, body: dict[str, Any]) -> None:
    """Usage in a last chunk without choices and null in the others, one id, the role first, the
    reason at the end; and its text is that of the whole answer."""
    body = {**body, "max_tokens": 24, "seed": 5, "n": 2}
    usual = server.chunks(path, **body)
    assert not any("usage" in chunk for chunk in usual)
    *chunks, last = server.chunks(path, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 48)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    for key in ("id", "model", "created", "object"):
        (value,) = {chunk[key] for chunk in (*chunks, last)}
        assert value
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        if "delta" in choices[0]:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert choices[-1]["delta"] == {}
    whole = server.texts(path, **body)
    assert [content(chunks, n) for n in (0, 1)] == [content(usual, n) for n in (0, 1)] == whole
    assert whole[0] != whole[1]


def test_a_refused_stream_is_no_stream(server: Served) -> None:
    response = server.post("completions", prompt="x", stream=True, max_tokens=0)
    assert "max_tokens" in error_of(response, 400)["message"]
    server.refused("completions", prompt="x", stream_options={"include_usage": True})


CODEC = TextCodec(tokenizer(), frozenset({0}), (512, {}), 300)
WORDS = st.lists(st.sampled_from(["ab", "é", "日本", "🎉", " the", "\n", "b", "aab"]), max_size=12)


@given(WORDS, st.lists(st.integers(1, 5)), st.lists(st.sampled_from(["ab", "bé", "本🎉", "a"])))
def test_text_comes_in_whole_characters_up_to_a_stop(
    words: list[str], sizes: list[int], stops: list[str]
) -> None:
    """Whatever bursts the tokens come in; what is held back is the beginning of a stop string, or
    of a character."""
    text = "".join(words)
    ids = CODEC.encode(text)
    stream, said, at = TextStream(CODEC, tuple(stops)), "", 0
    for size in [*sizes, len(ids)]:
        stream.feed(ids[at : at + size])
        at += size
        said += stream.take(is_ended=stream.is_stopped)[0]
        if not stream.is_stopped:
            known = CODEC.text(ids[:at]).rstrip("\ufffd")
            held = known.removeprefix(said)
            assert known.startswith(said)
            assert not held or any(stop.startswith(held) for stop in stops)
    stream.end()
    said += stream.take(is_ended=True)[0]
    places = [text.find(stop) for stop in stops if stop in text]
    assert said == text[: min(places, default=len(text))]
    assert stream.is_stopped == bool(places)


def parts_of(text: str) -> list[str]:
    """Two characters each, after the first of a text."""
    parts = [text[n : n + 2] for n in range(5, len(text) - 2)]
    return [part for part in parts if "\ufffd" not in part]


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_a_stop_string_ends_text_tokens_and_logprobs(
    server: Served, plain: Served, path: str, body: dict[str, Any]
) -> None:
    """Also within what one round accepted; no chunk has a part of it."""
    several = {"logprobs": 1} if path == "completions" else {"logprobs": True}
    for seed in range(4):
        body = {**body, "max_tokens": 30, "seed": seed, "temperature": 0.8}
        (whole,) = plain.texts(path, **body)
        for stop in parts_of(whole)[:2]:
            expected = whole[: whole.index(stop)]
            answer = server.answer(path, **body, stop=[stop, "\x01never"], **several)
            (choice,) = answer["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert (text, choice["finish_reason"]) == (expected, "stop")
            assert answer["usage"]["completion_tokens"] <= 30
            told = choice["logprobs"]
            if told is not None and "text_offset" in told:
                assert all(offset < len(expected) for offset in told["text_offset"])
            assert content(server.chunks(path, **body, stop=stop)) == expected


# ---------------------------------------------------------------------------------------- the texts


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {}, {"top_p": 0.9, "temperature": 0.7}, {"top_k": 12}]
)
def test_a_seed_gives_one_text(
    server: Served, plain: Served, path: str, body: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Streamed or not, alone or among others, drafted or not, under whatever is published."""
    bodies = [{**body, **sampling, "max_tokens": 20, "seed": seed} for seed in range(3)]
    expected = [plain.texts(path, **one)[0] for one in bodies]
    found: dict[int, str] = {}

    def ask(n: int) -> None:
        one = bodies[n % 3]
        stream = n >= 3
        found[n] = content(server.chunks(path, **one)) if stream else server.texts(path, **one)[0]

    asking = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert [found[n] for n in range(6)] == expected * 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 9e-6, 1e-5])
def test_a_temperature_next_to_none_is_greedy(server: Served, temperature: float) -> None:
    """Logits cannot be divided by it: a tree of such a draft had no node."""
    body = {"prompt": LONG, "max_tokens": 12, "top_p": 0.5, "n": 2}
    found = server.texts("completions", **body, temperature=temperature)
    assert found == server.texts("completions", **body, temperature=0)


def test_greedy_texts_are_those_of_transformers(server: Served) -> None:
    model = AutoModelForCausalLM.from_pretrained(server.pair.spec.target, dtype=torch.float64)
    ids = server.pair.encode(LONG)
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()
    text = server.pair.text(out[len(ids) :])
    assert server.texts("completions", prompt=ids, temperature=0, max_tokens=20) == [text]
    assert server.texts("completions", prompt=LONG, temperature=0, max_tokens=20) == [text]


def test_a_seed_that_is_drawn_is_told(server: Served) -> None:
    body = {"prompt": LONG, "max_tokens": 20}
    first, second = (server.answer("completions", **body) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.texts("completions", **body, seed=first["seed"])
    assert again == [choice["text"] for choice in first["choices"]]


def test_several_prompts_and_texts_are_numbered(server: Served) -> None:
    prompts = [LONG, "for i in", "The quick"]
    body = {"max_tokens": 12, "seed": 1}
    answer = server.answer("completions", prompt=prompts, n=2, **body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    alone = [server.texts("completions", prompt=prompt, n=2, **body) for prompt in prompts]
    assert texts == [text for pair_of_texts in alone for text in pair_of_texts]
    ids = [server.pair.encode(prompt) for prompt in prompts]
    assert server.texts("completions", prompt=ids, n=2, **body) == texts
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 6 * 12


def test_an_end_token_ends_a_text_unless_it_is_ignored(server: Served, plain: Served) -> None:
    body = {"prompt": LONG, "max_tokens": 200, "temperature": 2.0}
    seed, short = next(
        (seed, answer)
        for seed in range(40)
        if (answer := plain.answer("completions", **body, seed=seed))["usage"]["completion_tokens"]
        < 200
    )
    answer = server.answer("completions", **body, seed=seed)
    assert answer["choices"] == short["choices"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    whole = server.answer("completions", **body, seed=seed, ignore_eos=True)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"].startswith(short["choices"][0]["text"])


def test_usage_says_what_was_accepted(server: Served) -> None:
    before = [server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in KINDS]
    answer = server.answer("completions", prompt=LONG, max_tokens=64, seed=2)
    after = [server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in KINDS]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted, rejected = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
    assert accepted > 0
    drafted, kept = (b - a for a, b in zip(before, after, strict=True))
    assert (accepted, rejected) == (kept, drafted - kept)


KINDS = ("draft", "accepted")


# ------------------------------------------------------------------------------------ probabilities


def test_logprobs_are_those_of_transformers(server: Served) -> None:
    """Of echo and text: the first has none, the others are the model's whatever was drafted."""
    body = {"prompt": LONG, "max_tokens": 12, "seed": 3}
    answer = server.answer("completions", **body, echo=True, logprobs=5)
    (choice,) = answer["choices"]
    told, ids = choice["logprobs"], server.pair.encode(LONG)
    assert choice["text"] == LONG + server.texts("completions", **body)[0]
    assert len({len(values) for values in told.values()}) == 1
    assert len(told["tokens"]) == len(ids) + 12
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["text_offset"] == sorted(told["text_offset"])
    for offset, token in zip(told["text_offset"], told["tokens"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    model = AutoModelForCausalLM.from_pretrained(server.pair.spec.target, dtype=torch.float64)
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [float(row[token]) for row, token in zip(log_p, ids[1:], strict=False)]
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
    scored = server.answer("completions", prompt=ids, max_tokens=1, echo=True, logprobs=0)
    first = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert first[: len(ids)] == pytest.approx(told["token_logprobs"][: len(ids)], nan_ok=True)


def test_logprobs_do_not_depend_on_the_policy(server: Served, plain: Served) -> None:
    for path, body in BOTH:
        how = {"logprobs": 3} if path == "completions" else {"logprobs": True, "top_logprobs": 2}
        body = {**body, **how, "max_tokens": 16, "seed": 4}
        (one,), (other,) = (s.answer(path, **body)["choices"] for s in (server, plain))
        assert numbers(one["logprobs"]) == pytest.approx(numbers(other["logprobs"]), abs=1e-5)
        chunks = [c for chunk in server.chunks(path, **body) for c in chunk["choices"]]
        streamed = [x for c in chunks if c["logprobs"] for x in numbers(c["logprobs"])]
        assert streamed == pytest.approx(numbers(one["logprobs"]), abs=1e-5)
    content = one["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(e["bytes"] is None or bytes(e["bytes"]).decode() == e["token"] for e in content)
    zero = server.answer(path, **{**body, "top_logprobs": 0})["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in zero["content"]] == [[]] * 16


def numbers(logprobs: dict[str, Any]) -> list[float]:
    """The logarithms of the tokens' probabilities."""
    if "content" in logprobs:
        return [entry["logprob"] for entry in logprobs["content"]]
    found: list[float] = logprobs["token_logprobs"]
    return found


# ----------------------------------------------------------------------------------------- refusals

NOT_SERVED: list[tuple[str, Any]] = [
    *(("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required")),
    *(("functions", [{"name": "f"}]), ("response_format", {"type": "json_object"})),
    *(("presence_penalty", 0.5), ("frequency_penalty", 1), ("logit_bias", {"5": 1})),
    *(("min_p", 0.1), ("best_of", 3), ("repetition_penalty", 1.1), ("min_tokens", 4)),
    *(("stop_token_ids", [3]), ("modalities", ["audio"]), ("suffix", "end"), ("best", 1)),
    *(("min_p", True), ("seed", "1"), ("seed", True), ("max_tokens", 0), ("max_tokens", -1)),
    *(("max_tokens", 1000), ("max_tokens", 1.5), ("n", 0), ("temperature", -1), ("top_p", 0)),
    *(("temperature", "hot"), ("stop", ""), ("stop", [1]), ("stream", "yes"), ("model", 3)),
    *(("logprobs", "many"), ("logprobs", -1), ("stop", "a\0b")),
]


@pytest.mark.parametrize(("key", "value"), NOT_SERVED)
@pytest.mark.parametrize(("path", "body"), BOTH)
def test_what_is_not_served_is_refused_by_name(
    server: Served, path: str, body: dict[str, Any], key: str, value: Any
) -> None:
    assert key in server.refused(path, **{**body, key: value})["message"]


def test_neutral_values_change_nothing(server: Served) -> None:
    body = {"max_tokens": 8, "seed": 1}
    neutral: dict[str, Any] = {
        **{"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": 1},
        **{"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "min_p": 0},
        **{"suffix": None, "stop": None, "logprobs": None, "user": "me", "metadata": {"a": "b"}},
        **{"parallel_tool_calls": True, "store": False, "stream_options": None, "top_k": -1},
    }
    for path, asked in BOTH:
        expected = server.texts(path, **asked, **body)
        assert server.texts(path, **asked, **body, **neutral) == expected


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [[1], "x"]}, "prompt"),
        ("completions", {"prompt": [300]}, "300"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"prompt": "\ud800"}, "prompt"),
        ("completions", {"prompt": "x" * 600}, "exceed"),
        ("completions", {"prompt": "x", "logprobs": True}, "logprobs"),
        ("completions", {"prompt": "x", "n": 64}, "at once"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hello"}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        ("chat/completions", {"messages": TALK, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
            "tool_calls",
        ),
    ],
)
def test_a_body_that_cannot_be_is_refused(
    server: Served, path: str, body: dict[str, Any], word: str
) -> None:
    content = json.dumps({"model": MODEL, **body}).encode()
    headers = {"Content-Type": "application/json"}
    response = httpx2.post(f"{server.url}/v1/{path}", content=content, headers=headers)
    assert word in error_of(response, 400)["message"]


def test_models_routes_and_bodies_that_there_are_not(server: Served) -> None:
    server.refused("completions", prompt="x", model=None)
    error = server.refused("completions", 404, prompt="x", model="gpt-9")
    assert error["code"] == "model_not_found"
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == MODEL
    assert server.texts("completions", prompt="x", model=MODEL, max_tokens=2)
    error_of(server.get("/v1/files"), 404)
    error_of(server.get("/v1/completions"), 405)
    for content in (b"{", b"[1]", b'"x"', b"[" * 100_000, b"\xff", b""):
        headers = {"Content-Type": "application/json"}
        response = httpx2.post(f"{server.url}/v1/completions", content=content, headers=headers)
        error_of(response, 400)


def test_a_body_beyond_the_limit_is_refused(pair: LoadedPair, plans: list[Plan]) -> None:
    """With its length said before, and in chunks; without a key: nobody reads it to its end."""
    with served(pair, StaticSource(plans[0]), key="secret") as running:
        for content in (b" " * (BODY_BYTES + 1), iter([b" " * (1 << 20)] * 40)):
            response = httpx2.post(f"{running.url}/v1/completions", content=content)
            assert "32 MiB" in error_of(response, 413)["message"]
        body = {"prompt": "x", "max_tokens": 2}
        assert running.post("completions", "secret", **body).status_code == 200


def test_a_key_is_asked_for(pair: LoadedPair, plans: list[Plan]) -> None:
    with served(pair, StaticSource(plans[0]), key="secret") as running:
        for key in (None, "wrong", "sécret"):
            said = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
            response = httpx2.get(f"{running.url}/v1/models", headers=said)
            assert error_of(response, 401)["code"] == "invalid_api_key"
        assert error_of(running.post("completions", prompt="x"), 401)
        body = {"prompt": "x", "max_tokens": 2}
        assert running.post("completions", "secret", **body).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert running.get(path).status_code == 200


# ------------------------------------------------------------------------- clients that come and go


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_seat(server: Served, plain: Served, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream, "n": 3}
    beside = {"prompt": LONG, "max_tokens": 40, "seed": 8}
    found = list[str]()
    asking = threading.Thread(target=lambda: found.extend(server.texts("completions", **beside)))
    with deaf_client(server.url, **body):
        eventually(lambda: server.thread.running >= 3)
        asking.start()
        before = server.metric("vllm:generation_tokens_total")
    eventually(lambda: server.thread.running == server.thread.waiting == 0)
    asking.join()
    assert server.metric("vllm:generation_tokens_total") - before < 1500
    assert found == plain.texts("completions", **beside)
    assert 'status="499"' in server.get("/metrics").text


def test_a_client_that_reads_nothing_holds_up_nobody(server: Served, plain: Served) -> None:
    """Its texts end, and their seats are free, though what they say is never fetched."""
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "n": 3, "logprobs": 5}
    beside = {"prompt": LONG, "max_tokens": 40, "seed": 8}
    before = server.metric("vllm:generation_tokens_total")
    with deaf_client(server.url, **body, stream=True):
        eventually(lambda: server.thread.running >= 3)
        assert server.texts("completions", **beside) == plain.texts("completions", **beside)
        eventually(lambda: server.thread.running == server.thread.waiting == 0)
        assert server.metric("vllm:generation_tokens_total") - before == 3 * 480 + 40
        assert server.texts("completions", **beside) == plain.texts("completions", **beside)


def test_too_many_wait(pair: LoadedPair) -> None:
    """Those that are taken have their texts; the others are told when to come again."""
    plan = prepare(AUTOREGRESSIVE, pair.draft_names)
    body = {"prompt": LONG, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    with served(pair, StaticSource(plan), seats=1, limit=2) as running:
        responses: list[httpx2.Response] = []

        def ask() -> None:
            responses.append(running.post("completions", **body))

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        busy = [response for response in responses if response.status_code == 429]
        texts = [r.json()["choices"][0]["text"] for r in responses if r.status_code == 200]
        assert len(busy) + len(texts) == 8
        assert busy
        assert len({*texts}) == 1
        assert all(int(r.headers["Retry-After"]) > 0 for r in busy)
        assert error_of(busy[0], 429)["code"] == "queue_full"


def test_a_request_has_so_long(pair: LoadedPair, plans: list[Plan]) -> None:
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}
    with served(pair, StaticSource(plans[0]), timeout_s=0.01) as running:
        assert running.refused("completions", 504, **body)["code"] == "timeout"
        (last,) = running.chunks("completions", **body)[-1:]
        assert last["error"]["code"] == "timeout"
        eventually(lambda: running.thread.running == 0)


def test_a_step_that_fails_ends_what_ran_and_nothing_else(
    pair: LoadedPair, plans: list[Plan], plain: Served
) -> None:
    class Failing:
        """A source that fails once."""

        fails = False

        def current(self) -> Plan:
            if self.fails:
                self.fails = False
                raise RuntimeError("out of memory")
            return plans[1]

    source, body = Failing(), {"prompt": LONG, "max_tokens": 20, "seed": 1}
    with served(pair, source) as running:
        source.fails = True
        assert running.refused("completions", 500, **body)["type"] == "server_error"
        assert running.texts("completions", **body) == plain.texts("completions", **body)
        assert running.get("/health").status_code == 200


def test_what_is_being_answered_ends_before_the_server_does(
    pair: LoadedPair, plans: list[Plan], plain: Served
) -> None:
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 300, "ignore_eos": True, "seed": 6}
    with (
        served(pair, StaticSource(plans[1])) as running,
        httpx2.stream(
            "POST", f"{running.url}/v1/completions", json={**body, "stream": True}, timeout=240
        ) as response,
    ):
        events = response.iter_text()
        said = next(events)
        running.http.should_exit = True
        said += "".join(events)
    assert [content(chunks_of(said.split("\n\n")))] == plain.texts("completions", **body)


# ---------------------------------------------------------------------------------- OpenAI's client


def test_openais_client_reads_all_of_it(server: Served, plain: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    how: dict[str, Any] = {"model": MODEL, "seed": 3, "max_tokens": 24}
    (whole,) = plain.texts("chat/completions", messages=TALK, **how)
    stop = parts_of(whole)[0]
    expected, talk = whole[: whole.index(stop)], TALK
    with client.chat.completions.stream(
        messages=talk, stop=stop, stream_options={"include_usage": True}, **how
    ) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == expected
    assert final.usage is not None
    assert final.usage.completion_tokens_details is not None
    assert final.usage.completion_tokens_details.accepted_prediction_tokens is not None
    answer = client.chat.completions.create(messages=talk, **how)
    assert answer.choices[0].message.content == whole
    parts = client.completions.create(prompt=LONG, stream=True, **how)
    text = "".join(part.choices[0].text for part in parts)
    assert [text] == plain.texts("completions", prompt=LONG, **how)
    (example,) = blocks("docs/serve.md", "python")
    names: dict[str, Any] = {}
    here = example.replace("http://127.0.0.1:8000", server.url).replace('"demo"', repr(MODEL))
    exec(compile(here, "docs/serve.md", "exec"), names)
    assert names["answer"].usage.completion_tokens == 64
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            messages=talk, tools=[{"type": "function", "function": {"name": "f"}}], **how
        )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt="x", model="other")
