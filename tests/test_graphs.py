"""Captured passes, proven without a GPU: a recorder that replays torch's operations on fixed
memory, as a CUDA graph does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from pairs import chain, make_pair, top_k
from recorded_texts import Looked, asked, shape
from test_heads import _eagle1, _eagle3_without_lm_head, pair_with_heads
from test_shortlists import artifacts as shortlist_artifacts
from test_tree_parity import STATIC, artifacts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from waiting import PATIENCE_S

from spectune.optimizer.execute import DecodeOptions, Encoded, Executor, encode, run
from spectune.runtime.cuda import graphs
from spectune.runtime.cuda.graphs import (
    CudaRecorder,
    graphs_enabled,
    prepare_graphs,
    use_graphs,
)
from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.drafts.tree_program import TreeProgram
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import (
    DecodeRequest,
    PolicySource,
    Round,
    StaticSource,
    Waiting,
    decode_rounds,
)
from spectune.runtime.models import Outputs, PassKind
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.document import EXPANDED_LIMIT, Policy, parse_policy
from spectune.runtime.policies.plan import Plan, prepare
from spectune.runtime.profiling.experiment import Experiment
from spectune.traces.schema import Request, Sampling, Verifier, Workload

TOKENS = 16
DEEP = 3
"""Layers of the heads' target."""
GREEDY, HOT = Sampling(), Sampling(temperature=1.0, seed=4)
both = pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
PROMPT = "def add(a, b):\n    return a + b\n"


