"""What workload rows say beside their texts, and the chat templates that they go through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from transformers import AutoTokenizer

import spectune
from spectune.optimizer.inputs import read_files
from spectune.settings import RequestsSettings
from spectune.traces.errors import WorkloadError

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that takes strings."""


class Chats:
    """The tiny pair with a chat template in a file of its target, and a database."""

    def __init__(self, folder: Path, tiny_pair: Path) -> None:
        self.folder, at = folder, folder / "pair"
        shutil.copytree(tiny_pair.parent, at)
        self.target = at / "target"
        self.door = Door(str(folder / "chats.db"), str(at / tiny_pair.name))

    def template(self, template: str, file: str = "chat_template.jinja") -> None:
        content = template if file.endswith("jinja") else json.dumps({"chat_template": template})
        (self.target / file).write_text(content)

    def file(self, rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def recorded(self, rows: list[Any], **options: Any) -> list[Any]:
        """The texts that `record` makes of rows."""
        options = {"max_new_tokens": 4, "gamma_max": 2, **options}
        made = self.door.json("record", pair=self.door.pair, workload=self.file(rows), **options)
        with spectune.open(self.door.db) as store:
            return list(store.load(made["recording"], ()).trajectories)

    def prompts(self, rows: list[Any], **options: Any) -> list[str]:
        """What a target reads of rows."""
        tokenizer = AutoTokenizer.from_pretrained(self.target)
        return [tokenizer.decode(t.prompt_ids) for t in self.recorded(rows, **options)]


@pytest.fixture
def chats(tmp_path: Path, tiny_pair: Path) -> Chats:
    return Chats(tmp_path, tiny_pair)


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_that_a_processor_keeps_is_applied(chats: Chats, file: str) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    chats.template(PLAIN, file)
    assert chats.prompts([{"messages": talk}]) == ["<system>Be brief.<user>Why?<assistant>"]
    (chats.target / file).write_text("{")
    rows = chats.file([{"prompt": "x"}])
    assert f"{file}: not JSON" in chats.door.error("run", pair=chats.door.pair, workload=rows)


TOOLS = (
    "{%- if tools %}[TOOLS]{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{%- for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "[{{ p.text }}]{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.place }}){% endfor %}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
    "enable_thinking %}<nothink>{% endif %}{{ reasoning_effort }}{% endif %}"
)
"""A template that reads all that servers hand over."""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "function": {"name": "weather", "arguments": '{"place": "Bern"}'}}
ASKED = {"role": "user", "content": "Rain?"}
USED = [
    *(ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
    {"role": "tool", "tool_call_id": "1", "content": "Yes."},
]
PARTS = [{"type": "text", "text": "Sum up."}, {"type": "text", "text": "A file."}]
BEGUN = {"role": "assistant", "content": "Sure, "}


def test_a_row_goes_through_the_template_as_a_server_would_write_it(chats: Chats) -> None:
    chats.template(TOOLS)
    chat = {"url": "/v1/chat/completions", "method": "POST"}
    plain = {"url": "/v1/completions", "method": "POST"}
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    thought = {**BEGUN, "reasoning_content": "Hm."}
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"custom_id": "a", **chat, "body": {"messages": [ASKED], **thinking}},
            ["<user>Rain?<assistant><nothink>"]),
        ({"custom_id": "b", **chat, "body": {"messages": [ASKED], "tools": [TOOL]}},
            ["[TOOLS]weather;<user>Rain?<assistant>"]),
        ({"prompt": "Rain?", "tools": json.dumps([TOOL]), "reasoning_effort": "low"},
            ["[TOOLS]weather;<user>Rain?<assistant>low"]),
        ({"messages": USED, "tools": [TOOL]},
            ["[TOOLS]weather;<user>Rain?<assistant>weather(Bern)<tool>Yes.<assistant>"]),
        ({"messages": [{"role": "user", "content": PARTS}]},
            ["<user>[Sum up.][A file.]<assistant>"]),
        ({"messages": [ASKED, thought, ASKED]},
            ["<user>Rain?<assistant>(Hm.)Sure, <user>Rain?<assistant>"]),
        ({"custom_id": "c", **plain, "body": {"prompt": "def f(x):"}}, ["def f(x):"]),
        ({"custom_id": "d", **plain, "body": {"prompt": ["one", "two"]}}, ["one", "two"]),
        ({"custom_id": "e", **plain, "body": {"prompt": [40, 41, 42]}}, ["HIJ"]),
        ({"prompt": [[40], [41, 42]]}, ["H", "IJ"]),
    ]  # fmt: skip
    asked, written = zip(*rows, strict=True)
    vocabulary = AutoTokenizer.from_pretrained(chats.target)
    ids = vocabulary.decode([40, 41, 42])
    expected = [text for texts in written for text in texts]
    expected[-3:] = [ids, vocabulary.decode([40]), vocabulary.decode([41, 42])]
    assert chats.prompts(list(asked)) == expected
    beyond = chats.file([{"prompt": [1, 100_000]}])
    line = chats.door.error("run", pair=chats.door.pair, workload=beyond)
    assert "token 100000 of its prompt is none of the target's 300" in line


def test_what_only_a_template_reads_is_refused_where_there_is_none(chats: Chats) -> None:
    rows = chats.file([{"id": "a", "prompt": "Rain?", "tools": [TOOL]}])
    line = chats.door.error("run", pair=chats.door.pair, workload=rows)
    assert "request a: what it says to a chat template (tools) needs a chat template" in line
    chats.door.json("run", pair=chats.door.pair, workload=rows, max_new_tokens=2, no_chat=True)


