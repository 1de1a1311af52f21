"""Vocabulary shortlists change no text; what is drafted is what their definition says, worked out
apart: sets, router, laws and stops."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import chain, perturbed, tiny_model, tokenizer
from recorded_texts import alternating, asked
from test_heads import HIDDEN, VOCAB, _eagle1, _eagle3, head_after
from test_verifiers import PLAIN, logits_after, p_value_of_two, tiny_pair
from transformers import AutoModelForCausalLM

from spectune.runtime.decoder import Decoder, prepare_for
from spectune.runtime.drafts.eagle import columns
from spectune.runtime.loading import LoadedPair, load_pair
from spectune.runtime.loop import DecodeRequest, Round, StaticSource
from spectune.runtime.pair import read_pair
from spectune.runtime.policies.artifacts import Artifacts, FittedArtifact
from spectune.runtime.policies.document import parse_policy
from spectune.runtime.policies.dynaspec import Clusters, Routing
from spectune.runtime.policies.fr_spec import Frequencies
from spectune.runtime.policies.plan import Plan
from spectune.runtime.sampling import Noise
from spectune.runtime.shortlists import Support
from spectune.traces.errors import PolicyError
from spectune.traces.schema import Request, Sampling, Step

PROMPTS = ["def add(a, b):", "The quick brown"]
TOKENS, SHORT = 10, 12
COLD, WARM, HOT = SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.0, seed=4),
]
M = 9
"""Clusters; the last one is empty."""
FREQUENT = {"kind": "frequency", "size": 60, "artifact": "order"}
BY_POSITION = {"kind": "position_frequency", "k_max": 120, "artifact": "order"}
CHAIN = {"window": {"kind": "fixed", "gamma": 4}}
TREE = {**CHAIN, "growth": {"kind": "top_k", "width": 4}, "select": {"top_n": 64}}
PATHS = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 2], [1, 0, 0]]
STATIC = {"growth": {"kind": "static", "paths": PATHS}}


def by_router(draft: str, k0: int = 3, k1: int = 2, k_min: int = 1) -> dict[str, Any]:
    return {"kind": "clusters", "k0": k0, "k1": k1, "k_min": k_min, "artifact": f"router-{draft}"}


def shortlists_of(draft: str) -> list[dict[str, Any]]:
    return [FREQUENT, BY_POSITION, by_router(draft)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LoadedPair:
    return make_shortlisted_pair(tmp_path_factory.mktemp("shortlists"))


def make_shortlisted_pair(folder: Path) -> LoadedPair:
    """A target, a language model ``near`` that often agrees with it, and two heads: one with a
    vocabulary of its own. In float64 rounding changes no choice."""
    words = tokenizer(VOCAB)
    target = tiny_model("llama", len(words), hidden=HIDDEN, layers=2)
    for name, model in (("target", target), ("near", perturbed(target, 0.05, 1))):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    for name, case in (("head", _eagle1()), ("own", _eagle3())):
        case.config |= {"vocab_size": len(words), "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        case.write(folder / name)
    drafts = {name: name for name in ("near", "head", "own")}
    (folder / "pair.json").write_text(
        json.dumps({"name": "shortlists", "target": "target", "drafts": drafts})
    )
    return load_pair(read_pair(str(folder / "pair.json")), device="cpu", dtype="float64")


def order(vocab: int) -> list[int]:
    """Token 0 (EOS) first, then by frequency, ties by id."""
    seen = np.random.default_rng(5).geometric(0.05, vocab)
    return [0, *sorted(range(1, vocab), key=lambda t: (-seen[t], t))]


def routing(pair: LoadedPair, draft: str, seed: int = 0) -> Routing:
    """A planted router of some strength over random clusters, of which the last is empty."""
    model = pair.models[draft]
    wide = int(model.embedded(torch.zeros(1, dtype=torch.int64)).shape[1])
    rng = torch.Generator().manual_seed(seed)
    w1 = torch.randn(16, wide + model.hidden_size, generator=rng)
    w1[:, :wide] *= 8 / float(model.embedded(torch.arange(50)).std())
    rest = (torch.randn(*shape, generator=rng) for shape in ((16,), (M, 16), (M,)))
    weights = tuple(w.numpy() for w in (w1 / 8, *rest))
    of = torch.randint(M - 1, (model.output.rows,), generator=rng).numpy()
    return Routing(weights, Clusters(of, M), model.output.hash)


def artifacts(pair: LoadedPair) -> Artifacts:
    vocab = pair.target.vocab_size
    frequencies = Frequencies(np.array(order(vocab)), always=1)
    found = {
        "order": FittedArtifact("frequencies", *frequencies.to_document()),
        "bins": FittedArtifact(
            "bins", {"thresholds": [480, 1120, 1600, 2240, 3200], "depth": 3}, {}
        ),
    }
    for draft in pair.models:
        document, arrays = routing(pair, draft).to_document()
        found[f"router-{draft}"] = FittedArtifact("router", {**document, "draft": draft}, arrays)
    return lambda name: found[name]


def ready(pair: LoadedPair, draft: str = "none", **blocks: Any) -> Plan:
    policy = parse_policy({"draft": draft, **blocks})
    return prepare_for(pair, policy, artifacts=artifacts(pair))


def requests(decoder: Decoder, sampling: Sampling, tokens: int = TOKENS) -> list[DecodeRequest]:
    return [asked(decoder, prompt, sampling, tokens, str(i)) for i, prompt in enumerate(PROMPTS)]


def texts(
    pair: LoadedPair, prepared: Plan, sampling: Sampling, tokens: int = TOKENS
) -> tuple[list[list[int]], list[Step]]:
    """Output ids of all prompts, and all steps."""
    decoder = Decoder(pair, StaticSource(prepared))
    done = [decoder.decode(r) for r in requests(decoder, sampling, tokens)]
    return [d.trajectory.output_ids.tolist() for d in done], [s for d in done for s in d.steps]


def check_texts(pair: LoadedPair, sampling: Sampling, policies: list[dict[str, Any]]) -> int:
    """Each policy writes what the target alone writes; how many drafted tokens were accepted."""
    plain, accepted = texts(pair, ready(pair), sampling)[0], 0
    for blocks in policies:
        found, steps = texts(pair, ready(pair, **blocks), sampling)
        assert found == plain, blocks
        accepted += sum(s.accepted for s in steps)
    return accepted


# ------------------------------------------------------------------------------ texts do not change


@pytest.mark.parametrize("draft", ["near", "head", "own"])
@pytest.mark.parametrize("sampling", SAMPLINGS[::2], ids=lambda s: f"T{s.temperature}")
def test_text_is_autoregressions(pair: LoadedPair, sampling: Sampling, draft: str) -> None:
    """Every kind, chains and trees, with stops, bins and adaptive windows: token ids are those of
    the target alone."""
    base: list[dict[str, Any]] = [
        {"draft": draft, "shortlist": shortlist, **more}
        for shortlist in shortlists_of(draft)
        for more in (CHAIN, TREE)
    ]
    accepted = check_texts(pair, sampling, base)
    assert accepted > 10 or draft != "near"  # heads at random; the demo pair's agrees
    routed = {"draft": draft, "shortlist": by_router(draft)}
    falling = {"draft": draft, "shortlist": BY_POSITION | {"k_max": 8}}
    adaptive = {"window": {"kind": "fsm", "gamma_max": 6}}
    mixed: list[dict[str, Any]] = [
        routed | adaptive | {"stop": {"kind": "max_prob", "threshold": 0.3}},
        routed | STATIC,
        routed | TREE | {"select": {"top_n": 9}, "stratify": {"artifact": "bins", "alpha": 2}},
        falling | TREE | {"stop": {"kind": "entropy", "threshold": 0.2}},
    ]
    if sampling is HOT:
        check_texts(pair, sampling, mixed)


@pytest.mark.parametrize("sampling", [COLD, HOT], ids=lambda s: f"T{s.temperature}")
def test_policies_are_swapped_in_the_middle_of_a_text(pair: LoadedPair, sampling: Sampling) -> None:
    """Another policy every round: whole head and shortlists, with and without a router, another
    draft, none."""
    documents: list[dict[str, Any]] = [
        {"draft": "near", **CHAIN},
        {"draft": "near", "shortlist": by_router("near"), **CHAIN},
        {"draft": "near", "shortlist": FREQUENT, **TREE},
        {"draft": "head", "shortlist": by_router("head"), **TREE},
        {"draft": "none"},
        {"draft": "head", **CHAIN},
        {"draft": "near", "shortlist": by_router("near"), **TREE},
        {"draft": "own", "shortlist": by_router("own"), **CHAIN},
    ]
    plain, used = Decoder(pair, StaticSource(ready(pair))), set()
    decoder = Decoder(pair, alternating([ready(pair, **d) for d in documents]))
    for request in requests(plain, sampling, 40):
        done, alone = decoder.decode(request), plain.decode(request)
        assert done.trajectory.output_ids.tolist() == alone.trajectory.output_ids.tolist()
        used |= {s.policy for s in done.steps}
    assert used == {parse_policy(d).id for d in documents}


# -------------------------------------------------- what is drafted, worked out from the definition


class Reference:
    """Shortlists and laws of one draft from their definitions: float64, whole prefixes, sets of
    token ids."""

    def __init__(self, pair: LoadedPair, draft: str) -> None:
        self.pair, self.draft = pair, draft
        self.vocab = pair.target.vocab_size
        if draft in pair.drafts:
            path = dict(pair.spec.drafts)[draft]
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        else:  # one of its own: the pair's is in the middle of a text
            self.apart = load_pair(pair.spec, device="cpu", dtype="float64")
        plan = routing(pair, draft)
        self.weights = [w.astype(np.float64) for w in plan.weights]
        self.cluster_of = plan.clusters.of.tolist()
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}

    def state(self, text: list[int], path: list[int]) -> np.ndarray:
        """What the output matrix reads after a text and a drafted path; each is asked for several
        times."""
        key = tuple(text), tuple(path)
        if key not in self.known:
            self.known[key] = np.asarray(self._state(text, path).double().numpy())
        return self.known[key]

    def _state(self, text: list[int], path: list[int]) -> torch.Tensor:
        if self.draft in self.pair.drafts:
            with torch.no_grad():
                return self.model.model(torch.tensor([text + path])).last_hidden_state[0, -1]
        head, target = self.apart.heads[self.draft], self.apart.target
        target.reserve(len(text))
        target.read(torch.tensor(text[:-1]), 0)
        features = target.tapped[:, columns(target, head)]
        out = head_after(head, text, features, path)[1][0]
        norm = head.net.norm
        if self.draft == "own":
            out = out / (out.pow(2).mean() + norm.eps).sqrt() * norm.weight
        return out

    def logits(self, text: list[int], path: list[int]) -> dict[int, float]:
        """Of every token that the draft has."""
        head = self.pair.models[self.draft].output
        values = head.weight.double().numpy() @ self.state(text, path)
        return dict(zip(head.ids.tolist(), values.tolist(), strict=True))

    def clusters(self, text: list[int], path: list[int], count: int) -> set[int]:
        """The router's, for the last token: its embedding and the state before it."""
        whole = text + path
        w1, b1, w2, b2 = self.weights
        model = self.pair.models[self.draft]
        embedding = model.embedded(torch.tensor(whole[-1:]))[0].double().numpy()
        width = w1.shape[1] - len(embedding)
        first = 1 if self.draft in self.pair.drafts else 2
        if path:
            before = self.state(text, path[:-1])
        elif len(text) > first:
            before = self.state(text[:-1], [])
        else:
            before = np.zeros(width)
        scores = w2 @ np.maximum(w1 @ np.concatenate([embedding, before]) + b1, 0) + b2
        best = sorted((m for m in range(M) if m in self.cluster_of), key=lambda m: -scores[m])
        return set(best[:count])

    def tokens(
        self, shortlist: dict[str, Any], step: int, text: list[int], beam: list[list[int]]
    ) -> set[int]:
        """S_t for the paths of a beam."""
        head = self.pair.models[self.draft].output.ids.tolist()
        if shortlist["kind"] == "clusters":
            first = shortlist["k0"], shortlist["k1"]
            k = first[step] if step < 2 else (first[1] + step) // (2 * step)
            of_paths = (self.clusters(text, path, max(k, shortlist["k_min"])) for path in beam)
            kept = set().union(*of_paths)
            return {head[row] for row, m in enumerate(self.cluster_of) if m in kept}
        size = shortlist.get("size") or shortlist["k_max"] // (1 if step < 2 else step + 1)
        known = set(head)
        return set([t for t in order(self.vocab) if t in known][:size])

    def law(
        self, text: list[int], path: list[int], tokens: set[int], sampling: Sampling
    ) -> dict[int, float]:
        """log q_S."""
        temperature = 1.0 if sampling.greedy else sampling.temperature
        scaled = {t: v / temperature for t, v in self.logits(text, path).items() if t in tokens}
        total = math.log(sum(math.exp(v) for v in scaled.values()))
        return {t: v - total for t, v in scaled.items()}

    def best(self, law: dict[int, float], noise: Noise | None, position: int) -> list[int]:
        """The tokens by log q_S + g, best first."""
        row = np.zeros(self.vocab) if noise is None else noise.row(position).double().numpy()
        return sorted(law, key=lambda t: -(law[t] + row[t]))