class Tape(TorchDispatchMode):
    """Records every operation with the very tensors it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        if (func is torch.ops.aten.copy_.default and not args[1].dim()) or (
            func is torch.ops.aten.lift_fresh.default and args[0].dim()
        ):  # of one number, as `x[0] = 1` of a vector is
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during graph capture")
        if func._schema.is_mutable:
            changed = args[0] if "out" not in kwargs else kwargs["out"]
            self.before.append((changed, changed.clone()))
        out = func(*args, **kwargs)
        read = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if func._schema.is_mutable:
            self.ops.append((func, args, kwargs, None))
        elif any(
            t.untyped_storage().data_ptr() not in read for t in results
        ):  # else a view, which stays what it is
            self.ops.append((func, args, kwargs, out))
            self.made += results
        return out


class FakeRecorder(CudaRecorder):
    """What CUDA does, on a CPU: capturing changes nothing, a replay repeats the operations on the
    same memory without any Python of the pass, and what a pass made is lost as soon as another is
    replayed. ``captured`` counts."""

    def __init__(self) -> None:
        self.captured = 0
        self._last: list[torch.Tensor] = []

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        compute()
        with Tape() as tape:
            outputs = compute()
        for tensor, old in reversed(tape.before):
            tensor.copy_(old)
        self.captured += 1

        def replay() -> None:
            for tensor in self._last:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
            for func, args, kwargs, out in tape.ops:
                again = func(*args, **kwargs)
                if out is not None:
                    for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                        if isinstance(old, torch.Tensor):
                            old.copy_(new)
            self._last = tape.made

        return replay, outputs


class Repeating(FakeRecorder):
    """Whose replays run the pass again, kernels and all."""

    def capture(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        outputs = compute()
        self.captured += 1

        def replay() -> None:
            for old, new in zip(tree_leaves(outputs), tree_leaves(compute()), strict=True):
                old.copy_(new)

        return replay, outputs


class Twins:
    """One pair loaded twice: ``plain``, and ``fast``, which replays captured passes."""

    def __init__(self, file: Path, dtype: str = "float64") -> None:
        self.plain, self.fast = (
            load_pair(read_pair(str(file)), device="cpu", threads=1, dtype=dtype) for _ in range(2)
        )
        self.recorder = FakeRecorder()
        use_graphs(self.models, self.recorder)

    @property
    def models(self) -> list[Any]:
        return [self.fast.target, *self.fast.models.values()]

    def forget(self) -> None:
        for model in self.models:
            model.graphs.forget()
            model.graphs.requests = ()
            model.graphs.eager.clear()
            model.graphs.replayed.clear()

    def agree(self, policy: Policy, sampling: Sampling, prompt: str = PROMPT, **look: Any) -> None:
        """Decodes with and without graphs; the rounds must agree."""

        def rounds(pair: LoadedPair) -> list[Any]:
            plan = prepare_for(pair, policy, **look)
            return seen(going(pair, StaticSource(plan), sampling, prompt))

        assert rounds(self.plain) == rounds(self.fast), policy.label()

    def missed(self) -> dict[str, Any]:
        """Passes of the kinds that were captured which ran eagerly, by model."""
        found = {}
        for model in self.models:
            kinds = {s.kind for s in model.graphs.shapes}
            missed = {key: n for key, n in model.graphs.eager.items() if key[1] in kinds}
            if missed or model.graphs.problem:
                found[model.name] = missed or model.graphs.problem
        return found


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    heads = {"eagle3": _eagle3_without_lm_head(), "eagle1": _eagle1()}
    for head in heads.values():
        head.config |= {"eagle_aux_hidden_state_layer_ids": [0, 2, DEEP]}
    return Twins(pair_with_heads(tmp_path_factory.mktemp("graphs"), DEEP, **heads))


def going(
    pair: LoadedPair,
    source: PolicySource,
    sampling: Sampling,
    prompt: str = PROMPT,
    verifier: Verifier = "coupled",
) -> Iterator[Round]:
    decoder = Decoder(pair, source, verifier)
    return decoder.rounds(asked(decoder, prompt, sampling, TOKENS))


def seen(rounds: Iterable[Round]) -> list[Any]:
    """All that rounds say but for their times."""
    return [(shape(r.step), r.step.policy, r.tokens, r.drafted, r.path, r.finish) for r in rounds]


BINS = {"stratify": {"artifact": "bins", "alpha": 3, "fractions": [0.3, 0.6, 1.0]}}
GROWER = {"kind": "classifier", "width": 5, "cap": 5, "beta": 0.5, "artifact": "grower"}
Q_LEARNING = {"kind": "q_learning", "gamma_max": 3, "gamma_min": 0, "epsilon": 0.6}
DOCUMENTS: list[dict[str, Any]] = [
    {"draft": "none"},
    chain("ngram", 3),
    chain("near", 6, stop={"kind": "max_prob", "threshold": 0.3}),
    {"draft": "near", "window": Q_LEARNING},
    top_k("near", 4, 4, 12, **BINS),
    top_k("near", 4, 4, 30, stop={"kind": "joint_prob", "threshold": 0.02}),
    {"draft": "near", "growth": {"kind": "static", "paths": STATIC}},
    chain("near", 5, growth=GROWER),
    chain("eagle3", 3),
    top_k("eagle1", 5, 3, 9),
    chain("eagle1", 4, growth=GROWER),
    top_k("eagle3", 4, 4, 12, **BINS),
]
POLICIES = [parse_policy(d) for d in DOCUMENTS]


def poisoned(pair: LoadedPair) -> None:
    """NaN in the slot of a pair's caches that no pass reads."""
    for model in (pair.target, *pair.models.values()):
        model.cache.states[:, :, :, -1] = torch.nan


@contextmanager
def eager_passes(pair: LoadedPair) -> Iterator[list[str]]:
    """The names of a pair's models, each as often as it ran a pass that was not replayed."""
    eager: list[str] = []
    hooks = [
        model._embed.register_forward_pre_hook(lambda *_, name=model.name: eager.append(name))
        for model in pair.models.values()
    ]
    yield eager
    for hook in hooks:
        hook.remove()


