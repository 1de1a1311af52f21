"""A user's mistake costs one clear line: what, where, how to mend it; exit code 2, nothing on
stdout, nothing half-written."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
import torch
from click.testing import CliRunner
from databases import opened, run_sql
from doors import FIXED, ROOT, Door, commands, write_lines, write_workload
from pairs import tiny_model, tokenizer
from sqlalchemy.pool import Pool
from test_docs import PAGES, blocks
from transformers import PreTrainedTokenizerFast

from spectune import api, options, settings
from spectune.cli import main
from spectune.optimizer.commands.common import write_text
from spectune.optimizer.inputs import read_files
from spectune.runtime.decoder import Decoder
from spectune.settings import RequestsSettings
from spectune.traces.errors import ConfigError, SpectuneError, WorkloadError
from spectune.traces.store import TraceStore

ANALYTIC = '{"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}}'
SHORT = ("--max-new-tokens", 12)
RUN = "run --workload good.jsonl"
LONG = "x" * 5_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Path:
    """A database with one recording of four requests, and no profile."""
    folder = tmp_path_factory.mktemp("recorded")
    workload = write_workload(folder / "four.jsonl", 4)
    door = Door(str(folder / "spectune.db"))
    door.json("record", *SHORT, pair=tiny_pair, workload=workload, gamma_max=4)
    return folder / "spectune.db"


@pytest.fixture
def door(tmp_path: Path, recorded: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """The command line in a folder of its own: a copy of the recorded database, a good workload,
    nothing else. The environment names the tiny pair."""
    shutil.copyfile(recorded, tmp_path / "spectune.db")
    write_workload(tmp_path / "good.jsonl", 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECTUNE_PAIR", str(tiny_pair))
    return Door("spectune.db", str(tiny_pair))


@pytest.fixture
def folder(door: Door, tmp_path: Path) -> Path:
    """A copy of the pair, ``pair`` in the working folder, to be broken."""
    return Path(shutil.copytree(Path(door.pair).parent, tmp_path / "pair"))


def contents(database: Path) -> dict[str, list[Any]]:
    """Every row of every table."""
    tables = run_sql(database, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {table: run_sql(database, f'SELECT * FROM "{table}"') for (table,) in tables}


def refused(door: Door, *arguments: object, **options: object) -> str:
    """The one line that a command is refused with; asserts everything that a refusal promises."""
    here = Path.cwd()
    before = contents(here / "spectune.db")
    files = {f.name for f in here.iterdir()} | {"spectune.db-wal", "spectune.db-shm"}
    line = door.refused(*arguments, **options)
    assert contents(here / "spectune.db") == before
    assert {f.name for f in here.iterdir()} <= files
    return line.strip()


T = "--set target=pair/target"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        # commands, options and their values
        ("tun", "no command 'tun'; did you mean 'tune'?"),
        ("traces lst", "did you mean 'list'?"),
        ("tune --bugdet 1m", "no option --bugdet; did you mean --budget?"),
        ("generate --prompt x", "no option --prompt of `generate`: write PROMPT without it"),
        ("tune --set sampling.topp=1", "did you mean 'sampling.top_p'?"),
        ("tune --set trials", "--set trials: write --set KEY=VALUE"),
        ("run --limit 0", "--limit: '0': it should be greater than or equal to 1"),
        ("simulate", "--policy is needed"),
        ("simulate --policy", "--policy"),
        ("profile --contexts 0", "--contexts"),
        ("profile --contexts 3,x", "--contexts"),
        ("tune --temperature nan", "--temperature: 'nan': it should be a finite number"),
        (f"run --limit {'9' * 5000}", "--limit"),
        (f"run --limit -{'9' * 30}", "--limit"),
        ("run --set sampling.seed=-1", "--set sampling.seed: '-1'"),
        ("run --set sampling.seed=4294967296", "equal to 4294967295"),
        ("tune --budget soon", "--budget: 'soon': a time is expected, such as 30s, 5m"),
        ("traces show --since soon", "--since: 'soon': a time is expected, such as 24h"),
        ("db prune --older-than long", "--older-than: 'long': a time is expected"),
        ("run --device tpu", "--device: 'tpu': it should be 'auto', 'cpu' or 'cuda'"),
        ("run --deployment 'a b'", "--deployment: 'a b': 'a b' cannot name a deployment"),
        # workloads and texts
        ("run --workload nowhere.jsonl", "--workload nowhere.jsonl: no such file"),
        ("run --workload demo --workload good.jsonl", "cannot be mixed"),
        (f"{RUN} --category c", "; it has: a, b"),
        ("generate x --max-new-tokens 600", "exceed the context"),
        ("generate ' '", "the prompt is empty"),
        (f"run --workload {LONG}", "xxx"),
        ("run --workload nested.json", "nested.json:1: not JSON"),
        # models
        (f"{RUN} --pair none.json", "--pair none.json: no such pair file"),
        (f"{RUN} --pair nested.json", "nested.json: not JSON"),
        (f"{RUN} --set target=./none", "no model at ./none"),
        (f"{RUN} {T} --set drafts.a=./none", "no model at ./none"),
        (f"{RUN} --set target=no/such/one", "no model at no/such/one"),
        (f"{RUN} {T} --set drafts==near", "NAME=PATH is expected"),
        (f"{RUN} {T} --set drafts.ngram=pair/near", "'ngram' is reserved"),
        (f"{RUN} --set drafts.a=pair/near", "drafts need a target"),
        (f"{RUN} --pair pair {T}", "not both"),
        (f"{RUN} --set threads=100000", "100000: this machine has"),
        # policies
        ("policies show p.json", "p.json: window: unknown key 'gama'"),
        ("policies show nested.json", "nested.json: not JSON"),
        ("""policies activate '{"draft": "third"}'""", "no draft 'third'"),
        ("policies activate autoregressive --from canary", "--from canary promotes what is in"),
        ("policies rollback", "no earlier policy"),
        ("policies rollback --to 7", "no such version"),
        ("policies export stop.json --for vllm", "vllm cannot express"),
        # ids
        (f"simulate --policy '{FIXED}' --recording rec-x", "there is no recording 'rec-x'"),
        ("tune --recording rec-x", "`traces list`"),
        ("traces show rec-x", "there is no recording 'rec-x'"),
        ("traces show latest --request r9", "has no request 'r9'"),
        (f"simulate --policy '{FIXED}' --profile prof-x", "no latency profile 'prof-x'"),
        ("schedule list nobody", "nobody"),
        ("schedule add n --workload good.jsonl", "--cron is needed"),
        ("schedule add n --cron '0 3 * * *' --tz Europe/Berln", "did you mean Europe/Berlin?"),
        ("schedule add n --workload no.jsonl --cron @daily", "no such file"),
        (
            "schedule add n --cron @daily --set trees.width=32 --set trees.depth=16",
            "trees of 15392 candidates",
        ),
        ("db show nothing", "nothing has the id nothing"),
        ("db prune run --keep-last 1", "unknown kind 'run'; did you mean 'runs'?"),
        ("db prune", "say what to prune"),
        # files to write
        (f"{RUN} --outputs no/where.jsonl", "--outputs no/where.jsonl: there is no folder"),
        (f"{RUN} --per-round no/where.jsonl", "--per-round no/where.jsonl: there is no folder"),
        (f"{RUN} --per-round {LONG}", "--per-round"),
        (f"{RUN} --per-round good.jsonl", "this command needs that file; name another"),
        (f"{RUN} --outputs spectune.db", "this command needs that file; name another"),
        (f"{RUN} --outputs pipe", "no regular file"),
        (f"simulate --policy '{FIXED}' --per-round no/where.jsonl", "there is no folder"),
        ("traces export no/where.csv", "no/where.csv"),
        ("traces import gone.parquet", "gone.parquet: cannot be read (No such file"),
        ("traces export rows.xml", "rows.xml"),
        ("report --out no/r.html", "there is no folder"),
    ],
)
def test_a_mistake_is_one_line(door: Door, folder: Path, command: str, says: str) -> None:
    files = {
        "p.json": '{"draft": "near",\n "window": {"kind": "fixed", "gama": 1}}',
        "stop.json": '{"draft": "near", "stop": {"kind": "max_prob"}}',
        "nested.json": "[" * 50_000,
    }
    for name, text in files.items():
        Path(name).write_text(text)
    os.mkfifo("pipe")
    line = refused(door, command)
    assert says in line
    assert len(line) < 2100
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)


def unexpected(door: Door, error: Exception) -> tuple[str, str]:
    """What a run prints that ends with this error, which nobody foresaw: stdout, and the error's
    line; asserts exit code 1 and that the traceback is where the line says."""
    words = door.arguments(f"{RUN} --policy autoregressive --json", *SHORT)
    found = CliRunner().invoke(main, words)
    line, mark, path = found.stderr.splitlines()[-1].partition("; unexpected: the traceback is in ")
    assert (found.exit_code, bool(mark), "Traceback" in found.stderr) == (1, True, False)
    assert f"in fail\n    raise error\n{type(error).__name__}: " in Path(path).read_text()
    Path(path).unlink()
    return found.stdout, line


def test_what_nobody_foresaw_is_one_line(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    error: Exception = LookupError("half\na table")

    def fail(*args: Any, **_: Any) -> tuple[()]:
        if len(args) == 2:  # rounds before any is timed
            return ()
        raise error

    monkeypatch.setattr(TraceStore, "put_run", fail)
    figures, line = unexpected(door, error)  # what was found is printed first
    assert (json.loads(figures)["requests"], line) == (4, "error: LookupError: half a table")
    error = IndexError("index out of range")
    monkeypatch.setattr(Decoder, "rounds", fail)
    figures, line = unexpected(door, error)
    assert (figures, line) == ("", "error: request r0: IndexError: index out of range")


def test_prompts_that_went_through_a_template_before_are_told(door: Door, folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target", bos_token="<eos>")
    tokenizer.chat_template = "<eos>user: {{ messages[0].content }}"
    tokenizer.save_pretrained(folder / "target")
    write_lines("rendered.jsonl", [{"prompt": "Who?"}, {"prompt": "<eos>user: Why?"}])
    asked = ("run --workload rendered.jsonl --policy autoregressive", *SHORT)
    told = door.call(*asked, pair=folder / "pair.json").stderr
    assert "1 of 2 prompts hold special tokens of the target's chat template (<eos>)" in told


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "record --resume latest --fresh",
            "no effect: --fresh (acts where texts are decoded)",
        ),
        (f"simulate --policy '{FIXED}' --ttft 1s", "no effect: --ttft (acts under a load)"),
        (
            "fit bins --draft near --set fit.hidden=8 --set fit.depth=2",
            "no effect: --set fit.hidden (acts on classifier or on router)",
        ),
        (
            "profile --engine vllm --no-trees --set dtype=float64",
            "no effect: --set dtype (acts on the native decoder, with --url or where drafts read "
            "texts); --no-trees (acts on the native decoder)",
        ),
        (
            "tune --recording latest --set sampling.top_p=0.9 --limit 9",
            "no effect: --limit (acts where texts are decoded, with --since, with --engine or with "
            "--url); --set sampling.top_p (acts where texts are decoded)",
        ),
    ],
)
def test_options_without_effect_are_named_in_one_note(door: Door, command: str, says: str) -> None:
    assert door.call(command).stderr.count(says) == 1


def test_arguments_that_are_no_text_cost_one_line(door: Door) -> None:
    for command in ("run --pair", "policies show", "traces list --category", "generate"):
        assert "no text" in door.error(command, "a\0b")
        assert "no text" in door.error(command, "a\udcffb")


# ------------------------------------------------------------------------------------ spectune.toml


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('pairs = "x"', "spectune.toml: unknown key 'pairs'; did you mean 'pair'?"),
        ("temperature = 0.7", "unknown key 'temperature'; did you mean 'sampling.temperature'?"),
        ("[sampling]\ntemprature = 1", "did you mean 'sampling.temperature'?"),
        ("[sampling]\nzzz = 1", "; there are: db, "),
        ('[sampling]\ntemperature = "hot"', "spectune.toml: sampling.temperature: 'hot': "),
        ("[sampling]\nseed = 1.5", "spectune.toml: sampling.seed: '1.5': "),
        ("threads = 0", "spectune.toml: threads: '0': it should be greater"),
        ('[race]\nbudget = "soon"', "spectune.toml: race.budget: 'soon': a time is expected"),
        ('deployment = "a b"', "spectune.toml: deployment: 'a b': 'a b' cannot name"),
        ("workload = 1979-05-27", "spectune.toml: workload: "),
        ("sampling = 3", "spectune.toml: sampling: a table is expected"),
        ("pair = ", "spectune.toml: not TOML: "),
        ("x = " + "[" * 5000, "spectune.toml: not TOML: "),
    ],
)
def test_a_file_that_cannot_be_used(door: Door, text: str, says: str) -> None:
    Path("spectune.toml").write_text(text)
    assert says in refused(door, "tune")
    with pytest.raises(ConfigError, match=re.escape(says)):
        api.tune(prompts=["x"])
    Path("spectune.toml").unlink()
    assert "none.toml: no such file" in Door(None).refused("--config none.toml db check")


def test_what_is_typed_wins_over_the_environment_over_the_file(
    door: Door, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("below").mkdir()
    Path("spectune.toml").write_text(
        'pair = "pair/pair.json"\nworkload = "good.jsonl"\ndeployment = "file"\ndb = "file.db"\n'
        "[sampling]\nmax_new_tokens = 3\n"
    )
    monkeypatch.delenv("SPECTUNE_PAIR")
    monkeypatch.chdir("below")
    door, file = Door(None), "../spectune.toml"
    made = door.json(f"--config {file} run --policy '{FIXED}'")
    assert (made["requests"], made["emitted_tokens"]) == (4, 12)
    with opened(folder.parent / "file.db") as store:
        assert store.get_run("latest").outcome.total.emitted_tokens == 12
    monkeypatch.setenv("SPECTUNE_CONFIG", file)
    assert api.run(FIXED, limit=1).data["emitted_tokens"] == 3
    activate = f"policies activate '{FIXED}' --device cpu"
    env = {"SPECTUNE_DEPLOYMENT": "env", "SPECTUNE_DB": "env.db"}
    words = [door.call(activate, json=True), door.call(activate, json=True, env=env)]
    words.append(door.call(activate, json=True, env=env, deployment="typed"))
    assert [json.loads(w.stdout)["deployment"] for w in words] == ["file", "env", "typed"]
    assert Path("env.db").exists()


def test_init_writes_a_file_that_says_every_key(door: Door) -> None:
    assert door.json("init")["config"] == "spectune.toml"
    text = Path("spectune.toml").read_text()
    config = options.read_config(None)
    assert config is not None
    assert config.values == {}
    spelled = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    settings.File.model_validate(spelled)
    keys = {f"{k}.{n}" if isinstance(v, dict) else k for k, v in spelled.items() for n in
            (v if isinstance(v, dict) else [k])}  # fmt: skip
    assert keys == options.options_of(settings.File).keys() - {"drafts"}
    assert "spectune.toml exists already; --force replaces it" in door.refused("init")
    assert "no such pair file" in door.refused("init", force=True, pair="none.json")
    assert Path("spectune.toml").read_text() == text
    Path("spectune.toml").write_text("broken")
    assert door.call("init", force=True, pair=door.pair).exit_code == 0
    config = options.read_config(None)
    assert config is not None
    assert [*config.values] == ["pair"]


def test_every_key_is_documented() -> None:
    page = PAGES["docs/configuration.md"]
    table = [
        f"| `{key}` | `{option.keyword}` | "
        f"{option.default_text and f'`{option.default_text}`'} | "
        f"{option.field.description}{f' `{option.env}` may say it.' * bool(option.env)} |"
        for key, option in options.options_of(settings.File).items()
    ]
    assert "\n".join(table) in page
    (example,) = blocks("docs/configuration.md", "toml")
    settings.File.model_validate(tomllib.loads(example))


def test_no_pair_is_taken_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("tune", "record", "run", "generate x", "profile", "policies rollback"):
        assert "no pair is named; say --pair FILE" in Door(None).refused(command)
    assert not list(tmp_path.iterdir())


def test_a_recording_that_is_not_there_is_told_before_the_pair_is_loaded(
    door: Door, folder: Path
) -> None:
    shutil.copytree("pair", "damaged")
    for weights in Path("damaged").rglob("*.safetensors"):
        weights.write_bytes(b"none")
    assert "safetensors" in refused(door, "profile --pair damaged")
    for command in ("tune", "profile"):
        said = refused(door, f"{command} --recording rec-x --pair damaged")
        assert "there is no recording 'rec-x'" in said


def test_a_recording_that_is_named_says_which_pair(door: Door, folder: Path) -> None:
    """Also against the environment; what is typed is believed, and compared."""
    env = {"SPECTUNE_PAIR": str(folder)}
    spec = json.loads((folder / "pair.json").read_text())
    del spec["drafts"]["far"]
    (folder / "pair.json").write_text(json.dumps(spec))
    name = door.json("traces list")["recordings"][0]["id"]
    again = door.call(f"record --resume {name}", json=True, env=env)
    assert json.loads(again.stdout)["n_requests"] == 4
    assert "was made with pair" in door.error(f"tune --recording {name}", pair=folder)
    for latest in ("tune --recording latest", "record --resume latest", "fit frequencies"):
        assert "nothing is recorded of pair" in door.error(latest, pair=folder)
        assert "nothing is recorded of pair" in door.call(latest, env=env).stderr


# ---------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("command", ["record", "tune"])
def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_decoded(
    door: Door, command: str
) -> None:
    rows = [{"id": f"short {i}", "turns": ["x"]} for i in range(20)]
    write_lines("long.jsonl", [*rows, {"id": "long", "turns": ["many words " * 300]}])
    line = refused(door, command, *SHORT, workload="long.jsonl")
    for says in ("request long", "exceed the context of 512", "--max-new-tokens"):
        assert says in line


def test_a_tokenizer_that_warns_of_long_texts_adds_no_line(door: Door, folder: Path) -> None:
    merge(folder / "target" / "tokenizer_config.json", {"model_max_length": 512})
    assert "exceed the context" in refused(door, "generate", "many words " * 300, pair=folder)


def test_several_turns_are_a_choice_and_never_dropped_in_silence(door: Door) -> None:
    rows = [{"id": "a", "turns": ["one"]}, {"id": "b", "turns": ["first", "second", "third"]}]
    write_lines("chats.jsonl", rows)
    with pytest.raises(WorkloadError, match=r"chats\.jsonl:2: 3 turns.*requests.turns=all"):
        read_files(["chats.jsonl"])

    def prompts(turns: Any) -> list[str]:
        return [
            r.prompt for r in read_files(["chats.jsonl"], RequestsSettings(turns=turns)).requests
        ]

    assert prompts("first") == ["one", "first"]
    assert prompts("all") == ["one", "first", "second", "third"]
    for command in ("record", "run", "tune"):
        assert "chats.jsonl:2: 3 turns" in door.error(command, workload="chats.jsonl")
    done = door.json("run", *SHORT, workload="chats.jsonl", turns="all")
    assert done["requests"] == 4


# -------------------------------------------------------------------------------------------- pairs


NO_ROTATION = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 3}
"""With the weights' own shapes."""
UNRELATED = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 3}, "lack model.layers.2."),
    ({"num_hidden_layers": "many"}, "target: cannot load"),
    (NO_ROTATION, "target: cannot load"),
    ({"rope_parameters": []}, "target: cannot load"),
    ({"hidden_act": "nothing"}, "target: cannot load"),
    ({"eos_token_id": {"a": 1}}, "target: "),
]
WEIGHTS = [b"[]", b"{}", b"\xff" * 40, UNRELATED]
"""Headers that are none."""


