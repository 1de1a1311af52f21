"""A user's mistake costs one clear line: what, where, how to mend it; exit code 2, nothing on
stdout, nothing half-written."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
import torch
from click.testing import CliRunner
from doors import ROOT, Door, commands, write_workload
from pairs import tiny_model, tokenizer
from sqlalchemy.pool import Pool

from spectune.cli import main

FIXED = '{"draft": "near", "window": {"kind": "fixed", "gamma": 3}}'
ANALYTIC = '{"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}}'
SHORT = ("--max-new-tokens", 12)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Path:
    """A database with one recording of four requests, and no profile."""
    folder = tmp_path_factory.mktemp("recorded")
    workload = write_workload(folder / "four.jsonl", 4)
    door = Door(str(folder / "spectune.db"))
    door.json("record", "--pair", tiny_pair, "--workload", workload, *SHORT, "--gamma-max", 4)
    return folder / "spectune.db"


@pytest.fixture
def door(tmp_path: Path, recorded: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """The command line in a folder of its own: a copy of the recorded database, a good workload,
    nothing else."""
    shutil.copyfile(recorded, tmp_path / "spectune.db")
    write_workload(tmp_path / "good.jsonl", 4)
    monkeypatch.chdir(tmp_path)
    return Door("spectune.db", str(tiny_pair))


def contents(database: Path) -> dict[str, list[Any]]:
    """Every row of every table."""
    connection = sqlite3.connect(database)
    try:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return {
            table: connection.execute(f'SELECT * FROM "{table}"').fetchall() for table in tables
        }
    finally:
        connection.close()


def refused(door: Door, *arguments: object) -> str:
    """The one line that a command is refused with; asserts everything that a refusal promises."""
    here = Path.cwd()
    file = here / "spectune.db"
    before = contents(file)
    files = {f.name for f in here.iterdir()} | {"spectune.db-wal", "spectune.db-shm"}
    line = door.refused(*arguments)
    assert contents(file) == before
    assert {f.name for f in here.iterdir()} <= files
    return line.strip()


# ---------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("command", ["record", "run", "tune"])
def test_malformed_json_names_file_and_line(door: Door, command: str) -> None:
    Path("bad.jsonl").write_text('{"id": "a", "turns": ["x"]}\n\n{"id": "b", "turns": ["x"\n')
    line = refused(
        door, command, "--pair", door.pair, "--workload", "good.jsonl", "--workload", "bad.jsonl"
    )
    assert "bad.jsonl:3: not JSON" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"id": "a", "text": "x"}', "bad.jsonl:1: no prompt among its keys ('id', 'text')"),
        (b'{"id": "a", "turns": []}', "bad.jsonl:1: 'turns' must be a list of at least one string"),
        (b'{"id": "a", "turns": [" "]}', "bad.jsonl:1: turn 0 is empty"),
        (b'["a", "x"]', "bad.jsonl: item 1: expected an object"),
        (
            b'{"id": "a", "turns": ["x"]}\n{"id": "a", "turns": ["y"]}',
            "bad.jsonl:2: the id 'a' was used at bad.jsonl:1",
        ),
        (b'{"id": "a", "turns": ["\\ud800"]}', "bad.jsonl:1: half of a surrogate pair"),
        (b"", "the workload is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "bad.jsonl:1: not JSON"),
    ],
)
def test_malformed_workloads(door: Door, text: bytes, says: str) -> None:
    Path("bad.jsonl").write_bytes(text)
    assert says in refused(door, "record", "--pair", door.pair, "--workload", "bad.jsonl")


def test_a_workload_that_is_not_there(door: Door) -> None:
    assert "--workload nowhere.jsonl: no such file" in refused(
        door, "run", "--pair", door.pair, "--workload", "nowhere.jsonl"
    )
    assert "cannot be mixed" in refused(
        door, "run", "--pair", door.pair, "--workload", "demo", "--workload", "good.jsonl"
    )


def test_a_category_that_is_not_there_lists_those_there_are(door: Door) -> None:
    line = refused(door, "run", "--pair", door.pair, "--workload", "good.jsonl", "--category", "c")
    assert "no such category" in line
    assert "it has: a, b" in line


@pytest.mark.parametrize("command", ["record", "run", "tune"])
def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_decoded(
    door: Door, command: str
) -> None:
    rows = [
        *({"id": f"short {i}", "turns": ["x"]} for i in range(20)),
        {"id": "long", "turns": ["many words " * 300]},
    ]
    Path("long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    line = refused(door, command, "--pair", door.pair, "--workload", "long.jsonl", *SHORT)
    assert "request long" in line
    assert "exceed the context of 512" in line
    assert "--max-new-tokens" in line


def test_a_text_longer_than_the_context_is_refused(door: Door) -> None:
    assert "exceed the context" in refused(
        door, "generate", "x", "--pair", door.pair, "--max-new-tokens", 600
    )
    assert "the prompt is empty" in refused(door, "generate", " ", "--pair", door.pair)


def test_a_tokenizer_that_warns_of_long_texts_adds_no_line(door: Door, tmp_path: Path) -> None:
    pair = shutil.copytree(Path(door.pair).parent, tmp_path / "pair")
    config = pair / "target" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 512}))
    assert "exceed the context" in refused(door, "generate", "many words " * 300, "--pair", pair)


# -------------------------------------------------------------------------------------------- pairs


@pytest.fixture
def broken(door: Door, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of the pair, to be broken, and returns the folder."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(Path(door.pair).parent, tmp_path / name))

    return copy


def test_missing_models(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    rest = ("--workload", "good.jsonl")
    assert "--pair none.json: no such pair file" in refused(
        door, "run", "--pair", "none.json", *rest
    )
    assert "no model at ./none" in refused(door, "run", "--target", "./none", *rest)
    assert "no model at ./none" in refused(
        door, "run", "--target", folder / "target", "--draft", "a=./none", *rest
    )
    assert "write --draft NAME=PATH" in refused(
        door, "run", "--target", folder / "target", "--draft", "near", *rest
    )
    assert "is used twice" in refused(
        door,
        "run",
        "--target",
        folder / "target",
        "--draft",
        "a=pair/near",
        "--draft",
        "a=pair/far",
        *rest,
    )
    assert "'ngram' is reserved" in refused(
        door, "run", "--target", folder / "target", "--draft", "ngram=pair/near", *rest
    )
    assert "--draft needs --target" in refused(door, "run", "--draft", "a=pair/near", *rest)
    assert "not both" in refused(door, "run", "--pair", door.pair, "--target", "pair/target", *rest)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("pair.json", "{", "not JSON"),
        ("pair.json", "[]", "a pair file is"),
        (
            "pair.json",
            '{"target": "target", "draft": {}}',
            "unknown key 'draft'; known keys: drafts, generation_config, name, target",
        ),
        (
            "pair.json",
            '{"target": "target", "drafts": {"near": "nowhere/at/all"}}',
            "no model at nowhere/at/all",
        ),
        ("target/config.json", "{", "config.json: not JSON"),
        ("target/config.json", "[]", "is a JSON object"),
        ("target/config.json", '{"model_type": "unheard-of"}', "target: cannot load"),
        ("near/model.safetensors", "no weights", "near: cannot load"),
        ("target/tokenizer.json", "{", "tokenizer of"),
    ],
)
def test_malformed_pairs(
    door: Door, broken: Callable[[str], Path], name: str, text: str, says: str
) -> None:
    folder = broken("pair")
    (folder / name).write_text(text)
    assert says in refused(door, "run", "--pair", folder / "pair.json", "--workload", "good.jsonl")


def test_a_checkpoint_without_weights(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    (folder / "far" / "model.safetensors").unlink()
    assert "far: cannot load" in refused(door, "run", "--pair", folder, "--workload", "good.jsonl")


def test_drafts_of_another_vocabulary(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    smaller = tokenizer(280)
    tiny_model("llama", len(smaller)).save_pretrained(folder / "near")
    smaller.save_pretrained(folder / "near")
    line = refused(door, "run", "--pair", folder, "--workload", "good.jsonl")
    assert "draft 'near' has a vocabulary of 280 tokens, the target one of 300" in line
    assert "must share the target's tokenizer" in line


def test_drafts_with_other_names_for_the_same_numbers(
    door: Door, broken: Callable[[str], Path]
) -> None:
    folder = broken("pair")
    file = folder / "near" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(words))
    line = refused(door, "record", "--pair", folder, "--workload", "good.jsonl")
    assert "draft 'near' has another vocabulary than the target" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(door: Door) -> None:
    assert "--device cuda: this torch sees no CUDA device; use --device cpu" in refused(
        door, "profile", "--pair", door.pair, "--device", "cuda"
    )


# -------------------------------------------------------------------- checkpoints that ask too much


def hostile(folder: Path, name: str, document: dict[str, Any]) -> None:
    """Adds ``document`` to a configuration of a checkpoint, and the code that it names."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | document))
    (folder / "own.py").write_text('open("ran", "w").close()\n')


