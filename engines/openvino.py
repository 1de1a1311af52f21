"""OpenVINO GenAI: a batched engine in this process, driven a step at a time.

A request's number of draft tokens is fixed when it is sent. In a step the draft proposes for each
request, then the target verifies all of them in one pass. At 0 tokens it goes without the draft.
Checkpoints are converted here: `optimum-intel` converts those of transformers before 5.6 alone."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai
import torch
from openvino._offline_transformations import apply_make_stateful_transformation
from openvino_tokenizers import convert_tokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer

from spectune.engines.abilities import OPENVINO
from spectune.engines.protocol import Answered, Execution, Prompt, Running, Wanted, chain_round
from spectune.runtime.checkpoints import identity, translated
from spectune.runtime.load_model import load_model
from spectune.runtime.models import CausalModel
from spectune.runtime.pair import PairSpec
from spectune.runtime.text_codec import tokenizer_of
from spectune.runtime.text_ends import end_tokens
from spectune.traces.errors import EngineError, PolicyError
from spectune.traces.schema import Finish, Step

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}  # defaults change texts


class _Request(NamedTuple):
    prompt: Prompt
    handle: genai.GenerationHandle
    arrived_s: float
    tokens: list[int]
    steps: list[Step]


class OpenVino(Running):
    """A pair in OpenVINO GenAI. Moments leave out what the caller does between two answers."""

    engine = OPENVINO

    def __init__(self, spec: PairSpec, wanted: Wanted) -> None:
        self.version, self.wanted = OPENVINO.require(), wanted
        paths = [spec.target, *(path for name, path in spec.drafts.items() if name == wanted.draft)]
        self._models = [str(model_folder(path, self.version)) for path in paths]
        self._eos = set(end_tokens(spec.target, tokenizer_of(spec.target)))
        self.runs_on = {"device": "cpu", "dtype": "float32"}
        seats, longest = wanted.max_num_seqs, wanted.max_len
        self.serving = {"max_num_seqs": seats, "max_len": longest, "drafts_after": False}
        self.serving["max_batched_tokens"] = max(2048, longest)  # a prompt is read in one step
        self._pipelines = dict[bool, genai.ContinuousBatchingPipeline]()

    def close(self) -> None:
        self._pipelines.clear()

    def _pipeline(self, *, drafts: bool) -> genai.ContinuousBatchingPipeline:
        if drafts not in self._pipelines:
            config, (target, *draft) = genai.SchedulerConfig(), self._models
            config.max_num_seqs = self.wanted.max_num_seqs
            config.max_num_batched_tokens = self.serving["max_batched_tokens"]
            config.enable_prefix_caching = False
            options: dict[str, Any] = FLOAT32 | {"INFERENCE_NUM_THREADS": self.wanted.threads or 0}
            loaded = {"draft_model": genai.draft_model(*draft, "CPU", **options)} if drafts else {}
            pipeline = genai.ContinuousBatchingPipeline(target, config, "CPU", options | loaded)
            self._pipelines[drafts] = pipeline
        return self._pipelines[drafts]

    def _serve(self, asked: Execution) -> Generator[Answered, None, None]:
        if not asked.sampling.greedy:
            raise PolicyError(f"{OPENVINO.title} is run at temperature 0 alone: above is untested")
        return self._answers(asked)

    def _answers(self, asked: Execution) -> Generator[Answered, None, None]:
        waiting, running, load = deque(asked.prompts), dict[int, _Request](), asked.load
        try:
            pipeline, sent = self._pipeline(drafts=asked.policy.gamma_max > 0), 0
            began = time.perf_counter()
            while waiting or running:
                now = time.perf_counter() - began
                for _ in range(min(len(waiting), load.due(now, sent, len(running)))):
                    prompt = waiting.popleft()
                    arrived_s = load.arrivals[sent] if load.arrivals else now
                    ids = ov.Tensor(np.array([prompt.ids], dtype=np.int64))
                    handle = pipeline.add_request(sent, ids, self._config(asked, prompt))
                    running[sent] = _Request(prompt, handle, arrived_s, [], [])
                    sent += 1
                if not running:
                    time.sleep(max(0.0, load.arrivals[sent] - now))
                    continue
                answered = self._step(pipeline, running, asked, began)
                paused = time.perf_counter()
                yield from answered
                began += time.perf_counter() - paused
        except RuntimeError as error:  # before the reason stand places in OpenVINO's sources
            raise EngineError(f"{OPENVINO.title}: {str(error).strip().splitlines()[-1]}") from None
        finally:
            if running:  # nobody reads the rest: the next execution has a pipeline of its own
                self.close()

    def _config(self, asked: Execution, prompt: Prompt) -> genai.GenerationConfig:
        gamma = asked.policy.gamma_max
        options: dict[str, Any] = {"num_assistant_tokens": gamma} if gamma else {}
        options |= {"stop_token_ids": self._eos, "max_new_tokens": asked.most_tokens(prompt)}
        options["eos_token_id"] = min(self._eos, default=-1)  # -1: the tokenizer's
        return genai.GenerationConfig(do_sample=False, apply_chat_template=False, **options)

    def _step(
        self, pipeline: Any, running: dict[int, _Request], asked: Execution, began: float
    ) -> list[Answered]:
        """One step, noted in each request that it gave tokens to; those that ended."""
        start = time.perf_counter()
        pipeline.step()
        end, answered = time.perf_counter(), list[Answered]()
        about: dict[str, Any] = {"draft": self.wanted.draft, "policy": asked.policy.id}
        about |= {"ended_s": end - began, "round_s": end - start}
        about["batch"] = pipeline.get_metrics().scheduled_requests
        for number, r in [(n, r) for n, r in running.items() if r.handle.can_read()]:
            (output,) = r.handle.read().values()
            before, emitted = len(r.tokens), len(output.generated_ids)
            # The prompt's pass drafts nothing, and no round drafts what could not be kept.
            most = min(asked.policy.gamma_max, asked.most_tokens(r.prompt) - before - 1)
            drafted = most if before else 0
            counts = before, drafted, min(drafted, emitted - 1), emitted
            r.tokens.extend(output.generated_ids)
            r.steps.append(chain_round(*counts, **about, arrived_s=r.arrived_s))
            if (reason := output.finish_reason.name) != "NONE":
                finish: Finish = "length" if reason == "LENGTH" else "eos"
                answered.append(asked.answered(r.prompt, r.tokens, finish, r.steps))
                del running[number]
        return answered


def model_folder(path: str, version: str) -> Path:
    """The folder of a checkpoint's OpenVINO model and tokenizer, below ``$XDG_CACHE_HOME`` or
    ``~/.cache``; equal content, equal folder. Raises PairError where it cannot be converted."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectune/openvino"
    folder = cache / f"{identity(path)}-float32-{version}"
    if not folder.exists():
        causal = load_model(path, name=path, device=torch.device("cpu"), dtype=torch.float32)
        with translated(f"{OPENVINO.title}: {path} cannot be converted"):
            cache.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=cache) as part:
                model, tokenizer = Path(part, "model"), convert_tokenizer(tokenizer_of(path))
                ov.save_model(tokenizer, model / "openvino_tokenizer.xml")
                ov.save_model(_stateful(causal), model / "openvino_model.xml", False)
                with suppress(OSError):  # another process was first
                    model.rename(folder)
    return folder