def merge(file: Path, document: dict[str, Any]) -> None:
    """Adds to a file of JSON, which need not be there."""
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | document))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("pair.json", b"{", "not JSON"),
        ("pair.json", b"[]", "a pair file is"),
        ("pair.json", {"draft": {}}, "'draft'; known keys: drafts, "),
        ("pair.json", {"drafts": {"a": "no/such/one"}}, "no model at no/such/one"),
        ("target/config.json", b"{", "config.json: not JSON"),
        ("target/config.json", b"[]", "not a JSON object"),
        ("target/config.json", b'{"model_type": "unheard-of"}', "target: cannot load"),
        *(("target/config.json", change, says) for change, says in CONFIGURATIONS),
        ("near/model.safetensors", b"no weights", "model.safetensors cannot be read"),
        *(
            ("near/model.safetensors", len(h).to_bytes(8, "little") + h + b"\0" * 4, "near")
            for h in WEIGHTS
        ),
        ("far/model.safetensors", None, "far: cannot load"),
        ("target/tokenizer.json", b"{", "tokenizer of"),
        (
            *("near/adapter_config.json", {"base_model_name_or_path": "elsewhere"}),
            "holds an adapter (adapter_config.json); merge it",
        ),
        (
            *("target/chat_template.jinja", b"{{ raise_exception('no such role') }}"),
            "the target's chat template (--set sampling.chat=false leaves it out): no such role",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_pairs(door: Door, folder: Path, name: str, content: Any, says: str) -> None:
    """Files that hold bytes, JSON with something else in it, or are gone."""
    (folder / "target" / "generation_config.json").unlink()
    file = folder / name
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        merge(file, content)
    assert says in refused(door, RUN, pair=folder)


def test_drafts_of_another_vocabulary(door: Door, folder: Path) -> None:
    """Smaller, or with other names for the same numbers."""
    file = folder / "near" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(words))
    number = min(vocabulary[token] for token in (one, other))
    says = "draft 'near' has another vocabulary than the target: token "
    assert f"{says}{number} is" in refused(door, "record --workload good.jsonl", pair=folder)
    smaller = tokenizer(280)
    tiny_model("llama", len(smaller)).save_pretrained(folder / "near")
    smaller.save_pretrained(folder / "near")
    line = refused(door, RUN, pair=folder)
    assert f"{says}280 is no token " in line
    assert "must share the target's tokenizer" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(door: Door) -> None:
    line = refused(door, "profile --device cuda")
    assert "--device cuda: this torch sees no CUDA device; use --device cpu" in line