def refused_unasked(door: Door, *arguments: object) -> str:
    """The line of a refusal that has neither asked a user who says yes to everything, nor run the
    code of :func:`hostile`."""
    found = CliRunner().invoke(main, door.arguments(*arguments), input="y\n" * 9)
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (2, "", 1), found.output
    assert not Path("ran").exists()
    return found.stderr


@pytest.mark.parametrize("model", ["target", "near"])
def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(
    door: Door, broken: Callable[[str], Path], model: str
) -> None:
    folder = broken("pair")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    hostile(folder / model, "config.json", {"model_type": "of_its_own", "auto_map": code})
    line = refused_unasked(door, "run", "--pair", folder, "--workload", "good.jsonl")
    assert f"{model}: cannot load" in line
    assert "needs Python code of its own, which is never run here" in line


def test_code_of_a_tokenizer_is_neither_run_nor_asked_for(
    door: Door, broken: Callable[[str], Path]
) -> None:
    folder = broken("pair")
    (folder / "target" / "tokenizer.json").unlink()
    code = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    hostile(folder / "target", "tokenizer_config.json", code)
    line = refused_unasked(door, "run", "--pair", folder, "--workload", "good.jsonl")
    assert "tokenizer of" in line
    assert "needs Python code of its own" in line


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "num_hidden_layers",
            10**9,
            "config.json: num_hidden_layers is 1000000000; a model has 0 to 10000 layers",
        ),
        ("num_hidden_layers", 9000, "larger than the weights beside it"),
        ("num_hidden_layers", 3, "lack model.layers.2."),
        ("text_config", {"n_layers": -1}, "config.json: n_layers is -1"),
        ("moe_layer_end_index", 10**9, "config.json: moe_layer_end_index is 1000000000"),
        ("num_hidden_layers", "many", "target: cannot load"),
        ("vocab_size", 10**12, "larger than the weights beside it"),
        ("hidden_size", 10**9, "target: cannot load"),
        ("head_dim", 10**9, "larger than the weights beside it"),
        ("num_attention_heads", 16, "target: cannot load"),
        ("rope_parameters", [], "target: cannot load"),
        ("hidden_act", "nothing", "target: cannot load"),
        ("eos_token_id", {"a": 1}, "target: "),
    ],
)
def test_configurations_that_no_model_has(
    door: Door, broken: Callable[[str], Path], key: str, value: Any, says: str
) -> None:
    folder = broken("pair")
    config = folder / "target" / "config.json"
    document = json.loads(config.read_text())
    if key == "num_attention_heads" and value == 16:
        document |= {
            "num_key_value_heads": 8,
            "head_dim": 3,
        }  # the weights' own shapes, and no rotation
    config.write_text(json.dumps(document | {key: value}))
    (folder / "target" / "generation_config.json").unlink()
    assert says in refused(door, "run", "--pair", folder, "--workload", "good.jsonl")


