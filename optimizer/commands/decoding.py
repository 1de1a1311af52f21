"""What commands that decode have in common: the workload, how it is decoded, the loaded pair, the
plan of a policy; and requests that another engine serves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from typing import Any

from transformers.utils import logging

from spectune.engines.abilities import engine_named
from spectune.engines.engine import Load, Prompt, Running, Wanted
from spectune.engines.start import start
from spectune.optimizer.commands.common import Talk, deployment_for, device_of, policy_named
from spectune.optimizer.deployment import other_sampling
from spectune.optimizer.execute import DecodeOptions
from spectune.optimizer.inputs import narrow, read_files
from spectune.optimizer.overlong import made_to_fit
from spectune.optimizer.recording.on_engine import check_options, prompts_of
from spectune.optimizer.stored_artifacts import fitted
from spectune.runtime.checkpoints import ignored_settings
from spectune.runtime.decoder import prepare_for
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.pair import PairSpec, check_threads
from spectune.runtime.policies.plan import Plan
from spectune.runtime.rendered import rendered_before
from spectune.runtime.text_codec import TextCodec, check_conversations, load_codec
from spectune.runtime.text_ends import end_notes
from spectune.settings import OnDevice, OnWorkload, WithPolicy
from spectune.traces.errors import WorkloadError
from spectune.traces.schema import Workload
from spectune.traces.store import TraceStore
from spectune.traces.tables import LatencyProfile
from spectune.traces.workloads import WorkloadRow, make_workload

NATIVE = "native"


def read_workload(s: OnWorkload, spec: PairSpec, talk: Talk) -> Workload:
    """The workload meant, for a pair that is not loaded yet. Raises WorkloadError, also for a
    conversation without a chat template."""
    if s.prompts is None:
        workload = read_files(s.workload, s.requests)
    else:
        workload = narrow(_prompts(s), s.requests)
    check_conversations(spec.target, workload.requests, chat=s.sampling.chat)
    for line in workload.notes:
        talk.tell(line)
    return workload


def _prompts(s: OnWorkload) -> Workload:
    """The workload of Python's prompts: texts, or objects as the lines of a workload are."""
    if s.typed("workload", "requests.column"):
        raise WorkloadError("workload, column: for prompts of a file, not for a list of them")
    if isinstance(s.prompts, Workload):
        return s.prompts
    if isinstance(s.prompts, str):
        raise WorkloadError("prompts: give a list of texts; workload takes the name of a file")
    documents = [{"prompt": p} if isinstance(p, str) else p for p in s.prompts]
    lines = (WorkloadRow(f"prompts[{n}]", prompt, str(n)) for n, prompt in enumerate(documents))
    return make_workload("prompts", lines, turns=s.requests.turns, bad_rows=s.requests.bad_rows)


def quiet_transformers(talk: Talk) -> None:
    """stderr is for a command's own lines: neither bars nor warnings while models are loaded. A
    process that calls from Python keeps its switches."""
    if talk.console is not None:
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def load(
    s: Any,
    spec: PairSpec,
    talk: Talk,
    *,
    drafts: Collection[str] | None = None,
    notes: bool = True,
) -> LoadedPair:
    """The pair, with these of its ``drafts`` (None: all), loaded as the settings say; with
    ``notes`` what is to be known of them is said. Raises PairError."""
    if isinstance(s.pair, LoadedPair):
        return s.pair
    assert isinstance(s, OnDevice)
    quiet_transformers(talk)
    check_threads(s.threads)
    pair = load_pair(spec, device=s.device, dtype=s.dtype, drafts=drafts, threads=s.threads)
    for line in pair.notes if notes else ():
        talk.tell(line)
    return pair


def fit_to(
    codec: TextCodec,
    workload: Workload,
    options: DecodeOptions,
    s: OnWorkload,
    talk: Talk,
    drafts: Collection[str] | None = None,
    *,
    notes: bool = True,
) -> Workload:
    """The workload with its prompts in the context of the target and the ``drafts`` that are used
    (None: all), without those that cannot be read; what was done is said, and with ``notes`` which
    look as if they had gone through the chat template before."""
    how = s.requests.overlong, s.requests.bad_rows
    fitting, lines = made_to_fit(codec, workload, options, *how, drafts)
    if notes:
        lines = [*rendered_before(codec, workload.requests, chat=options.chat), *lines]
    for line in lines:
        talk.tell(line)
    return fitting


def plan_of(
    store: TraceStore,
    pair: LoadedPair,
    name: str,
    options: DecodeOptions,
    profile: LatencyProfile | None,
    deployment: str,
    talk: Talk,
) -> Plan:
    """A policy by name, ready to decode with a loaded pair. Says where it was tuned for another
    sampling. Raises PolicyError."""
    where = pair.id, pair.device_name, deployment
    policy = policy_named(store, name, *where, talk)
    active = store.active_publication(*where) if name == "active" else None
    if active and (warning := other_sampling(active, options.sampling, options.verifier)):
        talk.tell(f"warning: {warning}")
    return prepare_for(pair, policy, profile=profile, artifacts=fitted(store, pair.id))


# -------------------------------------------------------------------------------- on another engine


class ServedWorkload:
    """A workload that an engine is to serve under a policy, checked before the engine is
    started."""

    def __init__(
        self,
        store: TraceStore,
        spec: PairSpec,
        s: WithPolicy,
        talk: Talk,
        *,
        every_draft: bool = False,
    ) -> None:
        """``every_draft``: texts are to fit all drafts of the pair, not the policy's alone."""
        quiet_transformers(talk)
        engine = engine_named(s.engine)
        self.spec, self.name, self.threads = spec, s.engine, s.threads
        self.options = DecodeOptions.of(s.sampling)
        check_options(engine, self.options)
        workload = read_workload(s, spec, talk)
        deployment = deployment_for(s, s.engine)
        self.policy = policy_named(store, s.policy, spec.id, device_of("auto"), deployment, talk)
        engine.runs(self.policy)
        self.codec = load_codec(spec)
        ends = end_notes(spec.target, self.codec.tokenizer)
        for line in (*ignored_settings(spec.target), *ends):
            talk.tell(line)
        drafts = None if every_draft else [self.policy.draft]
        self.workload = fit_to(self.codec, workload, self.options, s, talk, drafts)
        self.prompts: tuple[Prompt, ...] = prompts_of(self.codec, self.workload, self.options)
        self.load = Load(s.concurrency)
        if stops := sum(bool(r.stop) for r in self.workload.requests):
            talk.tell(
                f"ignored: stop in {stops} requests ({engine.title} is not told of stop strings by "
                "this command)"
            )

    @contextmanager
    def started(self) -> Iterator[Running]:
        """The engine, with the policy's draft loaded."""
        longest = max(len(prompt.ids) for prompt in self.prompts) + self.options.max_new_tokens
        draft = self.policy.draft if self.policy.speculates else "none"
        how = Wanted(draft, max(1, self.policy.gamma_max), self.load.clients, longest, self.threads)
        with closing(start(self.name, self.spec, how)) as running:
            yield running