@both
def test_decoding_with_graphs_is_decoding(
    twins: Twins, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same texts and rounds; all that rounds needed was captured before the first, and nothing
    in them, up to the last trees of a text, which are shallower. NaN in the slots to which fillers
    write reaches nothing. Nor does it matter how passes are told what they read."""
    for n, policy in enumerate(POLICIES[sampling is HOT :: 2]):
        monkeypatch.setenv("SPECTUNE_SKINNY", str(n % 2))
        twins.forget()
        source = StaticSource(
            prepare(policy, twins.fast.draft_names, artifacts=artifacts(policy.draft))
        )
        rounds, counts = [], set[tuple[int, int]]()
        with eager_passes(twins.fast) as eager:
            for item in going(twins.fast, source, sampling):
                counts.add((twins.recorder.captured, len(eager)))
                poisoned(twins.fast)
                rounds.append(item)
        assert len(counts) == 1, policy.label()
        assert seen(rounds) == seen(going(twins.plain, source, sampling)), policy.label()
        assert twins.missed() == {}, policy.label()
        assert sum(twins.fast.target.graphs.replayed.values()) == len(rounds)  # type: ignore[union-attr]


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
def test_trees_by_one_program_a_level_are_those_of_torch(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole texts and all rounds, uncaptured. What the program does not know is grown as before."""
    monkeypatch.setenv("SPECTUNE_SKINNY", "1")
    monkeypatch.setattr(twins.recorder, "capture", lambda compute: 1 / 0)
    grown, choose = list[int](), TreeProgram.choose
    monkeypatch.setattr(
        TreeProgram, "choose", lambda program, last: grown.append(last) or choose(program, last)
    )
    for document, sampling, depth in (
        (top_k("near", 4, 3, 9), GREEDY, 3),
        (top_k("eagle3", 3, 2, 8), HOT, 2),
        (chain("near", 3, stop={"kind": "joint_prob", "threshold": 0.02}), GREEDY, 0),
    ):
        twins.forget()
        grown.clear()
        twins.agree(parse_policy(document), sampling)
        assert max(grown, default=0) == depth
    twins.forget()


def test_what_a_pass_is_told_goes_up_by_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of four, and a number."""
    twins, writes = Twins(make_pair(tmp_path)), list[int]()
    draft = twins.fast.drafts["near"]
    draft.reserve(64)
    twins.recorder.capture = lambda compute: ((lambda: None), compute())  # type: ignore
    assert draft.graphs is not None
    draft.graphs.capture(8, PassKind("ids"))
    for switch in "01":
        monkeypatch.setenv("SPECTUNE_SKINNY", switch)
        with torch.profiler.profile() as done:
            draft.chain(draft.ids([5, 6]), 3, logits=1, greedy=True)
        names = [event.name for event in done.events()]
        writes.append(names.count("aten::copy_") + names.count("aten::fill_"))
    assert writes[0] - writes[1] == 4


@pytest.mark.parametrize("draft", ["near", "eagle3"])
def test_filtered_drafts_are_captured(twins: Twins, draft: str) -> None:
    """Top-k and top-p wait for nothing."""
    twins.forget()
    warm = Sampling(temperature=0.7, top_p=0.8, seed=2)
    for sampling in (warm, replace(warm, top_k=20)):
        twins.agree(parse_policy(top_k(draft, 4, 4, 12)), sampling)
        assert twins.missed() == {}


@pytest.mark.parametrize(("draft", "sampling"), [("near", GREEDY), ("eagle3", HOT)])
def test_shortlisted_drafts_leave_the_head_out_of_the_graph(
    twins: Twins, draft: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTUNE_SKINNY", str(int(draft == "near")))
    find = shortlist_artifacts(twins.plain)
    router = {"kind": "clusters", "k0": 3, "k1": 2, "k_min": 1, "artifact": f"router-{draft}"}
    few = {"kind": "frequency", "size": 40, "artifact": "order"}
    for document in (
        chain(draft, 3, shortlist=few),
        chain(draft, 3, shortlist=router),
        top_k(draft, 4, 3, 9, shortlist=router),
    ):
        twins.forget()
        twins.agree(parse_policy(document), sampling, artifacts=find)
        assert twins.missed() == {}
        model = twins.fast.models[draft]
        assert {kind.output for _, kind in model.graphs.replayed} == {"states"}  # type: ignore[union-attr]


def test_the_rejection_verifier_replays_what_it_needs(twins: Twins) -> None:
    """Chains that a stop ends are grown on the host, which reads their distributions."""
    twins.forget()
    stop = {"kind": "max_prob", "threshold": 0.05}
    policy, rounds = parse_policy(chain("near", 4, stop=stop)), []
    for pair in (twins.plain, twins.fast):
        plan = prepare(policy, pair.draft_names)
        rounds.append(seen(going(pair, StaticSource(plan), HOT, verifier="rejection")))
    assert rounds[0] == rounds[1]
    assert twins.missed() == {}


def test_texts_of_any_length_are_captured_for_once(tmp_path: Path) -> None:
    """Prompts of 100, 300, 250 and 500 tokens, the longest of which is known before the first."""
    twins = Twins(make_pair(tmp_path, positions=1024))
    ids = twins.fast.encode(PROMPT * 60)
    policy = parse_policy(top_k("near", 3, 3, 8))
    requests = tuple(
        (
            Request(str(n), "c", ""),
            DecodeRequest(str(n), ids[:n], Sampling(), n, max_new_tokens=8),
        )
        for n in (100, 300, 250, 500)
    )
    encoded = Encoded(requests, DecodeOptions(max_new_tokens=8))
    captured, texts = [], []
    for pair in (twins.fast, twins.plain):
        done = []
        for text in run(pair, StaticSource(prepare(policy, pair.draft_names)), encoded):
            done.append(text.trajectory.output_ids.tolist())
            captured.append(twins.recorder.captured)
        texts.append(done)
    assert captured[0] > 0
    assert set(captured) == {captured[0]}
    assert texts[0] == texts[1]
    assert twins.missed() == {}


def test_a_cache_that_grows_forgets_captured_passes(tmp_path: Path) -> None:
    twins = Twins(make_pair(tmp_path))
    twins.agree(parse_policy(chain("near", 4)), GREEDY)
    target = twins.fast.target
    assert target.graphs is not None
    assert target.graphs.shapes
    for pair in (twins.fast, twins.plain):
        pair.target.reserve(target.cache.capacity + 1)
    assert not target.graphs.shapes
    ids = torch.arange(5, 10)
    logits = [pair.target.chain(ids, 0, logits=5)[0] for pair in (twins.fast, twins.plain)]
    assert torch.equal(*logits)
    assert target.graphs.eager[5, PassKind("logits")] == 1


def swapped(first: Plan, make: Callable[[], Plan], at: int) -> Looked:
    """Another plan from round ``at`` on, prepared aside at the round before, while the text is
    being decoded."""
    made = cache(make)
    return Looked(lambda n: made() if n > at else first)


@both
def test_a_policy_prepared_aside_is_captured_before_its_first_round(
    twins: Twins, sampling: Sampling
) -> None:
    first = parse_policy(chain("far", 2))
    for then in (top_k("near", 4, 4, 12, **BINS), top_k("eagle3", 4, 3, 10)):
        twins.forget()
        policy, rounds = parse_policy(then), []
        for pair in (twins.plain, twins.fast):
            make = partial(prepare_for, pair, policy, artifacts=artifacts(policy.draft))
            source = swapped(prepare(first, pair.draft_names), make, 4)
            rounds.append(seen(going(pair, source, sampling)))
        assert rounds[0] == rounds[1]
        assert {name for _, name, *_ in rounds[1]} == {first.id, policy.id}
        assert twins.missed() == {}


@both
def test_decoding_goes_on_while_a_policy_is_captured(tmp_path: Path, sampling: Sampling) -> None:
    """A capture that does not end until a request in hand has ended, and another after it."""
    twins = Twins(make_pair(tmp_path))
    pair, first = twins.fast, parse_policy(chain("far", 2))
    source = StaticSource(prepare(first, pair.draft_names))
    expected = [seen(going(pair, source, sampling)) for _ in range(2)]
    begun, ended, waited = Event(), Event(), []
    capture = twins.recorder.capture

    def patient(compute: Callable[[], Outputs]) -> Any:
        begun.set()
        waited.append(ended.wait(PATIENCE_S))
        return capture(compute)

    twins.recorder.capture = patient  # type: ignore[method-assign]
    rounds = going(pair, source, sampling)
    texts = [[next(rounds)]]
    policy = parse_policy(top_k("near", 3, 3, 8))
    aside = Thread(target=prepare_for, args=(pair, policy))
    aside.start()
    assert begun.wait(PATIENCE_S)
    texts[0] += rounds
    texts.append(list(going(pair, source, sampling)))
    ended.set()
    aside.join()
    assert [seen(text) for text in texts] == expected
    assert set(waited) == {True}
    twins.agree(policy, sampling)
    assert twins.missed() == {}


def test_a_cache_grows_between_captures(tmp_path: Path) -> None:
    """One that has to grow waits for the pass that is being captured, and what is prepared for the
    cache of before is captured no more."""
    twins = Twins(make_pair(tmp_path))
    policy = parse_policy(top_k("near", 3, 3, 8))
    twins.agree(policy, GREEDY)
    draft, capture = twins.fast.drafts["near"], twins.recorder.capture
    assert draft.graphs is not None
    before, sizes, growing = draft.cache.capacity, list[int](), list[Thread]()
    more = before + 1

    def growing_meanwhile(compute: Callable[[], Outputs]) -> Any:
        if not growing:
            growing.append(Thread(target=draft.reserve, args=(more,)))
            growing[0].start()
            growing[0].join(0.5)
            sizes.append(draft.cache.capacity)
        return capture(compute)

    plan = prepare_for(twins.fast, policy)
    (phase,) = plan.phases.values()
    twins.recorder.capture = growing_meanwhile  # type: ignore[method-assign]
    prepare_for(twins.fast, policy)
    growing[0].join()
    assert sizes == [before]
    assert draft.cache.capacity >= more
    phase.captured.clear()
    captured = twins.recorder.captured
    phase.capture(draft.graphs.record)
    assert twins.recorder.captured == captured
    twins.agree(policy, GREEDY)
    assert twins.missed() == {}


def test_a_heads_tables_are_as_long_as_its_cache_when_a_capture_may_begin(twins: Twins) -> None:
    head = twins.fast.heads["eagle3"]
    captures = head.graphs
    assert captures is not None

    class ReadsTheLast:
        """In place of the lock: reads the cache's last position as soon as it is let go."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            hidden = torch.zeros(1, head.feature_size, dtype=head.dtype)
            head.chain(torch.tensor([5]), more - 1, logits=1, hidden=hidden)

    more = head.cache.capacity + 1
    captures.lock = ReadsTheLast()  # type: ignore[assignment]
    try:
        head.reserve(more)
    finally:
        del captures.lock
    assert head.cache.capacity >= more


def test_execution_captures_before_the_clock_runs(tmp_path: Path) -> None:
    fresh = Twins(make_pair(tmp_path))
    items = tuple(Request(str(i), "c", PROMPT * (1 + 4 * i)) for i in range(3))
    encoded = encode(fresh.fast, Workload("w", items), DecodeOptions(max_new_tokens=8))
    policy = parse_policy(top_k("near", 3, 3, 8))
    times: list[int] = []

    def clock() -> float:
        times.append(fresh.recorder.captured)
        return float(len(times))

    executor = Executor(fresh.fast, [policy], encoded, clock=clock)
    assert all(executor(policy.id, n) > 0 for n in range(3))
    assert times[0] == times[-1] > 0
    assert fresh.missed() == {}


def test_prefills_are_profiled_without_captures(twins: Twins) -> None:
    """Of every draft: nothing is captured once anything is timed."""
    pair, captured = twins.fast, list[int]()

    def clock() -> float:
        captured.append(twins.recorder.captured)
        return float(len(captured))

    experiment, before = Experiment(pair, [8, 24], [], clock), twins.recorder.captured
    experiment.sweep({})
    assert {prefill.draft for prefill in experiment.prefills} == {"", *pair.models}
    assert captured[0] == captured[-1] > before


def test_any_temperature_replays_one_capture(twins: Twins) -> None:
    """Five in rotation, which policies prepared aside share, too."""
    pair, captured = twins.fast, set[int]()
    plan = prepare_for(pair, parse_policy(top_k("eagle3", 3, 2, 6)))
    for temperature in (0.3, 0.6, 0.9, 1.0, 1.2, 0.3):
        sampling = Sampling(temperature=temperature, seed=4)
        assert next(going(pair, StaticSource(plan), sampling)).step.drafted == 6
        captured.add(twins.recorder.captured)
    assert len(captured) == 1
    pair.target.graphs.requests = pair.target.graphs.requests[:1]  # type: ignore[union-attr]
    prepare_for(pair, parse_policy(top_k("eagle3", 3, 2, 5)))
    assert twins.recorder.captured == captured.pop() + 1
    hot = Sampling(temperature=1.3, seed=4)
    plain, fast = (
        seen(islice(going(pair, StaticSource(plan), hot), 3)) for pair in (twins.plain, pair)
    )
    assert plain == fast


def test_a_pass_that_cannot_be_captured_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = Twins(make_pair(tmp_path))
    near = fresh.fast.drafts["near"]
    near.model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: bool(torch.ones(1).sum() > 0) and None
    )  # waits for the device
    for document in (chain("near", 3), top_k("near", 3, 3, 8)):
        fresh.agree(parse_policy(document), HOT)
    assert not near.graphs.shapes
    assert near.graphs.problem == "operation not permitted when stream is capturing"
    assert caplog.messages == [f"near: passes run without CUDA graphs: {near.graphs.problem}"]
    assert fresh.fast.target.graphs.replayed