def watched(prepared: Plan) -> list[Support]:
    """Becomes, as the plan decodes, the shortlists of its current round, step by step."""
    chosen: list[Support] = []
    select = prepared.shortlists.select

    def noted(step: int, *about: Any) -> Support:
        if step == 0:
            chosen.clear()
        chosen.append(select(step, *about))
        return chosen[-1]

    prepared.shortlists.select = noted
    return chosen


def followed(
    pair: LoadedPair, prepared: Plan, sampling: Sampling, tokens: int = SHORT
) -> Iterator[tuple[list[int], Round, Noise | None, list[set[int]]]]:
    """Every round of all prompts: the text before it, the round, the request's noise, and the
    shortlists it used."""
    decoder, chosen = Decoder(pair, StaticSource(prepared)), watched(prepared)
    for request in requests(decoder, sampling, tokens):
        text = list(request.prompt_ids)
        noise = Noise(request.seed, pair.target.vocab_size, torch.device("cpu"))
        for item in decoder.rounds(request):
            used = None if sampling.greedy else noise
            yield list(text), item, used, [set(s.ids.tolist()) for s in chosen]
            text += item.tokens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"T{s.temperature}")
def test_chains_propose_from_the_shortlist_and_stop_by_its_law(
    pair: LoadedPair, sampling: Sampling
) -> None:
    """Each proposal is the argmax of log q_S + g over S_t; a stop ends the chain by q_S, which here
    is not where q would end it."""
    reference = Reference(pair, "near")
    differs = proposals = 0
    kinds = [("max_prob", 0.3), ("joint_prob", 0.2), ("entropy", 0.3)]
    for at, shortlist in enumerate(shortlists_of("near")):
        # Every kind of shortlist with every kind of stop, one at each temperature.
        stop, threshold = kinds[(at + SAMPLINGS.index(sampling)) % 3]
        stopping = {"kind": stop, "threshold": threshold}
        prepared = ready(pair, "near", shortlist=shortlist, **CHAIN, stop=stopping)
        for text, item, noise, chosen in followed(pair, prepared, sampling):
            joint = whole_joint = 0
            ended = whole_ended = False
            for j, token in enumerate(item.drafted):
                assert not ended, (text, item)
                path = item.drafted[:j]
                support = reference.tokens(shortlist, j, text, [path])
                assert chosen[j] == support
                law = reference.law(text, path, support, sampling)
                assert token == reference.best(law, noise, len(text) + j)[0]
                whole = reference.law(text, path, set(range(reference.vocab)), sampling)
                joint += nat_code(law[token])
                whole_joint += nat_code(whole[token])
                ended = stops(stop, threshold, law, token, joint)
                whole_ended = stops(stop, threshold, whole, token, whole_joint)
                differs += ended != whole_ended
                proposals += 1
            assert ended or len(item.drafted) == min(4, SHORT - item.step.start - 1)
            assert len(chosen) == item.step.draft_steps or not item.drafted
    assert proposals > 30
    assert differs > 0


