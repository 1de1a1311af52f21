"""Alarms in words."""

from __future__ import annotations

from typing import Any

from spectune.traces.tables import Alarm


def in_words(row: Alarm) -> str:
    """An alarm in a line."""
    category = "" if row.category is None else f" of {row.category}"
    what = {
        "acceptance": f"accepted tokens{category} at {row.evidence.get('drafted')} drafted",
        "seconds": "measured over predicted seconds",
        "mix": f"the share{category}",
    }[row.what]
    change = f"{what} went from {row.before:.2f} to {row.after:.2f}"
    due = f" by schedule {row.schedule}" if row.schedule else ""
    why = f" ({row.why})" if row.why else ""
    about = f"alarm {row.id} in {row.deployment}, {row.at:%Y-%m-%d %H:%M} UTC"
    return f"{about}: {change}: {row.outcome}{due}{why}"


def told(row: Alarm) -> dict[str, Any]:
    """What `status` tells of an alarm. JSON-ready."""
    return {**row.to_json(), "text": in_words(row)}
