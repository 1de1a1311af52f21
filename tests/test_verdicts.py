"""README and docs/results.md say no more than bench/results shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import lab, load_page, report, verdicts
from bench.measured_page import without_changes
from bench.papers import claims, pages

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("interval", "target", "verdict"),
    [
        ((0.98, 1.10), 0.98, "met"),
        ((0.979, 1.10), 0.98, "not shown"),
        ((0.930, 0.993), 1.0, "**not met**"),  # the joint winner of the four papers
        ((None, 1.5), 1.0, "not shown"),
        ((0.5, None), 1.0, "not shown"),
    ],
)
def test_only_the_unfavourable_end_of_an_interval_meets_a_target(
    interval: tuple[float | None, float | None], target: float, verdict: str
) -> None:
    assert verdicts.at_least(interval, target) == verdict
    mirrored = [None if end is None else -end for end in reversed(interval)]
    assert verdicts.at_most(mirrored, -target) == verdict


@pytest.mark.parametrize(
    ("ours", "bar", "verdict"),
    [
        ([1.043, 1.034, 1.056], {"least": 1.033}, "met"),
        ([1.043, 1.030, 1.056], {"least": 1.033}, "agrees"),
        ([1.020, 0.999, 1.056], {"least": 1.033}, "not shown"),
        ([1.020, 1.010, 1.030], {"least": 1.033}, "**not met**"),
        ([0.95, 0.90, 0.99], {"most": 0.923}, "agrees"),
        ([0.96, 0.95, 0.99], {"least": 0.984, "null": 0.936}, "agrees"),
        ([0.95, 0.92, 0.99], {"least": 0.984, "null": 0.936}, "not shown"),
        ([1.0, 1.0, 1.0], {"least": 1.0}, "certain"),
        ([0.90, 0.88, 0.92], {"most": 0.923}, "met"),
        ([0.97, 0.95, 0.98], {"most": 0.923}, "**not met**"),
        ([0.81, None, None], {"most": 0.8}, "not shown"),
        ([0.81, 0.80, 0.82], {}, "not comparable"),
    ],
)
def test_a_papers_figure_is_met_by_the_unfavourable_end_of_ours_or_agrees_with_it(
    ours: list[float | None], bar: dict[str, float], verdict: str
) -> None:
    assert claims.Claim("", "", **bar).verdict(ours) == verdict


@pytest.mark.parametrize(("replayed", "verdict"), [(1.19, "**not met**"), (1.2, "met")])
def test_what_is_executed_is_held_against_replay(replayed: float, verdict: str) -> None:
    """Replay is met where it lies inside the executed interval."""
    row = {"claim": "executed", "ours": [1.26, 1.193, 1.339], "replayed": replayed}
    assert claims.verdict(row) == verdict


def test_every_figure_of_a_paper_says_where_it_is_from() -> None:
    figures = report.load("papers")
    made = figures.pop("made")
    assert made.keys() == figures.keys()
    for name, part in figures.items():
        assert made[name]["measured"]
        assert made[name]["code"]
        assert part["samples"]
        assert name in part["command"].split()
        for r in part["rows"]:
            assert claims.CLAIMS[r["claim"]].figure
            assert r["cell"]
            assert r["why"] or claims.verdict(r) in ("met", "not comparable", "certain"), r
            value, low, high = r["ours"]
            assert low is None or high is None or low <= value <= high, r
            assert part["costs"] or not r["cell"].endswith((", h200", ", 70b")), r


def test_heterospecs_gain_stands_beside_how_much_of_its_tree_is_accepted() -> None:
    rows = [r for r in pages.by_saturation(report.load("papers")) if "depth 8" in r or "| med" in r]
    accepted = [float(row.split(" | ")[1].split()[0]) for row in rows]
    assert accepted == sorted(accepted, reverse=True)
    assert len({row.split(",")[0] for row in rows}) == 3


def test_what_no_paper_measures_has_no_verdict() -> None:
    """C2T and DynaSpec are greedy in their papers."""
    figures = report.load("papers")
    for name in ("c2t_sampled", "dynaspec_sampled"):
        told = {claims.verdict(row) for row in figures[name]["rows"]}
        assert told == {"not comparable"}


def test_a_group_of_requests_is_dealt_whole_and_categories_are_halved() -> None:
    """Modules share their names with docstrings, which are prose."""
    categories = ["code", "prose", "math"] * 10
    groups = [f"module {i // 6}" for i in range(24)] + [f"template {i % 3}" for i in range(6)]
    parts = lab.deal_groups(categories, groups)
    assert {len({p for p, g in zip(parts, groups, strict=True) if g == x}) for x in groups} == {1}
    for category in set(categories):
        of = [p for p, c in zip(parts, categories, strict=True) if c == category]
        assert abs(of.count("f") - of.count("c")) <= 2


def test_above_temperature_0_no_tree_of_our_score_is_called_the_papers() -> None:
    cells = [c for c in report.load("map")["cells"] if c["temperature"] > 0]
    of = {
        name: {c["best"] for c in cells if c["verdict"] == name} for name in ("own score", "tree")
    }
    assert of["own score"]
    assert all("coupled" in best for best in of["own score"])
    # static trees, and EAGLE-2's by the draft's own probabilities
    assert not any("coupled" in best for best in of["tree"])


def test_an_error_is_within_its_bar_only_where_its_interval_is() -> None:
    """A median of 2% over four policies of 1 to 20% is no proof of 3%."""
    few, many = [0.01, 0.02, 0.02, 0.2], [0.01, 0.02, 0.02] * 40
    low, high = verdicts.quantile_interval(many, 0.5)
    assert low == high == pytest.approx(0.02)
    assert report.within(many, [0.0], (0.03, 0.06)) == "met"
    assert report.within(few, [0.0], (0.03, 0.06)) == "not shown"
    assert report.within([0.1] * 9, [0.0], (0.03, 0.06)) == "**not met**"


FIGURE = re.compile(
    r"""(?<![\w.-])(?:
        \d[\d,]*(?:\.\d+)?\s?% (?!\sinterval)  # the level of an interval only names it
        | \d[\d,]*(?:\.\d+)?\s?(?:times|s|ms|seconds|minutes|hours|tokens/s|GB|MiB|points)\b
        | \d[\d,]*(?:\.\d+)?[x×](?!\w)
        | \d[\d.]*\sto\s\d[\d.]*
        | \d+\.\d+(?!\.?\w))""",
    re.VERBOSE,
)
"""What is a figure in prose: a percentage, a number with a unit, a multiple, an interval, a ratio.
Counts, and what stands in code, are none."""
LINK = re.compile(r"\[([^]]*)\]\(([^)#]+)#?([^)]*)\)")


def typed_figures(page: str, text: str) -> list[str]:
    """The figures of a page that stand neither between generated markers nor in a link that holds
    them: ``[2.07](results.json#key.of.it)``, or of a setting ``[5%](where/it/is/set)``."""
    text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|<img[^>]*>", "", text)

    def without_held(link: re.Match[str]) -> str:
        words, target, key = link.groups()
        figures = FIGURE.findall(words)
        file = (ROOT / page).parent / target
        held = figures and all(holds(file, key, number(f)) for f in figures)
        return "" if held else words

    return FIGURE.findall(LINK.sub(without_held, text))


def number(figure: str) -> str:
    return re.sub(r"[^\d.].*", "", figure.replace(",", ""))


def holds(file: Path, key: str, figure: str) -> bool:
    """Whether a key of a JSON file rounds to a figure, or another file states it (a percentage also
    as a part of 1, or beyond 1)."""
    if file.suffix == ".json":
        value = json.loads(file.read_text(encoding="utf-8"))
        for step in key.split("."):
            value = value[int(step) if isinstance(value, list) else step]
        decimals = len(figure.partition(".")[2])
        return f"{value:.{decimals}f}" == figure
    part = float(figure) / 100
    stated = set(re.findall(r"\d+(?:\.\d+)?", file.read_text(encoding="utf-8")))
    return bool(stated & {figure, f"{part:g}", f"{1 + part:g}"})


def test_every_figure_is_generated_or_linked_to_where_it_stands() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", MAP)}
    readme = pages["README.md"]
    for name, lines in (("headline", [report.headline()]), ("results", [report.highlights()])):
        assert report.between(readme, name, lines) == readme
    simulator = (ROOT / "docs/simulator.md").read_text(encoding="utf-8")
    assert report.between(simulator, "believed", report.believed()) == simulator
    reliability = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert report.between(reliability, "serving", report.serving()) == reliability
    for page, text in report.pages().items():
        stands = (ROOT / page).read_text(encoding="utf-8")
        assert without_changes(stands) == without_changes(text), page
    for page, text in pages.items():
        assert typed_figures(page, text) == [], page


MAP = "docs/map.md"


@pytest.mark.parametrize(
    "typed",
    [
        *("It is 1.43 times as fast.", "3x faster.", "2 times the tokens.", "In 131 s.", "7% off."),
        *("Of 1.02 to 1.19.", "A ratio of 0.94.", "**2.07** and more.", "It takes 9 minutes."),
        "[1.23](bench/results/speed.json#replay.tokens) times",
        "[17.5%](docs/simulator.md)",
    ],
)
def test_a_figure_that_a_person_types_is_noticed(typed: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert typed_figures("README.md", f"{text}\n{typed}\n") != []
    ratio = report.load("gpu-nvidia-h200")["tune"]["tuned"]["confirmed"]["ratio"]
    key = "bench/results/gpu-nvidia-h200.json#tune.tuned.confirmed.ratio"
    assert typed_figures("README.md", f"[{ratio:.2f} times]({key}) of 48 tokens") == []


def test_what_won_and_what_is_left_out_stand_beside_a_claim() -> None:
    """The comparison with a server without a draft; the GPU's ballast; the default verifier."""
    said = report.highlights()
    (off,) = (r for r in report.load("load-vllm")["regret"]["together"] if r["constant"] == "off")
    ratio, low, high = off["share"]
    assert f"{ratio:.3f} ({low:.3f} to {high:.3f}) of the tokens/s of a server without" in said
    assert "every constant over" not in said
    run = report.load("gpu-nvidia-h200")["tune"]
    assert f"**{run['tuned']['confirmed']['ratio']:.2f} times" in report.headline()
    assert f"\n**{run['on']}**, a pair ballasted to 8B" in said
    assert f"{run['tuned']['confirmed']['requests']} requests held out" in said
    assert f"**{run['tuned']['confirmed']['ratio']:.2f} times autoregression**" in said
    low, high, beyond = report.coupled_costs_chains()
    assert f"costs chains {low} to {high}% of `rejection`'s tokens a round ({beyond}" in said


def test_what_a_public_model_reaches_says_what_was_not_shown() -> None:
    said = report.highlights()
    assert "\n**Gemma 3 270M**" in said
    assert "bold: published" in said
    for d in report.load("real-tuned").values():
        if d.get("confirmed"):
            low, high = d["confirmed"]["interval"]
            figure = f"{d['workload']} **{d['confirmed']['ratio']:.2f} ({low:.2f} to {high:.2f})**"
            assert (figure if d["published"] else figure.replace("**", "")) in said
            assert d["published"] <= (low > 1)


def test_the_error_of_closed_forms_stands_beside_that_of_replay() -> None:
    (small, *_) = report.load("acceptance-fidelity")["tau_by_gamma"].values()
    beta = small[1] - 1.0  # of one token: accepted where it is not rejected
    error = sum(beta**i for i in range(len(small))) / small[-1] - 1
    (row, *_) = (line for line in report.closed_forms() if line.startswith("| small | 1 |"))
    assert f"{beta:.3f}" in row
    assert f"{100 * error:+.1f}% at gamma {len(small) - 1}" in row
    assert row.endswith("| 0.0% |")


def test_what_gpus_measured_is_shown_side_by_side_with_day_and_code() -> None:
    shown = "\n".join(report.gpus())
    for name in ("h200", "h100-80gb-hbm3"):
        figures = report.load(f"gpu-nvidia-{name}")
        run = figures["tune"]
        assert f" {run['on']} |" in shown
        assert f"{run['measured']}, code of {run['code']}" in shown
        assert f"| {run['tuned']['confirmed']['ratio']:.2f} (" in shown
        best = max(row["tokens/s"] for row in figures["rounds"]["rows"])
        assert f" {best:.0f} |" in shown
    texts = {row["dtype"]: row for row in report.load("gpu-nvidia-h200")["texts"]["rows"]}
    assert f"| 0 of {texts['float64']['texts']} |  | met |" in shown


PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_the_page_of_a_paper_begins_with_verdicts_and_its_tables_are_narrow(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines[2:] if not line.startswith("- "))
    count = lines.index(first, 2) - 2
    assert 1 < count <= 5
    rows = [line for line in lines if line.startswith("| ")]
    assert rows
    assert max(row.count(" | ") for row in rows) < 7
    notes = {int(n) for n in re.findall(r"^(\d+)\. ", "\n".join(lines), re.MULTILINE)}
    used = {int(n) for row in rows for found in re.findall(r"\(([\d, ]+)\) \|$", row)
            for n in found.split(", ")}  # fmt: skip
    assert notes == used == set(range(1, len(notes) + 1))


@pytest.mark.parametrize("page", ["heterospec", "c2t", "dynaspec"])
def test_the_first_line_of_a_papers_page_says_what_holds_and_why_not_the_rest(page: str) -> None:
    first = report.paper_page(page).splitlines()[2]
    assert "What holds: " in first
    assert len(first.split()) < 120


@pytest.mark.parametrize(
    ("ratio", "says"),
    [
        ([1.14, 1.04, 1.2], "worth building by the estimate, not by its interval"),
        (
            [1.14, 1.06, 1.2],
            "at temperature 1: worth building; several at once are built because of that; no GPU",
        ),
        ([1.04, 1.01, 1.2], "not worth building"),
    ],
)
def test_several_requests_on_cuda_are_worth_building_by_an_interval(
    ratio: list[float], says: str
) -> None:
    row = {"hardware": load_page.GATE_COSTS, "load": "clients:8"}
    rows = {0: [1.0, 0.9, 1.1], 1: ratio}.items()
    assert says in load_page.gate(
        [{**row, "temperature": each, "tree_over_chain": of} for each, of in rows]
    )


def test_under_load_the_page_begins_with_what_to_use() -> None:
    lines = load_page.page().splitlines()
    head = lines[: lines.index("## Who decides best under load")]
    assert len(" ".join(head).split()) < 250
    rows = report.load("rules")["replayed"]["rows"]
    none = [row["over"]["none"][0] for row in rows if row["clients"]]
    assert f"**Not to draft** has {min(none):.2f} to {max(none):.2f}" in "\n".join(head)


def test_five_questions_are_answered_in_short_and_say_where_it_stands() -> None:
    page = report.pages()["docs/questions.md"]
    assert len(page.split()) <= 450
    answers = page.split("## ")[1:]
    assert len(answers) == 5
    assert all("](" in answer.splitlines()[2] for answer in answers)


def test_the_simulators_page_begins_with_how_far_it_was_off() -> None:
    said = "\n".join(report.believed())
    d = report.load("acceptance-fidelity")
    errors = [r["error"] for r in d["rows"] if r["kind"] != "shortlists"]
    assert f"{sum(e > 0 for e in errors)} of {len(errors)} policies were predicted too fast" in said
    for t in report.real_page.by_lookup():
        assert f"{t['check']['speedup']:.2f}" in said
        assert not t["confirmed"] or f"{t['confirmed']['ratio']:.2f}" in said


def test_what_arrives_at_a_rate_is_no_prediction_under_load() -> None:
    """Tokens/s of requests that come at a rate are that rate's."""
    rows = [
        {"load": "clients:8", "tokens_per_s": [100.0, 90.0], "predicted_tokens_per_s": 104.5},
        {"load": "poisson 12/s", "tokens_per_s": [50.0, 50.0], "predicted_tokens_per_s": 50.0},
    ]
    errors, again = report.by_clients({"rows": rows}, "tokens_per_s")
    assert errors == pytest.approx([0.1])
    assert len(again) == 2


def test_results_are_a_page() -> None:
    assert len(report.results().split()) <= 1500
    assert "gamma=" not in report.results() + report.highlights()


@pytest.mark.parametrize(
    ("label", "short"),
    [
        ("ngram fixed(gamma=7)", "ngram K=7"),
        ("head fixed(gamma=4) top_k(width=8) select(top_n=60)", "head tree 8x4 N=60"),
        ("head fixed(gamma=4) top_k(k=8, coupled) N=56", "head tree 8x4 coupled N=56"),
        ("small fixed(gamma=11) max_prob(0.206)", "small K=11 max prob 0.21"),
        ("ngram analytic(gamma_max=11, gamma_initial=4, acc_max=0.9, gamma_min=2)",
         "ngram analytic 2-11"),
        ("small fixed(gamma=2) classifier(width=10, score=probability, cap=10, beta=0.9)",
         "small C2T 10x2 beta 0.9"),
        ("head fsm(gamma_max=4, gamma_initial=4, gamma_min=2) static(64 nodes)",
         "head fsm 2-4 static tree 64"),
        ("small by_load(1: 3, 2: 1)", "small by load 1:3 2:1"),
        ("head fixed(gamma=5) top_k(width=8) stratify(alpha=2, fractions=(0.5, 1.0))",
         "head tree 8x5 bins 2"),
        ("near fixed(gamma=6) clusters(k0=16, k1=8, k_min=4)", "near K=6 clusters 16"),
        ("autoregressive", "autoregressive"),
        ("medium: small fixed(gamma=2) over ngram fixed(gamma=3); tau +1.0%",
         "medium: small K=2 over ngram K=3; tau +1.0%"),
    ],
)  # fmt: skip
def test_labels_have_a_short_form(label: str, short: str) -> None:
    assert report.short(label) == short
