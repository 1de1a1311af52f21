"""Workloads as people have them: formats, what conversations become, which requests a limit takes,
prompts that are too long."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing
from trace_values import a_trajectory

from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import read_files
from spectune.optimizer.overlong import made_to_fit
from spectune.runtime.loading import LoadedPair
from spectune.runtime.rendered import rendered_before
from spectune.settings import RequestsSettings
from spectune.traces.errors import WorkloadError
from spectune.traces.sanity import checked, repeats
from spectune.traces.schema import Request, Tokens, Workload
from spectune.traces.workload_files import read_workload
from spectune.traces.workloads import take

TALK = [
    ("system", "Be kind."),
    ("user", "One?"),
    ("assistant", "1."),
    ("user", "Two?"),
    ("assistant", "2."),
]
OPENAI = [{"role": role, "content": text} for role, text in TALK]
NAMES = {"user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES.get(role, role), "value": text} for role, text in TALK]
GREETED = [{"from": "gpt", "value": "Hello."}, SHAREGPT[1]]
SO_FAR = Request("w:1", "all", messages=tuple(OPENAI[:4]))
FIRST = replace(SO_FAR, messages=tuple(OPENAI[:2]))
WHY, ONE = Request("w:1", "all", "Why?"), Request("w:1", "all", "One?")
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
BATCH = {"custom_id": "x", "method": "POST", "body": {"model": "m", "messages": OPENAI}}
CSV = 'id,question,category\n7,"Why, ""here""?\nSay.",b\n8,Who?,\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(content: Any, name: str = "w", **how: Any) -> tuple[Request, ...]:
    """The requests of a file with this content, or of these rows of a Parquet file."""
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table(content), name)
    else:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_workload([name], **how).requests


COLUMNS = {"id": [1, 2], "messages": [OPENAI, OPENAI[1:2]], "question": ["Why?", "Who?"]}


@pytest.mark.parametrize(
    ("content", "how", "made"),
    [
        ({"prompt": "Why?"}, {}, [WHY]),
        ({"id": 3, "category": "c", "prompt": "Why?"}, {}, [Request("3", "c", "Why?")]),
        ({"turns": ["Why?"], "category": None}, {}, [WHY]),
        ({"messages": OPENAI}, {}, [SO_FAR]),
        ({"messages": json.dumps(OPENAI)}, {}, [SO_FAR]),
        ({"messages": PARTS}, {}, [WHY]),
        (BATCH, {}, [replace(SO_FAR, id="x")]),
        ({"id": "s", "conversations": SHAREGPT}, {}, [replace(SO_FAR, id="s")]),
        ([{"conversations": GREETED}], {}, [ONE]),
        ({"messages": OPENAI}, {"turns": "first"}, [FIRST]),
        ({"conversations": SHAREGPT}, {"turns": "all"}, [FIRST, replace(SO_FAR, id="w:1/turn2")]),
        ({"messages": OPENAI[1:]}, {"turns": "first"}, [ONE]),
        ({"question": "Why?"}, {"column": "question"}, [WHY]),
        (CSV, {"name": "w.csv", "column": "question"},
            [Request("7", "b", 'Why, "here"?\nSay.'), Request("8", "all", "Who?")]),
        ("prompt\tn\nWhy?\t1\n", {"name": "w.tsv"}, [Request("w.tsv:2", "all", "Why?")]),
        (COLUMNS, {"name": "w.parquet"}, [replace(SO_FAR, id="1"), Request("2", "all", "One?")]),
        (COLUMNS, {"name": "w.parquet", "column": "question"},
            [Request("1", "all", "Why?"), Request("2", "all", "Who?")]),
    ],
)  # fmt: skip
def test_a_prompt_is_taken_from_what_people_have(
    content: Any, how: dict[str, Any], made: list[Request]
) -> None:
    requests = read(content, **how)
    for request, expected in zip(requests, made, strict=True):
        assert replace(request, id=request.id.replace(": row ", ":")) == expected
    kept = Workload("w", requests)
    assert Workload.from_json("w", json.loads(json.dumps(kept.to_json()))) == kept


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("w.parquet").write_bytes(b"PAR1")
    with pytest.raises(WorkloadError, match=r"w.parquet: .*`pip install pyarrow`"):
        read_workload(["w.parquet"])


def said(role: str, content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def calling(arguments: Any, name: str = "rain") -> dict[str, Any]:
    """A message that calls a tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool(name: str, *properties: str) -> dict[str, Any]:
    """A tool whose parameters are numbers."""
    kinds = {key: {"type": "number"} for key in properties}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_table_gives_the_prompts_of_the_same_rows_in_json() -> None:
    """Parquet unites the keys of structs."""
    rows: list[dict[str, Any]] = [
        {"messages": said("user", "Rain?"), "tools": [tool("rain", "town")],
         "chat_template_kwargs": {"level": 2}},
        {"messages": [*said("user", "Sum?"), calling({"a": 1}, "sum"), *said("tool", "3")],
         "tools": [tool("sum", "a", "b")]},
        {"messages": [*said("user", "Rain?"), calling({"town": 4}), *said("tool", "no")],
         "tools": [tool("rain", "town")], "chat_template_kwargs": {"brief": True}},
    ]  # fmt: skip
    Path("w").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "w.parquet")
    written, table = (read_workload([name]).requests for name in ("w", "w.parquet"))
    assert [(r.messages, r.template) for r in table] == [(r.messages, r.template) for r in written]
    assert "null" not in json.dumps(Workload("w", table).to_json())


