"""`--engine` and `--concurrency`: what `run` and `record` do where another engine than the native
decoder executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from spectune.optimizer.commands.executed import finish_run
from spectune.optimizer.commands.shared import (
    Meter,
    Whole,
    fit_to,
    policy_named,
    say,
    say_former,
    together,
    workload_of,
)

if TYPE_CHECKING:
    from spectune.engines.protocol import Answered, Load, Prompt, Running
    from spectune.optimizer.execute import DecodeOptions
    from spectune.runtime.pair import PairSpec
    from spectune.runtime.policies.document import Policy
    from spectune.runtime.words import Words
    from spectune.traces.schema import Workload
    from spectune.traces.store import TraceStore

NATIVE = "native"
engine_option = click.option(
    "--engine",
    type=click.Choice([NATIVE, "vllm", "openvino", "llamacpp"]),
    default=NATIVE,
    show_default=True,
    help="What executes (`engines` lists what each can do).",
)
engine_options = together(
    engine_option,
    click.option(
        "--concurrency",
        type=Whole(1),
        default=1,
        show_default=True,
        help="Requests at a time, on an engine that batches.",
    ),
)


def check_engine(kw: dict[str, Any]) -> None:
    """Raises EngineError for options that do not go together, before anything is read."""
    from spectune.engines.abilities import engine_named
    from spectune.traces.errors import EngineError

    engine = engine_named(kw["engine"])
    if kw["concurrency"] > 1 and not engine.batches:
        who = "the native decoder" if engine.name == NATIVE else engine.title
        raise EngineError(
            f"--concurrency {kw['concurrency']}: {who} serves one request at a time; --engine "
            "openvino or vllm serves many"
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
        self, store: TraceStore, spec: PairSpec, kw: dict[str, Any], options: DecodeOptions
    ) -> None:
        from spectune.engines.abilities import engine_named
        from spectune.engines.protocol import Load
        from spectune.optimizer.on_engine import check_options, prompts_of
        from spectune.runtime.policies.document import Policy
        from spectune.runtime.words import load_words

        self.store, self.spec, self.options = store, spec, options
        self._name, self._threads = kw["engine"], kw["threads"]
        engine = engine_named(self._name)
        self.device = engine.device or "cpu"
        check_options(engine, options)
        workload = workload_of(kw, spec, chat=options.chat)
        say_former(store, spec)
        policy = policy_named(store, kw["policy_name"], spec.id, self.device, kw["deployment"])
        engine.runs(policy)
        assert isinstance(policy, Policy)  # no engine runs a chooser
        self.policy: Policy = policy
        self.words: Words = load_words(spec)
        self.workload: Workload = fit_to(self.words, workload, options, kw["overlong"])
        self.prompts: tuple[Prompt, ...] = prompts_of(self.words, self.workload, options)
        self.load: Load = Load(kw["concurrency"])

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
                say(
                    f"{engine.title} {running.version} was not tested; tested: "
                    f"{', '.join(engine.versions)}",
                    err=True,
                )
            yield running


def record_texts(asked: OnEngine, *, fresh: bool) -> str:
    """Serves the workload into a recording; its id. It is looked around in and finished by who
    calls."""
    from spectune.optimizer.on_engine import record_on

    with asked.started() as running, Meter() as meter:
        return record_on(
            asked.store,
            asked.spec,
            running,
            asked.workload,
            asked.prompts,
            asked.policy,
            asked.load,
            asked.options,
            fresh=fresh,
            progress=meter,
        ).id


def run_on_engine(ctx: click.Context, asked: OnEngine) -> None:
    """`run` on an engine: the same files and keys as of the native decoder, and what served
    them."""
    from spectune.optimizer.changes import Share
    from spectune.optimizer.on_engine import (
        about_recording,
        execute,
        latency_on,
        outcome_on,
        verifier_of,
    )
    from spectune.optimizer.record import record_served

    options, policy, answered = asked.options, asked.policy, list["Answered"]()
    with asked.started() as running:
        about = {
            "engine": running.engine.name,
            "engine_version": running.version,
            "concurrency": asked.load.clients,
        }
        texts_of_engine = replace(options, verifier=verifier_of(options))
        served = record_served(
            asked.store,
            asked.spec.id,
            asked.spec,
            texts_of_engine,
            about_recording(running, options),
        )
        with served if ctx.params["keep_texts"] else nullcontext() as writer, Meter() as meter:
            if writer is not None:
                click.echo(f"recording {writer.recording}", err=True)
            for done in execute(running, asked.prompts, policy, asked.load, options):
                answered.append(done)
                if writer is not None:
                    writer.put(done.trajectory, done.steps)
                meter("serve", len(answered), len(asked.prompts))
    order = {prompt.id: n for n, prompt in enumerate(asked.prompts)}
    answered.sort(key=lambda done: order[done.trajectory.request_id])
    result = outcome_on(policy.label(), answered)
    finish_run(
        ctx,
        asked.store,
        asked.spec,
        asked.words,
        asked.workload,
        answered,
        result,
        [Share(policy, result.total)],
        device=asked.device,
        dtype="float32",
        engine=about,
        latency=latency_on(answered),
        writer=writer,
    )
