"""Costs by the limits of a data sheet."""

from __future__ import annotations

import pytest

from spectune.optimizer.roofline import SHAPES, roofline, shape_of
from spectune.runtime.pair import read_pair

PUBLISHED = {"1b": 1.236e9, "3b": 3.213e9, "8b": 8.030e9, "70b": 70.55e9}
"""Weights of Llama 3.2 1B and 3B and of Llama 3.1 8B and 70B, by their model cards."""


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_weights_of_published_models(name: str) -> None:
    shape = shape_of(name)
    tied = name in ("1b", "3b")
    embeddings = (1 if tied else 2) * shape.vocab * shape.hidden
    assert shape.layer_weights + embeddings == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_pass_takes_what_reading_its_weights_or_computing_its_products_takes() -> None:
    demo = read_pair("demo")
    terms = roofline(demo, "h200", "8b", "1b").terms
    # 15.01 GB of weights at 4.8 TB/s; 131,072 bytes of cache a token; 15.01 GFLOP a row
    assert terms["target"].at(rows=8, context=0) == pytest.approx(3.127e-3, rel=1e-3)
    cached = terms["target"].at(rows=8, context=8192) - terms["target"].at(rows=8, context=0)
    assert cached == pytest.approx(8192 * 131072 / 4.8e12, rel=1e-6)
    assert terms["target"].at(rows=2048, context=0) == pytest.approx(2048 * 15.01e9 / 989e12, 1e-3)
    draft = terms["pass/small"].at(rows=1, context=0) + terms["head/small"].at(rows=4096)
    assert draft == pytest.approx(2 * 1.236e9 / 4.8e12, rel=1e-3)
    assert terms["head/small"].at(rows=1024) == pytest.approx(terms["head/small"].at(rows=4096) / 4)
    assert terms["step draft/small"].at(passes=3, batch=1) == pytest.approx(3 * draft, rel=1e-3)
    assert "phase/head" not in terms  # its chains are trees of width 1
    twice = roofline(demo, "2xh200", "8b", "1b").terms
    limits = (table["target"].at(rows=4, context=0) for table in (terms, twice))
    assert next(limits) == pytest.approx(2 * next(limits))
    one = roofline(demo, "rtx4090", "8b", "1b").terms["target"]
    assert one.at(rows=1, context=0) == pytest.approx(15.01e9 / 1008e9, rel=1e-3)