def _stateful(causal: CausalModel) -> ov.Model:
    """A model that keeps keys and values itself: traced with those of earlier tokens as inputs and
    outputs, [rows, heads, tokens, size], which are then made its state."""
    causal.model.set_attn_implementation("sdpa")

    class Pass(torch.nn.Module):
        model = causal.model

        def forward(  # the engine knows its inputs by these names
            self, input_ids: Any, attention_mask: Any, position_ids: Any, beam_idx: Any, *past: Any
        ) -> Any:
            cache = DynamicCache()
            for keys, values in zip(past[::2], past[1::2], strict=True):
                cache.layers.append(layer := DynamicLayer())
                layer.keys, layer.values = (x.index_select(0, beam_idx) for x in (keys, values))
                layer.is_initialized = True
            options = {"position_ids": position_ids, "use_cache": True, causal.cache_name: cache}
            logits = self.model(
                input_ids=input_ids, attention_mask=attention_mask, **options
            ).logits
            return (logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))

    sizes = [(s.heads, size) for s in causal.cache.shapes for size in (s.key_size, s.value_size)]
    shapes = [*[(-1, -1)] * 3, (-1,), *((-1, heads, -1, size) for heads, size in sizes)]
    tokens = (torch.ones(2, length, dtype=torch.int64) for length in (3, 6, 3))
    past = (torch.zeros(2, heads, 3, size) for heads, size in sizes)
    example = (*tokens, torch.arange(2, dtype=torch.int32), *past)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # of branches it fixes
        model = ov.convert_model(Pass(), example_input=example, input=shapes)
    states = {f"past.{i}": f"present.{i}" for i in range(len(sizes))}
    ports = *model.inputs[-len(sizes) :], *model.outputs
    for port, name in zip(ports, (*states, "logits", *states.values()), strict=True):
        port.get_tensor().set_names({name})
    apply_make_stateful_transformation(model, states)
    for state in (op for op in model.get_ops() if op.get_type_name() == "ReadValue"):
        shape = [max(0, dim.get_max_length()) for dim in state.get_output_partial_shape(0)]
        state.set_arguments([ov.opset13.constant(np.zeros(shape, np.float32)).output(0)])
    model.validate_nodes_and_infer_types()
    return model