def test_a_layer_may_be_counted_from_the_last(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    config = folder / "target" / "config.json"
    indices = {
        "moe_layer_end_index": -1,
        "vision_feature_layer": -2,
        "vision_config": {"feature_layer": -1},
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | indices))
    assert (
        door.json(
            "run", "--pair", folder, "--workload", "good.jsonl", "--max-new-tokens", 2, "--no-store"
        )["requests"]
        > 0
    )


def test_an_adapter_beside_a_model(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    (folder / "near" / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert "holds an adapter (adapter_config.json); merge it" in refused(
        door, "run", "--pair", folder, "--workload", "good.jsonl"
    )


UNRELATED = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize("header", [b"[" * 100_000, b"[]", b"{}", b"\xff" * 40, UNRELATED])
def test_weight_files_of_garbage(door: Door, broken: Callable[[str], Path], header: bytes) -> None:
    folder = broken("pair")
    (folder / "near" / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 4
    )
    assert "near: " in refused(door, "run", "--pair", folder, "--workload", "good.jsonl")


@pytest.mark.parametrize(
    "command", [("run", "--workload", "good.jsonl"), ("schedule", "add", "n", "--every", "6h")]
)
def test_more_threads_than_a_machine_can_start(door: Door, command: tuple[str, ...]) -> None:
    assert "--threads 100000: this machine has" in refused(
        door, *command, "--pair", door.pair, "--threads", 100_000
    )


def test_a_chat_template_that_fails(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    (folder / "target" / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    line = refused(door, "run", "--pair", folder, "--workload", "good.jsonl")
    assert "the target's chat template (--no-chat leaves it out): no such role" in line


@pytest.mark.parametrize("command", ["record", "run", "tune"])
def test_a_conversation_without_a_template_is_refused_before_the_pair_is_loaded(
    door: Door, broken: Callable[[str], Path], command: str
) -> None:
    folder = broken("pair")
    (folder / "target" / "model.safetensors").write_bytes(b"never read")
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    Path("talk.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(20)))
    line = refused(door, command, "--pair", folder, "--workload", "talk.jsonl")
    assert (
        "a conversation of 3 messages needs a chat template, and the target's tokenizer has none; "
        "--no-chat puts" in line
    )
    assert "target: " in refused(
        door, command, "--pair", folder, "--workload", "talk.jsonl", "--no-chat"
    )


# ----------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            '{"draft": "near", "windw": {"kind": "fixed"}}',
            "unknown key 'windw'; did you mean 'window'?",
        ),
        (
            '{"draft": "near", "window": {"kind": "fixed", "gamma": 65}}',
            "window.gamma: Input should be less than or equal to 64",
        ),
        ('{"window": {"kind": "fixed", "gamma": 3}}', 'add "draft"'),
        ('{"draft": "near", "window": {"gamma": NaN, "kind": "fixed"}}', "window.gamma"),
        ('{"draft": "near"', "--policy: not JSON"),
        ('{"draft": "third"}', "no draft 'third'; it has: far, near, ngram"),
        (ANALYTIC, "window.analytic needs measured costs: run `"),
        ("0123456789ab", "--policy 0123456789ab: neither a file"),
        ("nowhere.json", "--policy nowhere.json: No such file"),
    ],
)
def test_policies_that_cannot_run(door: Door, policy: str, says: str) -> None:
    assert says in refused(
        door, "run", "--pair", door.pair, "--workload", "good.jsonl", "--policy", policy
    )
    if policy != ANALYTIC:
        said = refused(door, "simulate", "--policy", policy)
        assert says in said
        assert "third" not in policy or "record --resume" not in said


def test_policy_files_are_named(door: Door) -> None:
    Path("p.json").write_text('{"draft": "near",\n "window": {"kind": "fixed", "gama": 1}}')
    assert "p.json: unknown key 'window.gama'" in refused(
        door, "policies", "show", "p.json", "--pair", door.pair
    )
    Path("p.json").write_text("{")
    assert "p.json: not JSON" in refused(
        door, "policies", "diff", "p.json", "autoregressive", "--pair", door.pair
    )
    Path("p.json").write_text("[1]")
    assert "p.json: a policy is a JSON object, not list" in refused(
        door, "policies", "activate", "p.json", "--pair", door.pair
    )
    assert "no draft 'third'" in refused(
        door, "policies", "activate", '{"draft": "third"}', "--pair", door.pair
    )
    assert "no earlier policy" in refused(door, "policies", "rollback", "--pair", door.pair)
    assert "no such version" in refused(
        door, "policies", "rollback", "--to", 7, "--pair", door.pair
    )
    stop = '{"draft": "near", "stop": {"kind": "max_prob"}}'
    assert "vllm cannot express" in refused(
        door, "policies", "export", stop, "--for", "vllm", "--pair", door.pair
    )


# ---------------------------------------------------------------------------------------- the store


def test_unknown_ids(door: Door) -> None:
    assert "there is no recording 'rec-x'" in refused(
        door, "simulate", "--policy", FIXED, "--recording", "rec-x"
    )
    assert " traces list`" in refused(door, "tune", "--pair", door.pair, "--recording", "rec-x")
    assert "there is no recording 'rec-x'" in refused(door, "traces", "show", "rec-x")
    assert "has no request 'r9'" in refused(door, "traces", "show", "latest", "--request", "r9")
    assert "no latency profile 'prof-x'" in refused(
        door, "simulate", "--policy", FIXED, "--profile", "prof-x"
    )
    line = refused(
        door,
        "run",
        "--pair",
        door.pair,
        "--workload",
        "good.jsonl",
        "--policy",
        FIXED,
        "--profile",
        "prof-x",
    )
    assert " profile --pair " in line
    assert "nobody" in refused(door, "schedule", "show", "nobody")


def test_a_recording_of_another_pair(door: Door, broken: Callable[[str], Path]) -> None:
    folder = broken("pair")
    Path("pair/pair.json").write_text(
        json.dumps({"name": "other", "target": "near", "drafts": {"far": "far"}})
    )
    assert "was made with pair" in refused(door, "tune", "--pair", folder, "--recording", "latest")


@pytest.mark.parametrize(
    "command", ["record", "simulate", "traces list", "schedule list", "db check", "db upgrade"]
)
def test_databases_that_cannot_be_reached(door: Door, command: str) -> None:
    Path("file").write_text("text, and no database\n" * 100)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    arguments: tuple[object, ...] = tuple(command.split())
    if command == "record":
        arguments += ("--pair", door.pair, "--workload", "good.jsonl")
    if command == "simulate":
        arguments += ("--policy", FIXED)
    for url, says in (
        ("file/spectune.db", ""),
        ("file", "is not a SQLite database"),
        (".", "."),
        (
            f"postgresql://nobody:secret@127.0.0.1:{port}/none",
            "cannot reach database postgresql://nobody:***@127.0.0.1",
        ),
        ("mysql://host/name", "unknown kind of database 'mysql'"),
        (":memory:", "in-memory"),
        ("", "the database URL is empty"),
    ):
        line = refused(Door(url), *arguments)
        assert says in line
        assert "secret" not in line


@pytest.mark.parametrize(
    "command", ["simulate", "traces list", "traces stats", "traces query", "db check"]
)
def test_reading_makes_no_database(door: Door, command: str) -> None:
    arguments = (*command.split(), *(("--policy", FIXED) if command == "simulate" else ()))
    assert "there is no database at new.db" in refused(Door("new.db"), *arguments)
    assert not Path("new.db").exists()


def test_a_damaged_chunk_is_named_and_the_others_are_usable(door: Door) -> None:
    whole = door.json("simulate", "--policy", FIXED)
    connection = sqlite3.connect("spectune.db")
    found = connection.execute(
        "SELECT data FROM panorama_chunk WHERE ordinal = 2 AND draft = 'near'"
    ).fetchone()[0]
    damaged = found[:-1] + bytes([found[-1] ^ 1])
    connection.execute(
        "UPDATE panorama_chunk SET data = ? WHERE ordinal = 2 AND draft = 'near'", (damaged,)
    )
    connection.commit()
    connection.close()
    line = refused(door, "simulate", "--policy", FIXED)
    assert "request 2" in line
    assert "'near'" in line
    rest = door.call("simulate", "--policy", FIXED, "--skip-corrupted", "--json")
    assert rest.exit_code == 0
    assert "left out: request 2" in rest.stderr
    assert json.loads(rest.stdout)["requests"] == whole["requests"] - 1
    assert (
        door.json("simulate", "--policy", FIXED.replace("near", "far"))["requests"]
        == whole["requests"]
    )
    checked = door.call("db", "check")
    assert checked.exit_code == 1
    assert "ordinal 2" in checked.stdout


# ----------------------------------------------------------------------------- values, files, usage


def test_durations_and_schedules(door: Door) -> None:
    pair = ("--pair", door.pair, "--workload", "good.jsonl")
    assert "'soon' is not a duration; write for example 30m" in refused(
        door, "tune", *pair, "--budget", "soon"
    )
    add = ("schedule", "add", "nightly", *pair)
    assert "'often' is not a duration" in refused(door, *add, "--every", "often")
    assert "must have five fields" in refused(door, *add, "--cron", "0 3 * *")
    assert "did you mean Europe/Berlin?" in refused(
        door, *add, "--cron", "0 3 * * *", "--tz", "Europe/Berln"
    )
    assert "is not a duration" in refused(door, *add, "--every", "6h", "--budget", "x")
    assert "trees of 15392 candidates" in refused(
        door, *add, "--every", "6h", "--tree-width", 32, "--tree-depth", 16
    )
    assert "cannot name a schedule" in refused(
        door, "schedule", "add", "a b", *pair, "--every", "6h"
    )
    assert "no such file" in refused(
        door, "schedule", "add", "n", "--pair", door.pair, "--workload", "no.jsonl", "--every", "6h"
    )
    assert "no model at" in refused(
        door, "schedule", "add", "n", "--target", "./none", "--every", "6h"
    )
    assert "is not a duration" in refused(door, "traces", "prune", "--older-than", "long")


@pytest.mark.parametrize("option", ["--outputs", "--per-round"])
def test_results_that_cannot_be_written_are_told_before_the_work(door: Door, option: str) -> None:
    work = ("run", "--pair", door.pair, "--workload", "good.jsonl", *SHORT, "--policy", FIXED)
    assert f"{option} no/where.jsonl: there is no folder" in refused(
        door, *work, option, "no/where.jsonl"
    )
    if option == "--per-round":
        assert "there is no folder" in refused(
            door, "simulate", "--policy", FIXED, option, "no/where.jsonl"
        )


def test_files_that_are_in_the_way_or_missing(door: Door) -> None:
    Path("there.db").write_text("")
    assert "there.db exists already" in refused(door, "traces", "export", "there.db")
    assert "no/where.csv" in refused(door, "traces", "export", "no/where.csv")
    assert "there is no file gone.db" in refused(door, "traces", "import", "gone.db")
    assert "rows.xml" in refused(door, "traces", "export", "rows.xml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tun"], "No such command 'tun'"),
        (["tune", "--bugdet", "1m"], "No such option"),
        (["run", "--limit", "0"], "'--limit'"),
        (["simulate"], "Missing option '--policy'"),
        (["profile", "--contexts", "0"], "--contexts"),
        (["traces", "stats", "--by", "colour"], "one of draft, category, recording"),
    ],
)
def test_usage_errors_point_to_the_help(door: Door, arguments: list[str], says: str) -> None:
    found = door.call(*arguments)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert says in found.stderr
    assert "--help' for help" in found.stderr
    assert "Traceback" not in found.stderr