def stops(kind: str, threshold: float, law: dict[int, float], token: int, joint: int) -> bool:
    """The stop in whole 1/256 nat (docs/policies.md); ``joint`` sums the chain's."""
    if kind == "entropy":
        entropy = -sum(math.exp(v) * v for v in law.values())
        return math.floor(256 * entropy) > math.floor(256 * (1 - threshold) ** 2 / 0.2)
    return (nat_code(law[token]) if kind == "max_prob" else joint) > math.floor(
        -256 * math.log(threshold)
    )


def nat_code(log_q: float) -> int:
    return math.floor(-256 * log_q)


@pytest.mark.parametrize(
    ("draft", "sampling"), [("near", WARM), ("near", COLD), ("head", COLD), ("own", HOT)]
)
def test_a_pass_evaluates_the_union_and_each_node_proposes_from_its_own(
    pair: LoadedPair, draft: str, sampling: Sampling
) -> None:
    """S_t is the union over the level's expanded nodes; every node's children are its best by log
    q_S + g over its own shortlist."""
    reference = Reference(pair, draft)
    unions = children = 0
    for shortlist in shortlists_of(draft):
        for more in (TREE, STATIC):
            prepared = ready(pair, draft, shortlist=shortlist, **more)
            for text, item, noise, chosen in followed(pair, prepared, sampling, 4):
                tree = item.tree
                if tree is None or not tree.steps:
                    continue
                paths: list[list[int]] = []
                for token, parent in zip(tree.tokens, tree.parents, strict=True):
                    paths.append([*(paths[parent] if parent >= 0 else []), token])
                read = zip(paths, tree.expanded, strict=True)
                expanded = [path for path, place in read if place >= 0]
                assert len(chosen) == tree.steps
                for step in range(tree.steps):
                    beam = [path for path in [[], *expanded] if len(path) == step]
                    support = reference.tokens(shortlist, step, text, beam)
                    assert chosen[step] == support
                    alone = [len(reference.tokens(shortlist, step, text, [b])) for b in beam]
                    unions += len(support) > max(alone, default=0)
                    for path in beam:
                        own = reference.tokens(shortlist, step, text, [path])
                        law = reference.law(text, path, own, sampling)
                        best = reference.best(law, noise, len(text) + step)[:4]
                        mine = [p[-1] for p in paths if p[:-1] == path and len(p) == step + 1]
                        ranks: Sequence[int] = range(4)
                        if more is STATIC:
                            ranks = [p[-1] for p in PATHS if p[:-1] == ranks_of(paths, path)]
                        assert mine == [best[r] for r in ranks if r < len(best)]
                        children += len(mine)
    assert children > 100
    assert unions > 0