def test_a_null_that_json_says_of_a_tool_or_call_stays() -> None:
    tools = [tool("rain") | {"default": None}]
    row = {"messages": [*said("user", "Rain?"), calling({"town": None}), *said("tool", "no")]}
    (request,) = read(row | {"tools": tools, "category": None})
    assert request.template == {"tools": tools}
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"town": None}
    row = {key: [json.dumps(value)] for key, value in (row | {"tools": tools}).items()}
    (table,) = read(row, "w.parquet")  # a column of JSON's text, too
    assert (table.messages, table.template) == (request.messages, request.template)


GOOD = [{"id": f"c{n}", "conversations": SHAREGPT} for n in range(4)]
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
USED = [SHAREGPT[1], {"from": "function_call", "value": "{}"}, SHAREGPT[3]]
EMPTY = '\'messages\' must be a list of {"role", "content"} or {"from", "value"}, at least one'
BAD_ROWS: tuple[tuple[Any, str], ...] = (
    (5, "expected an object, not int"),
    ({"question": "x", "n": 1}, "no prompt among its keys ('question', 'n'); expected"),
    ({"prompt": "x", "half \ud83d": 1}, "a key is no text"),
    ({"prompt": 5}, "'prompt' must be a text"),
    ({"prompt": " "}, "'prompt' must be a text, a list of token ids, or a list of such, none"),
    ({"prompt": ["x", 5]}, "'prompt' must be a text"),
    ({"prompt": []}, "'prompt' must be a text"),
    ({"prompt": "cut \ud83d"}, "'prompt' holds a NUL or half of a surrogate pair"),
    ({"prompt": "zero \0"}, "'prompt' holds a NUL"),
    ({"turns": []}, "'turns' must be a list of texts, none of them empty"),
    ({"turns": [" "]}, "'turns' must be a list of texts, none of them empty"),
    ({"turns": ["a", "b"]}, "2 turns; say --set requests.turns=all"),
    ({"messages": []}, EMPTY),
    ({"conversations": "x"}, EMPTY),
    ({"conversations": ["x"]}, f"message 0: {EMPTY}"),
    ({"messages": [{"role": "user"}]}, "message 0: 'content' must be text"),
    ({"messages": said("user", 5)}, "message 0: 'content' must be text"),
    (
        {"messages": said("user", [{"type": "image_url"}])},
        "message 0: 'content' must be text; pict",
    ),
    ({"messages": [*OPENAI[:3], *said("user", "")]}, "message 3 is empty"),
    ({"conversations": USED}, "message 1: 'role' must be one of user, human"),
    ({"conversations": GREETED[:1]}, "no message of a user's"),
    ({"messages": said("tool", "x")}, "no message of a user's"),
    ({"messages": [CALLED]}, "message 0: 'tool_calls' must be"),
    ({"prompt": "x", "max_tokens": 0}, "'max_tokens' must be a whole number above 0"),
    ({"prompt": "x", "max_new_tokens": "x"}, "'max_new_tokens' must be a whole number above 0"),
    ({"prompt": "x", "stop": 5}, "'stop' must be a text, or a list"),
    ({"prompt": "x", "tools": "x"}, "'tools' must be a list of objects"),
    ({"prompt": "x", "chat_template_kwargs": 5}, "'chat_template_kwargs' must be an object"),
    ({"prompt": "x", "id": "z" * 501}, "'id' must be a text of at most 500 characters"),
    ({"prompt": "x", "category": "\ud83d"}, "'category' holds a NUL or half of a surrogate pair"),
    ({"prompt": "x", "tools": [{"least": -math.inf}]}, "'tools' holds what is no JSON: NaN, Inf"),
    ({"prompt": "x", "tools": "[" * 9_000}, "'tools' must be a list of objects"),
    ({"prompt": "x", "chat_template_kwargs": {"budget": math.inf}}, "'chat_template_kwargs' holds"),
    ({"messages": [{**OPENAI[1], "name": "\udc00"}]}, "message 0: 'name' holds what is no JSON"),
    ({"messages": [{**OPENAI[1], "seen": math.nan}]}, "message 0: 'seen' holds what is no JSON"),
    ({"messages": [{**OPENAI[1], "deep": json.loads("[" * 500 + "]" * 500)}]}, "message 0: 'deep'"),
    *(
        ({"messages": [calling(given), *OPENAI[1:2]]}, f"message 0: {key!r} holds")
        for given, key in (
            ({"town": "\ud83d"}, "arguments"),
            ({"towns": [{"\ud83d": 1}]}, "arguments"),
            ('{"town": "\\ud83d"}', "arguments"),
            ('{"town": NaN}', "arguments"),
            ({"town": math.nan}, "arguments"),
        )
    ),
)


