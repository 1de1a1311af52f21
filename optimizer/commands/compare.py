"""`traces compare`: two policies on the requests that both decoded."""

from __future__ import annotations

from spectune.optimizer.commands.common import Talk, open_store
from spectune.optimizer.commands.results import Result, Table
from spectune.optimizer.commands.traces import filter_of
from spectune.optimizer.inputs import named_policy
from spectune.optimizer.report.words import counted
from spectune.settings import TracesCompare
from spectune.traces.store.compare import compare as compare_requests


def compare(s: TracesCompare, talk: Talk) -> Result:
    with open_store(s) as store:
        policies = [named_policy(name) for name in (s.left, s.right)]
        names = (s.left, s.right)
        one, other = (n if p is None else p.id for n, p in zip(names, policies, strict=True))
        data = compare_requests(store, one, other, filter_of(s))
    left, right = (n if p is None else p.label() for n, p in zip(names, policies, strict=True))
    rows = [{**row, "name": name} for row, name in zip(data["rows"], (left, right), strict=True)]
    interval = (
        "" if data["interval"] is None else "95%: {:.2f} to {:.2f}, ".format(*data["interval"])
    )
    text = (
        f"{left}: {data['ratio']:.2f} times as fast as {right} ({interval}"
        f"{counted(data['requests'], 'requests')} that both decoded)"
    )
    return Result(text, data, rows, [Table(rows)])
