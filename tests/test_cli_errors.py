"""A user's mistake costs one clear line: what, where, how to mend it; exit code 2, nothing on
stdout, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
import torch
from click.testing import CliRunner
from databases import run_sql
from doors import FIXED, ROOT, Door, commands, write_lines, write_workload
from pairs import tiny_model, tokenizer
from sqlalchemy.pool import Pool

from spectune.cli import main

ANALYTIC = '{"draft": "near", "window": {"kind": "analytic", "gamma_max": 4}}'
SHORT = ("--max-new-tokens", 12)
RUN = "run --workload good.jsonl"


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


ADD = "schedule add nightly --workload good.jsonl"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        # workloads and texts
        ("run --workload nowhere.jsonl", "--workload nowhere.jsonl: no such file"),
        ("run --workload demo --workload good.jsonl", "cannot be mixed"),
        (f"{RUN} --category c", "; it has: a, b"),
        ("generate x --max-new-tokens 600", "exceed the context"),
        ("generate ' '", "the prompt is empty"),
        # models
        (f"{RUN} --pair none.json", "--pair none.json: no such pair file"),
        (f"{RUN} --target ./none", "no model at ./none"),
        (f"{RUN} --target pair/target --draft a=./none", "no model at ./none"),
        (f"{RUN} --target no/such/one", "no model at no/such/one"),
        (f"{RUN} --target pair/target --draft near", "write --draft NAME=PATH"),
        (f"{RUN} --target pair/target --draft a=pair/near --draft a=pair/far", "is used twice"),
        (f"{RUN} --target pair/target --draft ngram=pair/near", "'ngram' is reserved"),
        (f"{RUN} --target pair/target --draft target=pair/near", "'target' is reserved"),
        (f"{RUN} --draft a=pair/near", "--draft needs --target"),
        (f"{RUN} --pair pair --target pair/target", "not both"),
        (f"{RUN} --threads 100000", "--threads 100000: this machine has"),
        ("schedule add n --cron @daily --threads 100000", "--threads 100000: this machine has"),
        # policies
        ("policies show p.json", "p.json: window: unknown key 'gama'"),
        ("""policies activate '{"draft": "third"}'""", "no draft 'third'"),
        ("policies rollback", "no earlier policy"),
        ("policies rollback --to 7", "no such version"),
        ("policies export stop.json --for vllm", "vllm cannot express"),
        # ids
        (f"simulate --policy '{FIXED}' --recording rec-x", "there is no recording 'rec-x'"),
        (
            f"""simulate --policy '{FIXED}' --recording "`run it's`" """,
            'there is no recording "`run it\'s`"',
        ),
        ("tune --recording rec-x", " traces list`"),
        ("traces show rec-x", "there is no recording 'rec-x'"),
        ("traces show latest --request r9", "has no request 'r9'"),
        (f"simulate --policy '{FIXED}' --profile prof-x", "no latency profile 'prof-x'"),
        (f"{RUN} --pair pair --policy '{FIXED}' --profile prof-x", " profile --pair pair"),
        ("schedule list nobody", "nobody"),
        # durations and schedules
        ("tune --budget soon", "'soon' is not a duration; write for example 30m"),
        (f"{ADD} --cron '0 3 * * *' --tz Europe/Berln", "did you mean Europe/Berlin?"),
        (f"{ADD} --cron @daily --tree-width 32 --tree-depth 16", "trees of 15392 candidates"),
        ("schedule add n --workload no.jsonl --cron @daily", "no such file"),
        ("schedule add n --target ./none --cron @daily", "no model at"),
        ("traces prune --older-than long", "is not a duration"),
        ("traces query --since soon", "--since: 'soon' is not a duration"),
        # files to write
        (f"{RUN} --outputs no/where.jsonl", "--outputs no/where.jsonl: there is no folder"),
        (f"{RUN} --per-round no/where.jsonl", "--per-round no/where.jsonl: there is no folder"),
        (f"simulate --policy '{FIXED}' --per-round no/where.jsonl", "there is no folder"),
        ("traces export no/where.csv", "no/where.csv"),
        ("traces import gone.parquet", "gone.parquet: cannot be read (No such file"),
        ("traces export rows.xml", "rows.xml"),
    ],
)
def test_a_mistake_is_one_line(door: Door, folder: Path, command: str, says: str) -> None:
    files = {
        "p.json": '{"draft": "near",\n "window": {"kind": "fixed", "gama": 1}}',
        "stop.json": '{"draft": "near", "stop": {"kind": "max_prob"}}',
    }
    for name, text in files.items():
        Path(name).write_text(text)
    assert says in refused(door, command)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("tune --recording latest --top-p 0.9", "--top-p has no effect with --recording, whose"),
        ("tune --recording latest --quick --limit 9", "--limit has no effect with --recording"),
        ("record --resume latest --fresh", "--fresh has no effect with --resume"),
        ("record --resume latest --workload good.jsonl", "--workload has no effect"),
        (f"{ADD} --cron @daily --recorded 24h", "--workload has no effect with --recorded"),
        ("fit frequencies --recording latest --corpus good.jsonl", "leave one out"),
        ("policies activate autoregressive --from canary", "--from canary promotes what is in"),
    ],
)
def test_options_that_say_nothing_beside_another_are_refused(
    door: Door, command: str, says: str
) -> None:
    assert says in door.error(command)


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
            "the target's chat template (--no-chat leaves it out): no such role",
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
    smaller = tokenizer(280)
    tiny_model("llama", len(smaller)).save_pretrained(folder / "near")
    smaller.save_pretrained(folder / "near")
    line = refused(door, RUN, pair=folder)
    assert "draft 'near' has another vocabulary than the target: token 280 is no token " in line
    assert "must share the target's tokenizer" in line


def test_drafts_with_other_names_for_the_same_numbers(door: Door, folder: Path) -> None:
    file = folder / "near" / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(words))
    line = refused(door, "record --workload good.jsonl", pair=folder)
    number = min(words["model"]["vocab"][token] for token in (one, other))
    assert f"draft 'near' has another vocabulary than the target: token {number} is" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(door: Door) -> None:
    line = refused(door, "profile --device cuda")
    assert "--device cuda: this torch sees no CUDA device; use --device cpu" in line


# -------------------------------------------------------------------- checkpoints that ask too much


def refused_unasked(door: Door, folder: Path, name: str, document: dict[str, Any]) -> str:
    """The line of a refusal of a checkpoint that has ``document`` in a configuration, and the code
    that it names: neither was a user asked who says yes to everything, nor the code run."""
    merge(folder / name, document)
    (folder / name).with_name("own.py").write_text('open("ran", "w").close()\n')
    found = CliRunner().invoke(main, door.arguments(RUN, pair=folder), input="y\n" * 9)
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (2, "", 1), found.output
    assert not Path("ran").exists()
    return found.stderr


@pytest.mark.parametrize("model", ["target", "near"])
def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(
    door: Door, folder: Path, model: str
) -> None:
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    document = {"model_type": "of_its_own", "auto_map": code}
    line = refused_unasked(door, folder, f"{model}/config.json", document)
    assert f"{model}: cannot load" in line
    assert "needs Python code of its own, which is never run here" in line


def test_code_of_a_tokenizer_is_neither_run_nor_asked_for(door: Door, folder: Path) -> None:
    (folder / "target" / "tokenizer.json").unlink()
    code = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "Own"}
    line = refused_unasked(door, folder, "target/tokenizer_config.json", code)
    assert "tokenizer of" in line
    assert "needs Python code of its own" in line


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
        "--no-chat puts" in line
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


def test_a_recording_of_another_pair(door: Door, folder: Path) -> None:
    other = {"name": "other", "target": "near", "drafts": {"far": "far"}}
    Path("pair/pair.json").write_text(json.dumps(other))
    assert "was made with pair" in refused(door, "tune --recording latest", pair=folder)


def test_a_damaged_chunk_is_named_and_the_others_are_usable(door: Door) -> None:
    whole = door.json("simulate", policy=FIXED)
    place = "WHERE ordinal = 2 AND draft = 'near'"
    ((found,),) = run_sql("spectune.db", f"SELECT trie FROM panorama {place}")
    damaged = found[:-1] + bytes([found[-1] ^ 1])
    run_sql("spectune.db", f"UPDATE panorama SET trie = x'{damaged.hex()}' {place}")
    line = refused(door, "simulate", policy=FIXED)
    assert "request 2" in line
    assert "'near'" in line
    rest = door.call("simulate", policy=FIXED, skip_corrupted=True, json=True)
    assert rest.exit_code == 0
    assert "left out: request 2" in rest.stderr
    assert json.loads(rest.stdout)["requests"] == whole["requests"] - 1
    far = door.json("simulate", policy=FIXED.replace("near", "far"))
    assert far["requests"] == whole["requests"]
    checked = door.call("db check")
    assert checked.exit_code == 1
    assert "ordinal 2" in checked.stdout


# ------------------------------------------------------------------------------ usage and processes


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("tun", "No such command 'tun'"),
        ("tune --bugdet 1m", "No such option"),
        ("run --limit 0", "'--limit'"),
        ("simulate", "Missing option '--policy'"),
        ("profile --contexts 0", "--contexts"),
    ],
)
def test_usage_errors_point_to_the_help(door: Door, command: str, says: str) -> None:
    found = door.call(command)
    assert (found.exit_code, found.stdout) == (2, "")
    assert says in found.stderr
    assert "--help' for help" in found.stderr
    assert "Traceback" not in found.stderr


def test_real_processes_print_one_line(door: Door) -> None:
    """The same through the operating system: no line of torch's, transformers' or Python's own
    beside ours."""
    write_lines("long.jsonl", [{"id": "long", "turns": ["many words " * 300]}])
    command = [sys.executable, str(ROOT / "cli.py"), *door.arguments("run --workload long.jsonl")]
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
        found = door.call("traces list")
    finally:
        sa.event.remove(Pool, "reset", interrupt)
    assert len(came) >= 2
    assert (found.exit_code, found.stdout, found.stderr.count("\n")) == (130, "", 1), found.output
    assert found.stderr.startswith("interrupted; ")
    assert not caplog.records
    assert door.json("traces list")["recordings"]


# --------------------------------------------------------------------------------------------- help


COMMANDS = list(commands())


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[" ".join(p) or "cli.py" for p, _ in COMMANDS]
)
def test_help_ends_with_an_example(path: tuple[str, ...], command: click.Command) -> None:
    assert Door(None).call(*path, "--help").exit_code == 0
    assert path or Door(None).call("--version").stdout.startswith("spectune")
    if isinstance(command, click.Group) and path:
        return
    example = (command.help or "").rstrip().split("\b\n")[-1]
    assert example.lstrip().startswith(("Example:", "Start here:"))
    for line in example.splitlines():
        words = line.split("cli.py ")[1]
        # An example that no longer parses is worse than none.
        assert path == () or " ".join(path) in words
