"""SGLang's own scheduler and worker, which also record each round and draft what is published.

SGLang finds :func:`register` by its entry point (``sglang.srt.plugins``) in each of its processes.
Without ``SPECTUNE_DB`` nothing is hooked; ``SPECTUNE_PAIR`` and ``SPECTUNE_DEPLOYMENT`` are as for
vLLM (by default what the server loaded, and ``sglang``). Numbers of steps change where the server
was started with ``--speculative-adaptive``, among those that its configuration names: SGLang
prepares these at its start. Until something is published its own rule decides.
"""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from spectune.engines.abilities import SGLANG
from spectune.engines.protocol import chain_round, text_of
from spectune.engines.serving import Place, Served, Table, served_pair
from spectune.runtime.hardware import hardware
from spectune.runtime.pair import PairSpec
from spectune.runtime.policies.document import AnyPolicy
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Finish, Sampling, Step

logger = logging.getLogger("sglang.spectune")  # below "sglang" it has SGLang's format

ROUNDS = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor.process_batch_result_decode"
)
POLICY = "sglang.srt.speculative.eagle_worker_v2.AdaptiveSpeculativeParams"
NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "srt/managers/scheduler_components/batch_result_processor.py": {
        "SchedulerBatchResultProcessor.process_batch_result_decode": ("self", "batch", "result"),
    },
    "srt/managers/schedule_batch.py": {
        "Req.finished": ("self",),
        "Req.output_ids_through_stop": ("self",),
    },
    "srt/speculative/adaptive_spec_params.py": {
        "AdaptiveSpeculativeParams.__init__": ("self", "initial_steps", "cfg_path"),
        "AdaptiveSpeculativeParams.candidate_steps": ("self",),
        "AdaptiveSpeculativeParams.set_cuda_graph_bs": ("self", "cuda_graph_bs"),
        "AdaptiveSpeculativeParams.cuda_graph_bs_for_step": ("self", "step"),
        "AdaptiveSpeculativeParams.get_steps_for_batch": ("self", "batch_size"),
        "AdaptiveSpeculativeParams.on_verify_complete": (
            *("self", "num_correct_drafts_per_req", "batch_size"),
        ),
    },
    "srt/plugins/hook_registry.py": {
        "HookRegistry.register": ("cls", "target", "hook", "hook_type", "source"),
    },
    "srt/runtime_context.py": {"get_server_args": (), "get_parallel": ()},
}
"""What is used of SGLang: functions by file, and their arguments."""
MOST_SEATS = 4096
"""Largest batch that a table tells apart."""
GREEDY_TOP_K, EVERY_TOKEN = 1, 1 << 30
"""How SGLang holds temperature 0, and no top-k."""


def lacks(root: Path) -> list[str]:
    """What of :data:`NEEDS` the SGLang in this folder has not, read from its sources."""
    found: list[str] = []
    for name, functions in NEEDS.items():
        file = root / name
        there = _functions(ast.parse(file.read_text("utf-8"))) if file.is_file() else {}
        found += [f"{name}: {f}" for f, arguments in functions.items() if there.get(f) != arguments]
    return found


