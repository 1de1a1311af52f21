"""A draft with a shorter context than its target limits the texts of policies that use it, and no
others; what limits is named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import Door
from pairs import chain, make_pair, tiny_model, tokenizer

import spectune
from spectune.optimizer.execute import DecodeOptions, Encoded, run
from spectune.runtime.decoder import Decoder
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import DecodeRequest, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import AUTOREGRESSIVE, Policy, parse_policy
from spectune.runtime.policies.plan import prepare
from spectune.runtime.text_codec import load_codec
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Request, Sampling, Workload

SHORT = 64
LONG_PROMPT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose draft ``far`` holds 64 tokens (GPT-2's positions are a table: beyond it a pass
    fails), the others 512."""
    folder = tmp_path_factory.mktemp("contexts")
    make_pair(folder)
    vocab = len(tokenizer())
    tiny_model("gpt2", vocab, positions=SHORT).save_pretrained(folder / "far")
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> LoadedPair:
    return load_pair(read_pair(str(folder)), device="cpu")


def decoder_of(pair: LoadedPair, document: Any) -> Decoder:
    policy = document if isinstance(document, Policy) else parse_policy(document)
    return Decoder(pair, StaticSource(prepare(policy, pair.draft_names)))


def test_policies_without_the_short_draft_decode_long_texts(pair: LoadedPair) -> None:
    ids = pair.encode(LONG_PROMPT)
    assert SHORT < len(ids) < 400
    texts = []
    for policy in (AUTOREGRESSIVE, chain("ngram", 4), chain("near", 4)):
        decoder = decoder_of(pair, policy)
        done = decoder.decode(decoder.request(Request("r", "c", "x"), ids, Sampling(), 32))
        texts.append(done.trajectory.output_ids.tolist())
    assert texts[0] == texts[1] == texts[2]
    with pytest.raises(WorkloadError, match=r"32 new ones exceed the context of 64 of draft 'far'"):
        decoder_of(pair, chain("far", 4)).request(Request("r", "c", "x"), ids, Sampling(), 32)
    with pytest.raises(WorkloadError, match="exceed the context of 512 of the target"):
        decoder_of(pair, AUTOREGRESSIVE).request(Request("r", "c", "x"), ids, Sampling(), 500)


def test_a_policy_that_is_swapped_in_with_the_short_draft_changes_no_text(pair: LoadedPair) -> None:
    ids, item = pair.encode(LONG_PROMPT), Request("r", "c", "x")
    plain = decoder_of(pair, AUTOREGRESSIVE)
    wanted = plain.decode(plain.request(item, ids, Sampling(), 24)).trajectory.output_ids.tolist()
    source = StaticSource(prepare(parse_policy(chain("near", 2)), pair.draft_names))
    decoder = Decoder(pair, source)
    tokens: list[int] = []
    for n, made in enumerate(decoder.rounds(decoder.request(item, ids, Sampling(), 24))):
        tokens += made.tokens
        if n == 1:
            source.prepared = prepare(parse_policy(chain("far", 4)), pair.draft_names)
        assert n < 2 or made.step.drafted == 0
    assert tokens == wanted


def test_what_an_engine_is_told_has_the_same_limits(folder: Path, pair: LoadedPair) -> None:
    words = load_codec(read_pair(str(folder)))
    for drafts in ((), ("none",), ("ngram",), ("near",), ("far",), ("near", "far"), None):
        assert words.context(drafts) == pair.context(drafts)
        assert pair.context(drafts).positions == (
            SHORT if drafts is None or "far" in drafts else 512
        )


@pytest.mark.parametrize(
    ("kind", "native", "served"),
    [("linear", 256, 256), ("dynamic", 64, 256), ("yarn", 64, 64), ("default", 64, 64)],
)
def test_scaled_positions_are_as_many_as_servers_accept(
    tmp_path: Path, kind: str, native: int, served: int
) -> None:
    """Four times ``max_position_embeddings`` where that is the length before scaling. Dynamic
    scaling turns keys by the longest position of a pass, so here texts end before it begins; what
    is decoded beyond the unscaled length is transformers' text."""
    make_pair(tmp_path, positions=64)
    file = tmp_path / "target" / "config.json"
    config = json.loads(file.read_text())
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    file.write_text(json.dumps(config | {"rope_parameters": rope}))
    spec = read_pair(str(tmp_path / "pair.json"))
    pair = load_pair(spec, device="cpu", drafts=[], dtype="float64")
    assert load_codec(spec).context(()).positions == served
    assert pair.context(()).positions == native
    if native > 64:
        ids = pair.encode(LONG_PROMPT)[:90]
        decoder = decoder_of(pair, chain("ngram", 3))
        done = decoder.decode(decoder.request(Request("r", "c", "x"), ids, Sampling(), 24))
        output = done.trajectory.output_ids.tolist()
        theirs = pair.target.model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, use_cache=False
        )
        assert output == theirs[0, len(ids) :].tolist()


