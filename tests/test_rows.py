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