def test_only_cuda_has_graphs_and_may_go_without(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not graphs_enabled(torch.device("cpu"))
    assert graphs_enabled(torch.device("cuda"))
    monkeypatch.setenv(graphs.SWITCH, "0")
    assert not graphs_enabled(torch.device("cuda"))
    plain = twins.plain
    assert all(m.graphs is None for m in (plain.target, *plain.models.values()))
    prepare_graphs(plain, prepare(Policy(), plain.draft_names), sampling=GREEDY)
    assert plain.target.graphs is None


def at_once(
    pair: LoadedPair, plan: Plan, requests: list[DecodeRequest], seats: int = 8
) -> list[list[Any]]:
    """What the rounds of requests say that run at once."""
    decoder = Decoder(pair, StaticSource(plan), seats=seats, slots=SLOTS)
    rounds = {request.id: list[Round]() for request in requests}
    for step in decoder.steps(Waiting(requests)):
        poisoned(pair)
        for one in step:
            rounds[one.request.id].append(one)
    return [seen(some) for some in rounds.values()]


SLOTS = 5 * (EXPANDED_LIMIT + 80)
"""So that five of six run at once, and the last in the room of one that has ended."""
WARM = Sampling(temperature=0.6, top_k=12, seed=3)
TOGETHER: list[tuple[dict[str, Any], list[Sampling]]] = [
    ({"draft": "none"}, [GREEDY, HOT]),
    (chain("ngram", 3), [GREEDY]),
    (chain("near", 4), [GREEDY, HOT, WARM]),
    (chain("near", 3), [GREEDY]),
    (top_k("near", 4, 3, 9), [HOT, GREEDY]),
    (top_k("near", 4, 4, 12, **BINS), [GREEDY]),
    (chain("eagle3", 3), [GREEDY, WARM]),
    (top_k("eagle3", 4, 4, 12), [HOT, GREEDY, WARM]),
    (top_k("eagle1", 5, 3, 9), [HOT]),
]


def several(pair: LoadedPair, samplings: list[Sampling], plan: Plan) -> list[DecodeRequest]:
    """Six requests, of prompts and budgets of several lengths."""
    decoder, texts = Decoder(pair, StaticSource(plan)), [PROMPT * n for n in (1, 2)]
    return [
        decoder.request(
            Request(str(n), ""),
            pair.encode(texts[n % 2])[: 5 + 4 * n],
            samplings[n % len(samplings)],
            TOKENS - n,
        )
        for n in range(6)
    ]


@pytest.mark.parametrize("case", range(len(TOGETHER)))
def test_requests_at_once_replay_passes_of_all(twins: Twins, case: int) -> None:
    """Their rounds are those of one at a time without graphs; every pass of the target, and of a
    draft over texts or a chain's step, is replayed."""
    document, samplings = TOGETHER[case]
    twins.forget()
    policy, alone = parse_policy(document), []
    find = artifacts(policy.draft) if "stratify" in document else None
    plan = prepare_for(twins.plain, policy, artifacts=find)
    requests = several(twins.plain, samplings, plan)
    for request in requests:
        decoder = Decoder(twins.plain, StaticSource(plan))
        alone.append(seen(decode_rounds(decoder.backend, request, StaticSource(plan))))
    plan = prepare(policy, twins.fast.draft_names, artifacts=find)
    assert at_once(twins.fast, plan, requests[:2], seats=2) == alone[:2]
    assert at_once(twins.fast, plan, requests) == alone, "by passes with room for more requests"
    graphs = twins.fast.target.graphs
    assert graphs is not None
    assert any(shape.together for shape in graphs.shapes)
    assert twins.missed() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", [4, 7, 8])
def test_trees_of_requests_at_once_are_grown_by_programs(
    twins: Twins, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many programs as there are requests, rounded up; the rounds are those of one at a time.
    Uncaptured, since the interpreter's launches are no operations of torch's."""
    document, samplings = TOGETHER[case]
    monkeypatch.setattr(twins.recorder, "capture", lambda compute: 1 / 0)
    grown, choose = set[int](), TreeProgram.choose
    monkeypatch.setattr(
        TreeProgram, "choose", lambda own, last: grown.add(own.trees) or choose(own, last)
    )
    twins.forget()
    policy, alone = parse_policy(document), []
    plan = prepare_for(twins.plain, policy)
    requests = several(twins.plain, samplings, plan)
    for request in requests:
        decoder = Decoder(twins.plain, StaticSource(plan))
        alone.append(seen(decode_rounds(decoder.backend, request, StaticSource(plan))))
    plan = prepare(policy, twins.fast.draft_names)
    assert at_once(twins.fast, plan, requests) == alone
    assert max(grown) >= 2
    twins.forget()


@pytest.mark.skipif(sys.platform != "linux", reason="triton is published for Linux only")
@pytest.mark.usefixtures("interpreted")
def test_texts_of_requests_at_once_by_kernels_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: attention, trees and noise by Triton's kernels in passes of all requests."""
    monkeypatch.setattr(graphs, "LONG_LAG", 4)  # fewer rehearsals
    monkeypatch.setenv("SPECTUNE_KERNELS", "0")  # for the texts that are expected
    head = _eagle3_without_lm_head()
    head.config |= {"eagle_aux_hidden_state_layer_ids": [0, 2, DEEP]}
    file = pair_with_heads(tmp_path, DEEP + 1, eagle3=head)
    twins = Twins(file, "float32")
    use_graphs(twins.models, Repeating())
    policy = parse_policy(top_k("eagle3", 2, 2, 3))
    plan = prepare(policy, twins.plain.draft_names)
    requests = [
        replace(request, max_new_tokens=4) for request in several(twins.plain, [HOT], plan)[:2]
    ]
    decoder = Decoder(twins.plain, StaticSource(plan))
    texts = [[t for r in decoder.rounds(one) for t in r.tokens] for one in requests]
    monkeypatch.delenv("SPECTUNE_KERNELS")
    rounds = at_once(twins.fast, prepare(policy, twins.fast.draft_names), requests, seats=2)
    assert [[t for r in some for t in r[2]] for some in rounds] == texts
    assert twins.missed() == {}