# -------------------------------------------------------------------- checkpoints that ask too much


@pytest.mark.parametrize(
    ("name", "document"),
    [
        *(
            (
                f"{model}/config.json",
                {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.Config"}},
            )
            for model in ("target", "near")
        ),
        (
            "target/tokenizer_config.json",
            {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"},
        ),
    ],
)
def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(
    door: Door, folder: Path, name: str, document: dict[str, Any]
) -> None:
    """Neither is a user asked who says yes to everything."""
    if "tokenizer" in name:
        (folder / "target" / "tokenizer.json").unlink()
    merge(folder / name, document)
    (folder / name).with_name("own.py").write_text('open("ran", "w").close()\n')
    done = CliRunner().invoke(main, door.arguments(RUN, pair=folder), input="y\n" * 9)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    assert not Path("ran").exists()
    assert "needs Python code of its own" in done.stderr


def test_a_layer_may_be_counted_from_the_last(door: Door, folder: Path) -> None:
    nested: dict[str, Any] = {"vision_config": {"feature_layer": -1}}
    indices = nested | {"moe_layer_end_index": -1, "vision_feature_layer": -2}
    merge(folder / "target" / "config.json", indices)
    assert door.json(RUN, pair=folder, max_new_tokens=2, no_store=True)["requests"] > 0


@pytest.mark.parametrize("command", ["record", "run", "tune"])
def test_a_conversation_without_a_template_is_refused_before_the_pair_is_loaded(
    door: Door, folder: Path, command: str
) -> None:
    (folder / "target" / "model.safetensors").write_bytes(b"never read")
    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    write_lines("talk.jsonl", [{"messages": talk}] * 20)
    line = refused(door, command, pair=folder, workload="talk.jsonl")
    assert (
        "a conversation of 3 messages needs a chat template, and the target's tokenizer has none; "
        "--set sampling.chat=false puts" in line
    )
    line = refused(door, command, pair=folder, workload="talk.jsonl", no_chat=True)
    assert "model.safetensors cannot be read" in line


# ----------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ('{"window": {"kind": "fixed", "gamma": 3}}', 'add "draft"'),
        ('{"draft": "near", "window": {"gamma": NaN, "kind": "fixed"}}', "window.gamma"),
        ('{"draft": "near"', "--policy: not JSON"),
        ('{"draft": "third"}', "no draft 'third'; it has: far, near, ngram"),
        (ANALYTIC, "window.analytic needs a latency profile of this pair on this hardware and in"),
        ("0123456789ab", "--policy 0123456789ab: neither a file"),
        ("nowhere.json", "--policy nowhere.json: No such file"),
    ],
)
def test_policies_that_cannot_run(door: Door, policy: str, says: str) -> None:
    assert says in refused(door, RUN, policy=policy)
    if policy != ANALYTIC:
        said = refused(door, "simulate", policy=policy)
        assert says in said
        assert "third" not in policy or "record --resume" not in said