def test_real_processes_print_one_line(door: Door, tmp_path: Path) -> None:
    """The same through the operating system: no line of torch's, transformers' or Python's own
    beside ours."""
    Path("long.jsonl").write_text(json.dumps({"id": "long", "turns": ["many words " * 300]}) + "\n")
    command = [
        sys.executable,
        str(ROOT / "cli.py"),
        *door.arguments("run", "--pair", door.pair, "--workload", "long.jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: request long")


def test_a_second_interrupt_prints_one_line(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """It comes while a connection is handed back, where SQLAlchemy would log a traceback."""
    came = []

    def interrupt(*_: object) -> None:
        came.append(True)
        if len(came) == 2:
            raise KeyboardInterrupt

    sa.event.listen(Pool, "reset", interrupt)
    try:
        found = door.call("traces", "list")
    finally:
        sa.event.remove(Pool, "reset", interrupt)
    assert len(came) >= 2
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (130, "", 1), found.output
    assert found.stderr.startswith("interrupted; ")
    assert not caplog.records
    assert door.json("traces", "list")["recordings"]


# --------------------------------------------------------------------------------------------- help


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[" ".join(p) or "cli.py" for p, _ in COMMANDS]
)
def test_help_ends_with_an_example(
    door: Door, path: tuple[str, ...], command: click.Command
) -> None:
    shown = door.call(*path, "--help")
    assert shown.exit_code == 0
    if isinstance(command, click.Group) and path:
        return
    text = (command.help or "").rstrip()
    example = text.split("\b\n")[-1]
    assert example.lstrip().startswith(("Example:", "Start here:"))
    for line in example.splitlines():
        words = line.split("cli.py ")[1]
        # An example that no longer parses is worse than none.
        assert path == () or " ".join(path) in words


def test_the_door_and_all_help_open_without_torch() -> None:
    script = (
        "import sys, cli\n"
        "print([m for m in ('numba', 'scipy', 'sklearn', 'sqlalchemy') if m in sys.modules])\n"
        "from click.testing import CliRunner\n"
        f"for path in {[list(p) for p, _ in COMMANDS]!r}:\n"
        "    assert CliRunner().invoke(cli.main, [*path, '--help']).exit_code == 0, path\n"
        "assert CliRunner().invoke(cli.main, ['--version']).stdout.startswith('spectune')\n"
        "print([m for m in ('torch', 'transformers', 'numba', 'optuna') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
