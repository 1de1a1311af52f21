"""Figures as Prometheus' metrics, by its own client: of a fleet, and of one server that is
followed. No label has a value that clients choose: categories, prompts and ids of requests stay
out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from spectune.engines.vllm.follow import Follower

PLACE: Final = ("deployment", "pair", "pair_id", "device")
ROLLOUT: Final = ("deployment", "pair_id", "device")
SERVER: Final = ("deployment", "server")
METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "spectune_database_up": ("Whether the database answers; without it there is no more.", ()),
    "spectune_figures_age_seconds": ("How old the figures are.", ()),
    "spectune_policy_info": ("What is in force.", (*PLACE, "version", "policy", "label")),
    "spectune_policy_since_timestamp_seconds": ("Since when.", PLACE),
    "spectune_servers": ("Servers by their answer to what is in force.", (*PLACE, "answer")),
    "spectune_served_requests": ("Requests in the window that it decoded.", PLACE),
    "spectune_seconds_per_token": ("Seconds of steps over tokens, in the window.", PLACE),
    "spectune_tau": ("Tokens a round, in the window.", PLACE),
    "spectune_acceptance": (
        "Share of drafts as long that are accepted up to a position, in the window.",
        (*PLACE, "position"),
    ),
    "spectune_measured_over_predicted": (
        "Seconds of rounds over those predicted, at the last look for drift.",
        PLACE,
    ),
    "spectune_rollout_pairs": ("Pairs of blocks of an open rollout.", ROLLOUT),
    "spectune_rollout_ratio": ("Speed over the incumbent's at its last look.", ROLLOUT),
    "spectune_rollouts": ("Rollouts by verdict.", ("deployment", "verdict")),
    "spectune_alarms": ("Alarms by what came of them.", ("deployment", "what", "outcome")),
    "spectune_alarm_timestamp_seconds": ("When the last one was.", ("deployment",)),
    "spectune_job_attempts": ("Attempts by outcome.", ("schedule", "outcome")),
    "spectune_job_running": ("Whether a worker runs it.", ("schedule",)),
    "spectune_job_failed": ("Whether the last attempt failed.", ("schedule",)),
    "spectune_job_next_timestamp_seconds": ("When it is due.", ("schedule",)),
    "spectune_follow_lag_seconds": ("Since when `follow` has brought nothing in.", SERVER),
    "spectune_follow_unread_bytes": ("Bytes in the folder that are not in yet.", SERVER),
    "spectune_follow_requests_total": ("Requests brought in.", SERVER),
    "spectune_follow_skipped_lines_total": ("Broken lines skipped.", SERVER),
    "spectune_agent_silent_seconds": ("Since when its agent said nothing.", SERVER),
    "spectune_agent_dropped_total": ("Requests that the agent lost.", SERVER),
    "spectune_agent_fault": ("Whether the agent failed.", SERVER),
    "spectune_agent_policy_version": ("What is in force there; 0: its own.", SERVER),
}
"""By name what a metric says, and its labels."""


class Sample(NamedTuple):
    """A value of a metric, by the values of its labels."""

    name: str
    labels: tuple[object, ...]
    value: float


class Samples(Collector):
    """A collector of what ``read`` yields."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        by_name = defaultdict[str, list[Sample]](list)
        for sample in self._read():
            by_name[sample.name].append(sample)
        for name, samples in by_name.items():
            help, labels = METRICS[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, help, labels=labels)
            for sample in samples:
                family.add_metric([str(label) for label in sample.labels], sample.value)
            yield family


def registry_of(read: Callable[[], Iterable[Sample]]) -> CollectorRegistry:
    """A registry of what ``read`` yields, asked at each scrape."""
    registry = CollectorRegistry()
    registry.register(Samples(read))
    return registry


def of_deployment(row: Mapping[str, Any]) -> Iterator[Sample]:
    """What `status` knows of a deployment, pair and device."""
    place = tuple(row[name] for name in PLACE)
    if row["version"] is None:
        return
    about = (*place, row["version"], row["policy"], row["label"])
    yield Sample("spectune_policy_info", about, 1)
    yield Sample("spectune_policy_since_timestamp_seconds", place, _seconds(row["since"]))
    for answer, number in row["answers"].items():
        yield Sample("spectune_servers", (*place, answer), number)
    served = row["served_since"] or {}
    yield Sample("spectune_served_requests", place, served.get("requests", 0))
    if speed := served.get("tokens_per_s"):
        yield Sample("spectune_seconds_per_token", place, 1 / speed)
    if row["measured_over_predicted"] is not None:
        yield Sample("spectune_measured_over_predicted", place, row["measured_over_predicted"])
    if served.get("tau") is not None:
        yield Sample("spectune_tau", place, served["tau"])
    for position, share in enumerate(row["acceptance_by_position"]):
        yield Sample("spectune_acceptance", (*place, position), share)


def of_rollout(row: Mapping[str, Any]) -> Iterator[Sample]:
    """What is known of a rollout, where it is open."""
    if row["verdict"] is None:
        place, standing = tuple(row[name] for name in ROLLOUT), row["standing"]
        yield Sample("spectune_rollout_pairs", place, standing.get("pairs", 0))
        for look in standing.get("looks", ())[-1:]:
            yield Sample("spectune_rollout_ratio", place, look["ratio"])


def of_server(row: Mapping[str, Any], now: datetime) -> Iterator[Sample]:
    """What is stored of a server that is followed."""
    server = row["deployment"], row["server"]
    for name, key in (("follow_lag", "looked_at"), ("agent_silent", "heard_at")):
        yield Sample(
            f"spectune_{name}_seconds", server, max(0.0, now.timestamp() - _seconds(row[key]))
        )
    yield Sample("spectune_follow_requests_total", server, row["requests"])
    yield Sample("spectune_follow_skipped_lines_total", server, row["skipped"])
    yield Sample("spectune_agent_dropped_total", server, row["dropped"])
    yield Sample("spectune_agent_fault", server, bool(row["fault"]))


def of_job(row: Mapping[str, Any]) -> Iterator[Sample]:
    """What is known of a schedule."""
    of = (row["name"],)
    last = row["last"] or {}
    yield Sample("spectune_job_running", of, row["lease_owner"] is not None)
    yield Sample("spectune_job_failed", of, last.get("outcome") in ("failed", "lost"))
    yield Sample("spectune_job_next_timestamp_seconds", of, _seconds(row["next_at"]))


def of_follower(follower: Follower) -> Iterator[Sample]:
    """What `follow` itself knows, also where the database is away."""
    status, totals = follower.policy.status, follower.totals
    server = follower.policy.deployment, follower.place
    yield Sample("spectune_database_up", (), not follower.is_away)
    yield Sample("spectune_follow_lag_seconds", server, follower.lag_s)
    yield Sample("spectune_follow_unread_bytes", server, follower.unread_bytes())
    yield Sample("spectune_follow_requests_total", server, totals.requests)
    yield Sample("spectune_follow_skipped_lines_total", server, totals.skipped)
    if status is not None:
        yield Sample("spectune_agent_silent_seconds", server, max(0.0, time.time() - status.at))
        yield Sample("spectune_agent_dropped_total", server, status.dropped)
        yield Sample("spectune_agent_fault", server, bool(status.fault))
        yield Sample("spectune_agent_policy_version", server, status.in_force.version)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