@pytest.mark.parametrize(("bad", "why"), BAD_ROWS)
def test_a_bad_row_is_left_out_and_told_or_refused(bad: Any, why: str) -> None:
    Path("list.json").write_text(json.dumps([*GOOD, bad]))
    Path("lines.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [bad, *GOOD]))
    for name, where in (("list.json", "list.json: row 5"), ("lines.jsonl", "lines.jsonl:1")):
        kept = read_workload([name])
        assert [r.id for r in kept.requests] == ["c0", "c1", "c2", "c3"]
        assert kept.notes[0].startswith(f"1 of 5 rows left out: {where}: {why}")
        with pytest.raises(WorkloadError, match=f"^{re.escape(f'{where}: {why}')}"):
            read_workload([name], bad_rows="error")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("w", '\n{"prompt": "x"\n', "w:2: not JSON"),
        ("w", "Write a poem.\n", 'w:1: not JSON .{"prompt"}.* ShareGPT .*ends in .csv'),
        ("w", "{" * 100_000, "w:1: not JSON"),
        ("w", "[1, 2", "w:1: not JSON"),
        ("w", "", ".*w: the workload is empty"),
        ("w", b"\xff\xfe", ".*w: not UTF-8"),
        ("w.csv", "a,b\n1,2\n", "w.csv:2: no prompt among its keys .'a', 'b'.; .* requests.column"),
        ("w.csv", "prompt,b\n1\n", "w.csv:2: more or fewer than the 2 fields of line 1"),
        ("w.csv", 'prompt\n"x"y\n', "w.csv:2: not CSV"),
        ("w.parquet", "PAR1", "w.parquet: not Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, content: str | bytes, says: str) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WorkloadError, match=f"^{says}"):
        read_workload([name])


def test_many_bad_rows_are_refused_unless_they_are_to_be_left_out() -> None:
    rows = [GOOD[0], {"messages": []}, {"prompt": ""}, "{", GOOD[1]]
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    many = (
        r"^w:2: .* at least one; w:3: .* none of them empty; w:4: not JSON .*; 3 of 5 rows "
        "are bad, more than a quarter: --set requests.bad_rows=skip leaves them out$"
    )
    with pytest.raises(WorkloadError, match=many):
        read(lines)
    assert [r.id for r in read(lines, bad_rows="skip")] == ["c0", "c1"]
    with pytest.raises(WorkloadError, match=r"2 of 2 rows are bad, none is left$"):
        read("{\n{", bad_rows="skip")
    alike = "\n".join(['{"prompt": ""}'] * 4)
    with pytest.raises(WorkloadError, match=r"^w:1, 2, 3, \.\.\.: .* none of them empty; 4 of 4"):
        read(alike)


def test_an_id_that_was_used_gets_a_number() -> None:
    rows = [{"id": i, "prompt": p} for i, p in (("a", "x"), ("a#2", "y"), ("a", "z"), ("a", "z"))]
    Path("w").write_text("\n".join(map(json.dumps, rows)))
    found = read_workload(["w"])
    assert [r.id for r in found.requests] == ["a", "a#2", "a#3", "a#4"]
    assert found.notes == ("2 ids were used before, and got a number (ID#2)",)


def test_what_is_not_read_of_rows_is_named_once() -> None:
    body = {"model": "m", "messages": OPENAI, "temperature": 0.5, "n": None}
    rows: list[Any] = [{"custom_id": f"{n}", "body": body} for n in range(2)]
    rows.append({"prompt": "x", "answer": "y", "messages": OPENAI, "temperature": 1})
    Path("w").write_text("\n".join(map(json.dumps, rows)))
    (note,) = read_workload(["w"]).notes
    assert note == (
        "ignored: temperature in 3 rows, model in 2 rows, messages in 1 row, answer in 1 row"
    )
    Path("w.csv").write_text("prompt,answer,max_tokens\nWhy?,x,7\nWho?,,\n")
    table = read_workload(["w.csv"])
    assert table.notes == ("ignored: answer in 1 row",)
    assert [r.max_new_tokens for r in table.requests] == [7, None]


def test_a_column_is_that_of_the_files_that_have_it() -> None:
    Path("chats").write_text(json.dumps({"messages": OPENAI}))
    Path("q.csv").write_text("question,prompt\nWhy?,not this\n")
    Path("q.jsonl").write_text('{"question": "Who?"}\n')
    found = read_workload(["chats", "q.csv", "q.jsonl"], column="question")
    assert [r.prompt for r in found.requests[1:]] == ["Why?", "Who?"]
    assert found.requests[0].messages == SO_FAR.messages
    with pytest.raises(WorkloadError, match=r"q.jsonl:1: no prompt among its keys \('question'"):
        read_workload(["q.csv", "q.jsonl"], column="prompt")
    with pytest.raises(
        WorkloadError, match=r"requests.column answer: .*there are: question, prompt$"
    ):
        read_workload(["q.csv", "q.jsonl"], column="answer")


def test_a_limit_draws_from_every_file_and_category_in_proportion() -> None:
    for name, counts in (("long", {"a": 60, "b": 30}), ("short", {"a": 9, "rare": 1})):
        lines = [
            {"id": f"{name}-{c}-{n}", "category": c, "prompt": "x"}
            for c, count in counts.items()
            for n in range(count)
        ]
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = read_files(["long", "short"], RequestsSettings(limit=20))
    assert Counter((r.source, r.category) for r in drawn.requests) == {
        ("long", "a"): 11, ("long", "b"): 6, ("short", "a"): 2, ("short", "rare"): 1
    }  # fmt: skip
    whole = read_files(["long", "short"])
    places = [whole.requests.index(r) for r in drawn.requests]
    assert places == sorted(places), "in the workload's order"
    sets = [set(take(whole, n).requests) for n in range(1, 101)]
    assert all(less < more for less, more in itertools.pairwise(sets)), "a larger limit adds"
    assert {r.category for r in sets[3]} == {"a", "b", "rare"}
    assert read_files(["long", "short"], RequestsSettings(limit=20)) == drawn
    other = read_files(["long", "short"], RequestsSettings(limit=20, seed=1))
    assert (other == drawn, len(other.requests)) == (False, 20)


@pytest.fixture
def chatting(pair: LoadedPair) -> LoadedPair:
    """The tiny pair with a chat template."""
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if "
        "add_generation_prompt %}assistant:{% endif %}"
    )
    return replace(pair, tokenizer=tokenizer)


def test_a_conversation_goes_through_the_chat_template(
    pair: LoadedPair, chatting: LoadedPair
) -> None:
    shown = "system: Be kind.\nuser: One?\nassistant: 1.\nuser: Two?\nassistant:"
    assert chatting.encode_request(SO_FAR, chat=True) == pair.encode(shown)
    plain = pair.encode("Be kind.\n\nOne?\n\n1.\n\nTwo?")
    assert pair.encode_request(SO_FAR, chat=False) == plain
    assert chatting.encode_request(SO_FAR, chat=False) == plain
    needs = r"request w:1: a conversation of 4 messages needs a chat template.*sampling.chat=false"
    with pytest.raises(WorkloadError, match=needs):
        pair.encode_request(SO_FAR, chat=True)


IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def with_bos(chatting: LoadedPair) -> LoadedPair:
    """A pair whose tokenizer puts BOS first and whose template writes special tokens."""
    tokenizer = chatting.tokenizer
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": [IM_START, IM_END]}
    )
    first = [("<s>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", first)
    tokenizer.chat_template = CHATML
    return replace(chatting, num_embeddings=len(tokenizer))


def test_prompts_that_went_through_the_template_before_are_named(with_bos: LoadedPair) -> None:
    rendered = f"<s>{IM_START}user\nWhy?{IM_END}\n{IM_START}assistant\n"
    twice = [with_bos.tokenizer.bos_token_id] * 2
    requests = [
        Request("plain", "c", "Why?"),
        Request("again", "c", rendered),
        Request("talk", "c", messages=(*OPENAI[:3], {"role": "user", "content": IM_END})),
        Request("completion", "c", rendered, is_plain=True),
        Request("ids", "c", ids=(*twice, 5)),
    ]
    again, doubled = rendered_before(with_bos, requests, chat=True)
    assert again == (
        "2 of 5 prompts hold special tokens of the target's chat template (<s>, <|im_end|>, "
        "<|im_start|>) and go through it all the same; if they went through it before, say --set "
        "sampling.chat=false, and strip <s> from their beginning"
    )
    assert doubled.startswith("2 of 5 prompts begin with <s> twice")
    (doubled,) = rendered_before(with_bos, requests, chat=False)
    assert doubled.startswith("3 of 5 prompts begin with <s> twice")
    assert with_bos.encode_request(requests[1], chat=False)[:2] == twice  # as it was given
    stripped = [Request("again", "c", rendered.removeprefix("<s>"))]
    assert rendered_before(with_bos, [*requests[:1], *stripped], chat=False) == []
    right = with_bos.encode_request(requests[0], chat=True)
    assert with_bos.encode_request(stripped[0], chat=False) == right
    assert rendered_before(with_bos, requests[:1], chat=True) == []


LOOPS = (
    "{% for m in messages %}{{ m['role'] }}: {% for p in m['content'] %}[{{ p.text }}]{% endfor %}"
    "{% endfor %}"
)
EITHER = LOOPS.replace(
    "{% for p", "{% if m['content'] is string %}[{{ m['content'] }}]{% else %}{% for p"
)
EITHER = EITHER.replace("{% endfor %}{% endfor %}", "{% endfor %}{% endif %}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "one", "several"),
    [
        ("", "user: One?\nassistant:", "user: Sum up.\nA file.\n"),
        (LOOPS, "user: [One?]", "user: [Sum up.][A file.]"),
        (EITHER, "user: [One?]", "user: [Sum up.][A file.]"),
    ],
)
def test_several_texts_of_a_message_are_joined_or_go_to_a_template_that_goes_through_them(
    pair: LoadedPair, chatting: LoadedPair, template: str, one: str, several: str
) -> None:
    texts = [{"type": "text", "text": "Sum up."}, {"type": "text", "text": "A file."}]
    (parts,) = read({"messages": said("user", texts)})
    chatting.tokenizer.chat_template = template or chatting.tokenizer.chat_template
    assert pair.text(chatting.encode_request(ONE, chat=True)) == one
    assert pair.text(chatting.encode_request(parts, chat=True)).startswith(several)
    assert pair.encode_request(parts, chat=True) == pair.encode("Sum up.\nA file.")


def test_prompts_beyond_the_context_are_left_out_or_cut_and_counted(
    pair: LoadedPair, chatting: LoadedPair
) -> None:
    options = DecodeOptions(max_new_tokens=32)
    room = pair.max_positions - 32
    words = " ".join(f"word{n}" for n in range(400))
    short, long = Request("a", "c", "x"), Request("b", "c", words)
    says = ("Be kind.", words, "Yes.", "And then?")
    asked = tuple({**m, "content": t} for m, t in zip(OPENAI, says, strict=False))
    talk = Request("t", "c", messages=asked)
    workload = Workload("w", (short, long, talk))
    beyond = "request b: .*exceed the context of 512 of the target, as in 2 of 3 prompts; .*=skip"
    with pytest.raises(WorkloadError, match=beyond):
        made_to_fit(chatting, workload, options, "error", "few")
    long_ones = f"2 of 3 prompts were longer than {room} tokens (the context of 512 of the target)"
    kept, said = made_to_fit(chatting, workload, options, "skip", "few")
    assert (kept.requests, said) == ((short,), [f"{long_ones} and were left out"])
    kept, said = made_to_fit(chatting, workload, options, "truncate", "few")
    assert said == [f"{long_ones} and were cut at their beginning"]
    assert kept.requests[0] == short
    assert kept.requests[1].ids == tuple(chatting.encode_request(long, chat=True)[-room:])
    assert kept.requests[2].ids == tuple(chatting.encode_request(talk, chat=True)[-room:])
    ids, own = replace(short, id="i", ids=(7,) * 600), replace(long, id="o", max_new_tokens=8)
    both = Workload("w", (ids, own))
    kept, said = made_to_fit(chatting, both, options, "truncate", "few")
    assert kept.requests[0].ids == (7,) * room
    assert len(kept.requests[1].ids) == room + 24
    asks = Workload("w", (replace(short, id="z", max_new_tokens=99), short))
    more = "1 of 2 requests ask for more than --max-new-tokens 32, and end there"
    assert made_to_fit(pair, asks, options, "error", "few") == (asks, [more])
    fits = Workload("w", (short,))
    assert made_to_fit(pair, fits, options, "error", "few") == (fits, [])
    with pytest.raises(WorkloadError, match="overlong skip: nothing is left"):
        made_to_fit(pair, Workload("w", (long,)), options, "skip", "few")


@pytest.mark.parametrize(
    ("cycle", "size", "found"),
    [([199, 3], 64, True), ([7], 16, True), ([7], 15, False), (list(range(12)), 64, False)],
)
def test_a_text_that_repeats_itself_is_found(cycle: list[int], size: int, found: bool) -> None:
    text = np.random.default_rng(0).integers(200, 4000, size).astype(np.int32)
    assert not repeats(text)
    text[size // 2 :] = np.resize(cycle, size - size // 2)
    assert repeats(text) is found


def test_what_makes_figures_say_less_is_counted_and_said_once() -> None:
    texts = [a_trajectory(n) for n in range(8)]
    assert checked(texts).lines() == []
    loop = np.resize(np.array([199, 3], np.int32), 60)
    looping = [replace(t, tokens=Tokens(t.prompt_ids, loop)) for t in texts[:2]]
    again = replace(texts[0], request_id="again")
    found = checked([*looping, *texts[2:], again])
    assert found.to_json() == {"requests": 9, "repetitive": 2, "duplicates": 1}
    repeated, same = found.lines()
    assert repeated.startswith("2 of 9 texts end in a cycle that repeats itself")
    assert same == "1 of 9 prompts are the same as an earlier one, and tell nothing new"