def ranks_of(paths: list[list[int]], path: list[int]) -> list[int]:
    """Which child of which a node of the static tree is, from the creation order of what was
    drafted."""
    known: dict[tuple[int, ...], list[int]] = {(): []}
    created = [p for depth in range(4) for p in PATHS if len(p) == depth]
    for ranks, tokens in zip(created, paths, strict=False):
        known[tuple(tokens)] = ranks
    return known[tuple(path)]


# --------------------------------------------------------------------------- the rejection verifier


def rejection_p_value(shortlist: dict[str, Any]) -> tuple[float, float]:
    """Chi-square of two decoded tokens against their exact law, drafted under a shortlist; the
    target's mass of the first shortlist."""
    pair = tiny_pair()
    first = logits_after(pair.target, [1, 2]).double().softmax(-1)
    least = first.argsort().tolist()  # the least likely first
    w2, b2 = np.array([[1, 0], [0, -1], [0.5, 0.5]], "f4"), np.array([0, 0.1, 0.2], "f4")
    routed = Routing(
        (np.ones((2, 32), "f4"), np.zeros(2, "f4"), w2, b2),
        Clusters(np.array([0, 1, 2, 2, 1]), 3),
        pair.drafts["draft"].output.hash,
    )
    found = {
        "order": FittedArtifact("frequencies", *Frequencies(np.array(least)).to_document()),
        "router": FittedArtifact("router", *routed.to_document()),
    }
    policy = parse_policy(chain("draft", 2, shortlist=shortlist))
    prepared = prepare_for(pair, policy, artifacts=found.__getitem__)
    decoder, chosen = Decoder(pair, StaticSource(prepared), "rejection"), watched(prepared)
    drawn, mass = [], []
    for seed in range(400):
        request = DecodeRequest("r", [1, 2], PLAIN, seed, 2, verifier="rejection")
        drawn.append([t for r in decoder.rounds(request) for t in r.tokens])
        mass.append(float(first[chosen[0].ids].sum()))
    return p_value_of_two(pair, drawn), float(np.mean(mass))