def _functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Functions and methods of a module, and the names of their arguments."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for f in inner:
            if isinstance(f, ast.FunctionDef):
                names = (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
                found[prefix + f.name] = tuple(a.arg for a in names)
    return found


def register() -> None:
    """Hooks what is needed, or says why not and leaves SGLang as it is."""
    if not os.environ.get("SPECTUNE_DB"):
        return
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

    if lacking := lacks(Path(sglang.__file__).parent):
        logger.warning("spectune: this SGLang lacks %s; nothing is recorded", "; ".join(lacking))
        return
    HookRegistry.register(ROUNDS, note_rounds, HookType.AROUND)
    HookRegistry.register(POLICY, following(AdaptiveSpeculativeParams), HookType.REPLACE)


@dataclass
class Server:
    """A scheduler process: the rounds of requests that it decodes, as long as SGLang holds them (an
    aborted one may never come again), and what was last said to go wrong."""

    served: Served
    decoding: WeakKeyDictionary[Any, list[Step]] = field(default_factory=WeakKeyDictionary)
    trouble: str = ""

    def note(self, before: Sequence[tuple[int, Any, int]], batch: int, result: Any) -> None:
        """A step's rounds. ``before``: place in the batch, request, and its tokens before."""
        table, drafted = self.served.current(), 0
        if result.accept_lens is not None:
            drafted = int(result.speculative_num_draft_tokens or 1) - 1
        own = table.version and table.gammas[min(batch, MOST_SEATS)] == drafted
        for place, request, had in before:
            steps = self.decoding.setdefault(request, [])
            if not steps:
                steps.append(Step(0, 0, 1, 0, had, 0))
            emitted = len(request.output_ids_through_stop) - had
            if emitted <= 0:  # it gave its place up, and comes again
                continue
            kept = result.num_correct_drafts_per_req_cpu[place] if drafted else 0
            policy = table.policy if own else ""
            accepted = min(kept, emitted)
            steps.append(chain_round(had, drafted, accepted, emitted, policy=policy, batch=batch))
            if request.finished():
                self._ended(request, self.decoding.pop(request))

    def _ended(self, request: Any, steps: Sequence[Step]) -> None:
        asked, why = request.sampling_params, type(request.finished_reason).__name__
        if why == "FINISH_ABORT" or request.lora_id is not None:
            return
        finish: Finish = "length" if why == "FINISH_LENGTH" else "stop"
        if why == "FINISH_MATCHED_TOKEN":
            finish = "eos"
        sampling = Sampling()
        if asked.top_k != GREEDY_TOP_K:
            top_k = 0 if asked.top_k >= EVERY_TOKEN else int(asked.top_k)
            sampling = Sampling(float(asked.temperature), top_k, float(asked.top_p))
        text = text_of(
            request.rid,
            "serve",
            list(request.origin_input_ids),
            list(request.output_ids_through_stop),
            sampling=sampling,
            max_new_tokens=int(asked.max_new_tokens),
            finish=finish,
        )
        self.served.put(text, steps)


_server: Server | None = None
_failed = False
_candidates: tuple[int, ...] = ()
"""Steps that can be put in force; none without ``--speculative-adaptive``."""


def server() -> Server | None:
    """This process's, begun at its first call; None in all ranks but the first, and where it could
    not begin, which is said and not tried again: SGLang serves on."""
    global _server, _failed
    if _server is None and not _failed:
        try:
            from sglang.srt.runtime_context import get_parallel, get_server_args

            if get_parallel().tp_rank == 0:
                _server = _begun(get_server_args())
        except Exception as error:  # whatever a new version changed
            logger.warning("spectune: nothing is recorded or followed: %r", error)
            _failed = True
    return _server


def _begun(asked: Any) -> Server:
    """Follows and records what a server with these arguments serves."""
    device, ranks = str(asked.device or "cuda"), int(asked.tp_size) * int(asked.pp_size)
    about = {
        "engine": "sglang",
        "engine_version": SGLANG.installed or "",
        "hardware": hardware(device, count=ranks),
        "dtype": str(asked.dtype),
    }
    length = int(asked.context_length or 0) or 1 << 20
    place = Place.here(device, about, length)

    def pair() -> tuple[PairSpec, str]:
        lookup = "ngram" if asked.speculative_algorithm == "NGRAM" else "none"
        return served_pair(asked.model_path, asked.speculative_draft_model_path, lookup)

    def gammas(policy: AnyPolicy, draft: str) -> tuple[int, ...]:
        if not _candidates or ranks > 1:
            why = f"it runs on {ranks} ranks" if ranks > 1 else "it was started without it"
            raise PolicyError(
                f"SGLang changes steps with --speculative-adaptive on one rank: {why}"
            )
        most = max(_candidates)
        found = SGLANG.gammas(policy, draft=draft, most=most, max_num_seqs=MOST_SEATS)
        if other := set(found[1:]) - set(_candidates):
            raise PolicyError(
                f"this server prepared {', '.join(map(str, _candidates))} steps, not {min(other)}; "
                "name it among the candidate_steps of its --speculative-adaptive-config"
            )
        return found

    def say(line: str) -> None:
        logger.info("spectune: %s", line)

    return Server(Served(place, pair, Table((0,) * (MOST_SEATS + 1)), gammas, say))


def note_rounds(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
    """SGLang's own, with each request's round noted. Whatever goes wrong here is said once."""
    found = server()
    if found is None:
        return original(processor, batch, result)
    requests = enumerate(batch.reqs)
    before = [(i, r, len(r.output_ids)) for i, r in requests if not r.finished()]
    returned = original(processor, batch, result)
    try:
        found.note(before, len(batch.reqs), result)
    except Exception as error:  # serving goes on, whatever a new version changed
        if repr(error) != found.trouble:
            logger.warning("spectune: rounds are not recorded: %r", error)
        found.trouble = repr(error)
    return returned


def following(base: Any) -> Any:
    """SGLang's adaptive policy, with the published table in the place of its rule."""

    class Following(base):
        def __init__(self, initial_steps: int, cfg_path: str | None = None) -> None:
            global _candidates
            super().__init__(initial_steps, cfg_path)
            self._graphs: list[int] | None = None
            _candidates = tuple(self.candidate_steps)

        def get_steps_for_batch(self, batch_size: int) -> int:
            table = _table()
            if table is None:
                return int(super().get_steps_for_batch(batch_size))
            return table.gammas[min(batch_size, MOST_SEATS)]

        def on_verify_complete(
            self, num_correct_drafts_per_req: list[int], batch_size: int
        ) -> int | None:
            if _table() is not None:
                return None
            kept: int | None = super().on_verify_complete(num_correct_drafts_per_req, batch_size)
            return kept

        def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
            super().set_cuda_graph_bs(cuda_graph_bs)
            self._graphs = sorted(cuda_graph_bs) if cuda_graph_bs else None

        def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
            # Whatever is published may draft any number of tokens at any batch size.
            return self._graphs

    return Following


def _table() -> Table | None:
    """What was published, None where nothing is in force."""
    found = server()
    table = None if found is None else found.served.current()
    return table if table is not None and table.version else None
