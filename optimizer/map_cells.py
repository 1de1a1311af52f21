"""The cell of the map of what pays where (docs/map.md) that is nearest to what was measured.

``map_cells.json`` holds the map over all categories, as ``python bench/report.py`` writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

Cell = Mapping[str, Any]
BEYOND: Final = 1.5
"""How many times as dear as the dearest of the map a draft may be, or a further token."""
CLOSE: Final = 0.01
"""Parts of a target pass that hardly differ: costs are compared by ratios above it."""


def nearest_cell(
    kind: str, temperature: float, first_token: float, draft_cost: float, slope: float
) -> Cell | None:
    """The cell for a draft (``head``, ``ngram`` or a language ``model``) whose first token is
    accepted as often and which costs as much: a pass of it, and a further token, as parts of the
    target's pass over one token. None where it lies beyond the map."""
    every = json.loads(files(__package__).joinpath("map_cells.json").read_text("utf-8"))["cells"]
    drafts = {"model": ("small", "medium")}.get(kind, (kind,))
    cells: list[Cell] = [cell for cell in every if cell["draft"] in drafts]
    costs = {"draft_cost": draft_cost, "slope": slope}
    if any(x > BEYOND * max(cell[key] for cell in cells) for key, x in costs.items()):
        return None

    def distance(cell: Cell) -> tuple[float, float, float]:
        logs = (math.log((x + CLOSE) / (cell[key] + CLOSE)) for key, x in costs.items())
        apart = abs(cell["temperature"] - temperature), abs(cell["first_token"] - first_token)
        return *apart, math.hypot(*logs)

    return min(cells, key=distance)


def cell_in_words(cell: Cell) -> str:
    """What pays in a cell, by how much, and that it is another pair's."""
    place = (
        f"first token accepted {cell['first_token']:.2f}, a pass of the draft "
        f"{cell['draft_cost']:g} and a further token {cell['slope']:g} of a target pass, "
        f"temperature {cell['temperature']:g}"
    )
    wins = "; ".join(_wins(batch, of) for batch, of in cell["batches"].items())
    return f"Nearest on the map, of another pair ({place}): {wins}. See docs/map.md."


def _wins(batch: str, of: Cell) -> str:
    requests = "one request at a time" if batch == "1" else f"{batch} at once"
    if (verdict := of["verdict"]) == "no speculation":
        return f"{requests}: {verdict}"
    is_chain = verdict == "chain"
    value, low, high = of["speed" if is_chain else "gain"]
    base = "no speculation" if is_chain else "the best tuned chain"
    return f"{requests}: {verdict}, {value:.2f} ({low:.2f} to {high:.2f}) times as fast as {base}"