SMALL = [
    FREQUENT | {"size": 2},
    {"kind": "clusters", "k0": 1, "k1": 1, "k_min": 1, "artifact": "router"},
]


@pytest.mark.parametrize("shortlist", SMALL, ids=lambda s: s["kind"])
def test_rejection_is_lossless_in_law(shortlist: dict[str, Any]) -> None:
    """A shortlist that leaves out much of the target's mass: the law of the text is the target's (a
    false alarm has odds of 1 in 1000)."""
    p_value, mass = rejection_p_value(shortlist)
    assert mass < 0.6
    assert p_value > 1e-3


# -------------------------------------------------------------------------------------------- edges


def test_one_token_and_the_first_tokens_of_a_text(pair: LoadedPair) -> None:
    """Shortlists of one token, prompts of one and two tokens (nothing precedes), and a router whose
    clusters are all but empty."""
    plain = Decoder(pair, StaticSource(ready(pair)))
    stopping = CHAIN | {"stop": {"kind": "joint_prob", "threshold": 0.1}}
    for draft in ("near", "head", "own"):
        one = FREQUENT | {"size": 1}, BY_POSITION | {"k_max": 2}, by_router(draft, 1, 1, 1)
        for shortlist, more in itertools.product(one, (stopping, TREE)):
            decoder = Decoder(pair, StaticSource(ready(pair, draft, shortlist=shortlist, **more)))
            for prompt in ([70], [70, 71]):
                request = decoder.request(Request("e", "c", ""), prompt, HOT, 6)
                got, wanted = decoder.decode(request), plain.decode(request)
                assert got.trajectory.output_ids.tolist() == wanted.trajectory.output_ids.tolist()


# ---------------------------------------------------------------------------------- what is refused


def test_artifacts_that_do_not_fit_are_refused_in_one_line(pair: LoadedPair) -> None:
    """Another head or vocabulary: told when the policy is made ready. Those of another kind or
    draft, or without content: test_policies."""
    near, vocab = routing(pair, "near"), pair.target.vocab_size

    def say(found: FittedArtifact) -> str:
        shortlist = by_router("near") if found.kind == "router" else FREQUENT
        policy = parse_policy({"draft": "near", "shortlist": shortlist, **CHAIN})
        with pytest.raises(PolicyError) as error:
            prepare_for(pair, policy, artifacts=lambda _: found)
        return str(error.value)

    said = say(FittedArtifact("router", *replace(near, head="0" * 16).to_document()))
    assert "was fitted on another output head" in said
    assert "`fit router --recording ID --draft near`" in said
    short = FittedArtifact("frequencies", *Frequencies(np.arange(vocab - 1)).to_document())
    assert f"orders a vocabulary of {vocab - 1} tokens" in say(short)
