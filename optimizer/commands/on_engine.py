"""`--engine` and `--concurrency`: what `run` and `record` do where another engine than the native
decoder executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.config import is_given, option
from spectune.optimizer.commands.options import Whole, together, workload_of
from spectune.optimizer.commands.printing import note
from spectune.optimizer.commands.shared import fit_to, policy_named, quiet_transformers

if TYPE_CHECKING:
    from spectune.engines.protocol import Load, Prompt, Running
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.text_codec import TextCodec
    from spectune.traces.schema import Workload
    from spectune.traces.store import TraceStore

NATIVE = "native"
engine_option = option(
    "--engine",
    "What executes (`engines` lists what each can do).",
    click.Choice([NATIVE, "vllm", "openvino"]),
    default=NATIVE,
)
engine_options = together(
    engine_option,
    option("--concurrency", "Requests at a time, on an engine that batches.", Whole(1), default=1),
)


def deployment_on(engine: str) -> str:
    """The deployment that was named, else an engine's own."""
    from spectune.optimizer.deployment import deployment_of

    named = str(click.get_current_context().params["deployment"])
    return named if is_given("deployment") else deployment_of(engine)


def check_engine(kw: dict[str, Any]) -> None:
    """Raises EngineError for options that do not go together, before anything is read."""
    from spectune.engines.abilities import engine_named
    from spectune.traces.errors import EngineError

    engine = engine_named(kw["engine"])
    if kw["concurrency"] > 1 and not engine.batches:
        raise EngineError(
            f"--concurrency {kw['concurrency']}: the native decoder serves one request at a time; "
            "--engine openvino or vllm serves many"
        )
    if engine.name != NATIVE and (kw["device"] != "auto" or kw["dtype"] != "auto"):
        where = (
            "runs on the CPU in float32 here"
            if engine.device
            else "chooses its device and dtype itself"
        )
        raise EngineError(f"--engine {engine.name} {where}; leave --device and --dtype out")


class OnEngine:
    """A workload that an engine is to serve under a policy, checked before the engine is
    started."""

    def __init__(
        self,
        store: TraceStore,
        spec: PairSpec,
        kw: dict[str, Any],
        options: DecodeOptions,
        *,
        every_draft: bool = False,
    ) -> None:
        """``every_draft``: texts are to fit all drafts of the pair, not the policy's alone."""
        from spectune.engines.abilities import engine_named
        from spectune.engines.protocol import Load
        from spectune.optimizer.on_engine import check_options, prompts_of
        from spectune.runtime.checkpoints import ignored_settings
        from spectune.runtime.hardware import sees_cuda
        from spectune.runtime.text_codec import load_codec

        quiet_transformers()
        self.spec, self.options = spec, options
        self._name, self._threads = kw["engine"], kw["threads"]
        engine = engine_named(self._name)
        device = engine.device or ("cuda" if sees_cuda() else "cpu")
        check_options(engine, options)
        workload = workload_of(kw, spec)
        self.policy = policy_named(store, kw["policy_name"], spec.id, device, kw["deployment"])
        engine.runs(self.policy)
        self.words: TextCodec = load_codec(spec)
        for line in ignored_settings(spec.target):
            note(line)
        used = None if every_draft else [self.policy.draft]
        self.workload: Workload = fit_to(self.words, workload, options, kw["overlong"], used)
        self.prompts: tuple[Prompt, ...] = prompts_of(self.words, self.workload, options)
        self.load: Load = Load(kw["concurrency"])
        if ends := sum(bool(r.stop) for r in self.workload.requests):
            note(
                f"ignored: stop in {ends} requests ({engine.title} is not told of stop strings by "
                "this command)"
            )

    @contextmanager
    def started(self) -> Iterator[Running]:
        """The engine, with the policy's draft loaded."""
        from spectune.engines.protocol import Wanted
        from spectune.engines.start import start

        longest = max(len(prompt.ids) for prompt in self.prompts) + self.options.max_new_tokens
        draft = self.policy.draft if self.policy.speculates else "none"
        wanted = Wanted(
            draft, max(1, self.policy.gamma_max), self.load.clients, longest, self._threads
        )
        with closing(start(self._name, self.spec, wanted)) as running:
            engine = running.engine
            if engine.device and not engine.tested(running.version):  # others say so where they run
                note(
                    f"{engine.title} {running.version} was not tested; tested: "
                    f"{', '.join(engine.versions)}"
                )
            yield running