def test_commands_limit_by_the_drafts_that_they_use(folder: Path, tmp_path: Path) -> None:
    work, db = tmp_path / "w.jsonl", tmp_path / "runs.db"
    work.write_text(json.dumps({"prompt": LONG_PROMPT}) + "\n")
    door = Door(str(db))
    of = ("--pair", folder, "--workload", work, "--max-new-tokens", 16)
    for policy in ("autoregressive", json.dumps(chain("ngram", 3))):
        assert door.json("run", "--policy", policy, *of)["emitted_tokens"] > 0
    far = json.dumps(chain("far", 3))
    for command in (("run", "--policy", far), ("record",)):
        line = door.error(*command, *of)
        assert "exceed the context of 64 of draft 'far'" in line
    one = ("generate", LONG_PROMPT, "--pair", folder, "--max-new-tokens", 16, "--no-compare")
    assert door.json(*one, "--policy", "autoregressive")["token_ids"]
    assert "the context of 64 of draft 'far'" in door.error(*one, "--policy", far)


def test_python_limits_by_the_drafts_of_the_policy(pair: LoadedPair, tmp_path: Path) -> None:
    how: dict[str, Any] = {"pair": pair, "db": tmp_path / "runs.db", "max_new_tokens": 8}
    found = spectune.run(chain("ngram", 3), prompts=[LONG_PROMPT], **how)
    assert len(found.rows) == 1
    with pytest.raises(WorkloadError, match="the context of 64 of draft 'far'"):
        spectune.run(chain("far", 3), prompts=[LONG_PROMPT], **how)


def test_a_request_of_no_tokens_has_no_rounds(pair: LoadedPair, tmp_path: Path) -> None:
    """Decoded, run and recorded beside another; one of fewer is refused."""
    decoder, item = decoder_of(pair, chain("near", 3)), Request("r", "c", "x")
    done = decoder.decode(decoder.request(item, pair.encode("x"), Sampling(), 0))
    text = done.trajectory
    assert (done.steps, text.output_ids.size, text.finish) == ((), 0, "length")
    with pytest.raises(WorkloadError, match=r"^request r: -1 new tokens; give 0 or more$"):
        decoder.request(item, pair.encode("x"), Sampling(), -1)
    prompts = Workload("w", (Request("none", "c", "y", max_new_tokens=0), item))
    how: dict[str, Any] = {"pair": pair, "db": tmp_path / "runs.db", "max_new_tokens": 8}
    ran = spectune.run(chain("near", 3), prompts=prompts, **how)
    assert [row["emitted_tokens"] for row in ran.rows] == [0, 8]
    recording = spectune.record(prompts=prompts, gamma_max=2, **how).data["recording"]
    with spectune.open(how["db"]) as store:
        texts = store.load(recording, ("near",)).trajectories
    assert [(t.output_ids.size, t.finish) for t in texts] == [(0, "length"), (8, "length")]


def test_texts_that_a_draft_does_not_hold_are_refused_where_it_is_to_look_at_them(
    folder: Path, tmp_path: Path
) -> None:
    """What served traffic holds was decoded without that draft."""
    work = tmp_path / "w.jsonl"
    work.write_text(json.dumps({"prompt": LONG_PROMPT}) + "\n")
    door = Door(str(tmp_path / "runs.db"))
    of = ("--pair", folder, "--workload", work, "--max-new-tokens", 8)
    ran = door.call("run", "--policy", "autoregressive", *of, "--record")
    assert ran.exit_code == 0, ran.output
    line = door.error("record", "--resume", "latest", "--pair", folder)
    assert "exceeds the context of 64 of draft 'far'" in line


def test_of_a_long_prompt_a_warm_up_reads_the_beginning(tmp_path: Path) -> None:
    pair = load_pair(read_pair(str(make_pair(tmp_path, positions=1024))))
    ids = (pair.encode(LONG_PROMPT) * 10)[:700]
    item = Request("r", "c", "")
    request = DecodeRequest("r", ids, Sampling(), 1, max_new_tokens=8)
    read: Counter[str] = Counter()
    for name, model in {"target": pair.target, **pair.models}.items():
        model.model.get_input_embeddings().register_forward_pre_hook(
            lambda _, args, name=name: read.update({name: args[0].numel()})
        )
    encoded = Encoded(((item, request),), DecodeOptions(max_new_tokens=8))
    plan = prepare(parse_policy(chain("near", 3)), pair.draft_names)
    list(run(pair, StaticSource(plan), encoded))
    assert 700 <= read["target"] < 2 * 700
    assert 700 <= read["near"] < 2 * 700
    assert 0 < read["far"] < 200