def test_a_row_says_how_long_its_text_may_be_and_where_it_ends(
    chats: Chats, recwarn: pytest.WarningsRecorder
) -> None:
    free = chats.recorded([{"id": "a", "prompt": "The quick brown fox"}], max_new_tokens=40)
    text = AutoTokenizer.from_pretrained(chats.target).decode(free[0].output_ids)
    end = text[8:10]
    asks = {"id": "a", "prompt": "The quick brown fox", "temperature": 0.5}
    rows = [
        {**asks, "max_tokens": 5}, {**asks, "id": "b", "max_completion_tokens": 7},
        {**asks, "id": "c", "stop": end}, {**asks, "id": "d", "stop": ["never there", end]},
        {**asks, "id": "e", "output_tokens": 1000}, asks,
    ]  # fmt: skip
    file, pair = chats.file(rows), chats.door.pair
    made = chats.door.call(
        "record", pair=pair, workload=file, max_new_tokens=40, gamma_max=4, json=True
    )
    for said in (
        "ignored: temperature in 6 rows\n",
        "1 id was used before, and got a number (ID#2)\n",
        "1 of 6 requests ask for more than --max-new-tokens 40, and end there\n",
    ):
        assert said in made.stderr
    recording = json.loads(made.stdout)["recording"]
    with spectune.open(chats.door.db) as store:
        texts = store.load(recording, ()).trajectories
        stored = store.get_workload(store.get_recording(recording).workload_id)
    assert [r.max_new_tokens for r in stored.requests] == [5, 7, None, None, 1000, None]
    assert [t.max_new_tokens for t in texts] == [5, 7, 40, 40, 40, 40]
    assert [len(t.output_ids) for t in texts[:2]] == [5, 7]
    whole = free[0].output_ids.tolist()
    stopped = texts[2].output_ids.tolist()
    assert [t.output_ids.tolist() for t in texts] == [
        *(whole[:5], whole[:7], stopped, stopped, whole, whole)
    ]
    assert len(stopped) < len(whole)
    assert [t.finish for t in texts[2:4]] == ["stop", "stop"]
    assert [t.stop_strings for t in texts[2:5]] == [(end,), ("never there", end), ()]
    policy = '{"draft": "near", "window": {"kind": "fixed", "gamma": 3}}'
    how: dict[str, Any] = {"policy": policy, "pair": pair, "max_new_tokens": 40}
    outputs = chats.folder / "outputs"
    chats.door.json("run", **how, workload=file, outputs=outputs)
    again = [json.loads(line)["token_ids"] for line in outputs.read_text().splitlines()]
    assert again == [t.output_ids.tolist() for t in texts]
    replayed = chats.door.json("simulate", policy=policy, recording=recording)
    assert replayed["emitted_tokens"] == sum(map(len, again))


def test_requests_that_the_target_cannot_read_are_bad_rows(chats: Chats) -> None:
    """A token that the tokenizer has and the embedding has not, in a text, also in the last one;
    and a message that the template refuses."""
    vocabulary = AutoTokenizer.from_pretrained(chats.target)
    vocabulary.add_tokens("[MASKED]")
    vocabulary.save_pretrained(chats.target)
    chats.template("{{ raise_exception('no') if messages[0].content == 'Hail?' else 'Rain?' }}")
    rows = [{"id": f"{n}", "prompt": "Rain?"} for n in range(6)]
    hail = {"id": "hail", "prompt": "Hail?"}
    masked = {"custom_id": "masked", "body": {"prompt": "I am [MASKED]"}}
    how: dict[str, Any] = {"pair": chats.door.pair, "max_new_tokens": 2, "policy": "autoregressive"}
    file = chats.file([hail, *rows, masked])
    told = chats.door.call("run", **how, workload=file)
    assert told.exit_code == 0
    beyond = "request masked: token 300 ('[MASKED]') of its prompt is none of the target's 300"
    leave = "(--set sampling.chat=false leaves it out)"
    refused = f"request hail: the target's chat template {leave}: no"
    assert f"2 of 8 requests left out: {refused}; {beyond}" in told.stderr
    assert beyond in chats.door.error("run", **how, workload=chats.file([masked]))
    line = chats.door.error("run", **how, workload=chats.file([*rows, masked]), bad_rows="error")
    assert beyond in line


def test_bad_rows_are_told_and_refused_by_command_and_by_call(chats: Chats) -> None:
    good = [{"id": f"{n}", "prompt": "Rain?"} for n in range(4)]
    file, pair = chats.file([*good, {"id": "x", "messages": []}]), chats.door.pair
    how: dict[str, Any] = {"pair": pair, "max_new_tokens": 2}
    told = chats.door.call("run", policy="autoregressive", workload=file, **how)
    said = f"1 of 5 rows left out: {file}:5: 'messages' must be a list of"
    assert told.exit_code == 0
    assert said in told.stderr
    line = chats.door.error("run", workload=file, bad_rows="error", **how)
    assert f"{file}:5: 'messages' must be a list" in line
    with pytest.warns(UserWarning, match="1 of 5 rows left out: "):
        ran = spectune.run("autoregressive", workload=file, db=chats.door.db, **how)
    assert len(ran.rows) == 4
    with pytest.raises(WorkloadError, match=":5: 'messages' must be a list"):
        spectune.run("autoregressive", workload=file, db=chats.door.db, bad_rows="error", **how)
    with pytest.raises(WorkloadError, match=":5: 'messages' must be a list"):
        read_files((str(file),), RequestsSettings(bad_rows="error"))