# ---------------------------------------------------------------------------------------- the store


def test_a_damaged_chunk_is_named_and_the_others_are_usable(door: Door) -> None:
    whole = door.json("simulate", policy=FIXED)
    place = "WHERE ordinal = 2 AND draft = 'near'"
    ((found,),) = run_sql("spectune.db", f"SELECT trie FROM panorama {place}")
    damaged = found[:-1] + bytes([found[-1] ^ 1])
    run_sql("spectune.db", f"UPDATE panorama SET trie = x'{damaged.hex()}' {place}")
    rest = door.call("simulate", policy=FIXED, json=True)
    assert rest.exit_code == 0
    assert "left out: the panorama of draft 'near' of request 2" in rest.stderr
    assert json.loads(rest.stdout)["requests"] == whole["requests"] - 1
    far = door.json("simulate", policy=FIXED.replace("near", "far"))
    assert far["requests"] == whole["requests"]
    checked = door.call("db check")
    assert checked.exit_code == 1
    assert "ordinal 2" in checked.stdout


# ------------------------------------------------------------------------------ usage and processes


def test_real_processes_print_one_line(door: Door) -> None:
    """The same through the operating system: no line of torch's, transformers' or Python's own
    beside ours."""
    write_lines("long.jsonl", [{"id": "long", "turns": ["many words " * 300]}])
    command = [sys.executable, str(ROOT / "cli.py"), *door.arguments("run --workload long.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: request long")
    command[2:] = ["traces", "list", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.startswith("Usage: spectune traces list"), "its name, however it is started"


def test_a_python_that_nothing_is_installed_for_is_told_how_to_install() -> None:
    command = [sys.executable, "-S", str(ROOT / "cli.py"), "tune"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "is not installed for" in done.stderr
    assert "`make tune` installs" in done.stderr


def test_a_second_interrupt_prints_one_line(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """It comes while a connection is handed back, where SQLAlchemy would log a traceback."""
    came = []

    def interrupt(*_: object) -> None:
        came.append(True)
        if len(came) == 2:
            raise KeyboardInterrupt

    sa.event.listen(Pool, "reset", interrupt)
    try:
        found = door.call("traces list")
    finally:
        sa.event.remove(Pool, "reset", interrupt)
    assert len(came) >= 2
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (130, "", 1), found.output
    assert found.stderr.startswith("interrupted; ")
    assert not caplog.records
    assert door.json("traces list")["recordings"]


# --------------------------------------------------------------------------------------------- help


def test_help_ends_with_an_example() -> None:
    assert Door(None).call("--version").stdout.startswith("spectune")
    for path, command in commands():
        assert Door(None).call(*path, "--help").exit_code == 0
        if isinstance(command, click.Group) and path:
            continue
        example = (command.help or "").rstrip().split("\b\n")[-1]
        assert example.lstrip().startswith(("Example:", "Start here:")), path
        for line in example.splitlines():
            assert " ".join(path) in line.split("spectune ")[1]


# -------------------------------------------------------------------------------------------- files


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    def parts() -> io.StringIO:
        yield "half"  # type: ignore[misc]
        raise RuntimeError("stop")

    (tmp_path / "out").write_text("before")
    with pytest.raises(RuntimeError):
        write_text(str(tmp_path / "out"), parts())
    assert (tmp_path / "out").read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpectuneError, match="no regular file"):
        write_text(str(tmp_path / "pipe"), ["x"])
