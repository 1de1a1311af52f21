"""Exported settings, as vLLM itself reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from spectune.engines.server_settings import engine_settings
from spectune.engines.vllm.command import SCHEDULER, server_arguments
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import ByLoadWindow, Policy, parse_policy

SEATS = 40
WINDOWS = [
    {"kind": "fixed", "gamma": 4},
    {"kind": "by_load", "gamma": {"1": 5, "4": 3, "16": 0}},
    {"kind": "by_load", "gamma": {"1": 1, "2": 6, "3": 0, "9": 2}},
]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: json.dumps(w["gamma"]))
@pytest.mark.parametrize("draft", ["small", "head", "ngram"])
def test_vllm_reads_of_exported_settings_what_the_policy_says(
    draft: str, window: dict[str, Any]
) -> None:
    spec = read_pair("demo")
    policy = parse_policy({"draft": draft, "window": window})
    assert isinstance(policy, Policy)
    settings = engine_settings(policy, spec, "vllm")
    asked = EngineArgs(
        model=spec.target, dtype="float32", max_model_len=512, speculative_config=dict(settings)
    )
    read = asked.create_engine_config().speculative_config
    assert read is not None
    assert read.num_speculative_tokens == policy.gamma_max
    assert read.method == settings["method"]
    schedule = read.num_speculative_tokens_per_batch_size
    if isinstance(policy.window, ByLoadWindow):
        lookup = build_dynamic_sd_schedule_lookup(schedule, SEATS, policy.gamma_max)
        assert lookup[1 : SEATS + 1] == [policy.window.at(n) for n in range(1, SEATS + 1)]
    else:
        assert schedule is None


def test_vllm_takes_the_line_that_starts_a_server() -> None:
    spec = read_pair("demo")
    words = server_arguments(spec, draft="head", gamma=2, most=5, max_num_seqs=SEATS)
    parser = make_arg_parser(FlexibleArgumentParser())
    read = parser.parse_args([*words[2:]])
    assert words[:2] == ("vllm", "serve")
    assert (read.model_tag, read.scheduler_cls) == (spec.target, SCHEDULER)
    assert read.speculative_config["num_speculative_tokens"] == 5
    assert read.generation_config == "vllm"
    with pytest.raises(SystemExit):
        parser.parse_args([*words[2:], "--no-such-option"])
