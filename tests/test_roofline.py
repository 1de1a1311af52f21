"""`profile --roofline`: costs by the limits of a data sheet."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import Door

from spectune.optimizer.roofline import SHAPES, shape_of
from spectune.traces.cost_table import terms_from_json

PUBLISHED = {"1b": 1.236e9, "3b": 3.213e9, "8b": 8.030e9, "70b": 70.55e9}
"""Weights of Llama 3.2 1B and 3B and of Llama 3.1 8B and 70B, by their model cards."""


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(str(tmp_path / "roofline.db"), "demo")


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_weights_of_published_models(name: str) -> None:
    shape = shape_of(name)
    tied = name in ("1b", "3b")
    embeddings = (1 if tied else 2) * shape.vocab * shape.hidden
    assert shape.layer_weights + embeddings == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_a_pass_takes_what_reading_its_weights_or_computing_its_products_takes(door: Door) -> None:
    options = {"pair": "demo", "target_shape": "8b", "draft_shape": "1b"}
    data = door.json("profile", roofline="h200", **options)
    terms = terms_from_json(data["terms"])
    assert data["device"] == "roofline h200"
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
    twice = terms_from_json(door.json("profile", roofline="2xh200", **options)["terms"])
    limits = (table["target"].at(rows=4, context=0) for table in (terms, twice))
    assert next(limits) == pytest.approx(2 * next(limits))


def test_what_is_no_device_or_shape_is_refused_in_a_line(door: Door) -> None:
    for device in ("h100x", "0xh100", "0,989", ""):
        shown = door.refused("profile", pair="demo", roofline=device)
        assert "mi300x" in shown
        assert "3350,989" in shown
    shown = door.refused("profile", pair="demo", roofline="100,20", target_shape="9b")
    assert "'9b'" in shown
    assert "config.json" in shown
