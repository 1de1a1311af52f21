"""Code that turns into prose, with `control` beside the server and nobody else: is it seen, is it
tuned for, and is what is then in force the best there.

    SPECTUNE_VLLM_PYTHON=.venv-vllm/bin/python python bench/run.py serve_circle [--quick]

The server is `serve`, or a vLLM that `follow` follows, whose tuning sends no request of its own
and leaves the proof to the rollout; what it serves to a few clients, under a policy that somebody
chose by hand, is recorded; each labels its requests. A schedule with `--since`
and `--rollout`, and `control`, are left alone. Code goes on for a while, which may give no alarm;
then all is prose, until a tuning and its rollout have ended. Time is compressed: `control` looks
for drift every few seconds in place of ten minutes, and the rollout's blocks are short. What is
then in force is held, by replay of the prose that was served (under as many clients, of vLLM),
against what `tune` finds there at rest; what a tuning costs the traffic beside it is tokens/s while
one runs over those before. The figures go to ``bench/results/serve-circle.json``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.checks import serving
from bench.harness import Part, say
from bench.lab import chain, requests, stored
from bench.served import live
from bench.served.live import PAIR, command, run_json, temporary_folder
from bench.served.publications import following
from spectune.optimizer.schedule import history
from spectune.runtime.policies.document import Policy
from spectune.traces.errors import EngineError
from spectune.traces.store import TraceStore

RESULT = "serve-circle"
CLIENTS, TOKENS, LOOK = 4, 48, "5s"
WATCHED, TURN, ALARM = "control watches", "code turns into prose", "alarm"
DECIDED, TUNED, ENDED = "a tuning is due", "a tuning has ended", "its rollout has ended"
BLOCK = "3s"
BY_HAND = chain("small", 8)
"""What somebody had chosen before."""
WITHIN = 0.97
"""How fast what is in force is to be at least, of what a tuning on prose alone finds."""


class Size(NamedTuple):
    """Seconds of code before `control` watches and after, of prose at the end; prompts of each
    kind, the budget of a tuning on `serve`, and how long each step of the circle may take."""

    before_s: float
    stationary_s: float
    settled_s: float
    prompts: int
    budget: str
    give_up_s: float


class Site(NamedTuple):
    """A server in front of clients: its URL and its model's name, the deployment that it is of, how
    that is tuned, how policies are simulated there, how `control` runs beside it, what publishes
    there, and the tuning that it begins with, from which the costs of steps are known."""

    url: str
    model: str
    deployment: str
    tuned: tuple[object, ...]
    simulated: tuple[object, ...]
    control: tuple[object, ...]
    publish: Callable[[TraceStore, Policy, str], int]
    first: tuple[object, ...] = ()


@contextmanager
def native(database: Path) -> Iterator[Site]:
    with serving.serve(database) as server:
        yield Site(server.url, PAIR.name, serving.DEPLOYMENT, (), (), (), serving.publish)


@contextmanager
def vllm(database: Path) -> Iterator[Site]:
    load = ("--arrivals", f"clients:{CLIENTS}")
    with live.serving() as server, following(database, server.folder):
        prompts = database.with_name("code.jsonl")
        rows = (json.dumps({"prompt": r.prompt}) for r in requests(24, category="code").requests)
        prompts.write_text("\n".join(rows))
        there = ("--deployment", "vllm", *load)
        first = ("--url", server.url, "--folder", server.folder, "--workload", prompts, *there)
        first += ("--budget", "10s", "--no-publish")
        # vLLM's processes spin between steps, here on all cores: a nice one gets next to none.
        beside = ("--nice", 0)
        tuned = ("--engine", "vllm", *there)
        yield Site(server.url, server.model, "vllm", tuned, load, beside, live.publish, first)


FULL, TINY = Size(30, 120, 30, 96, "60s", 1500), Size(10, 20, 5, 24, "10s", 900)


def bodies(model: str, category: str, count: int) -> list[dict[str, Any]]:
    """Greedy completions of the demo's prompts of a category."""
    found = requests(count, category=category).requests
    how = {"model": model, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    label = {"vllm_xargs": {"spectune_label": category}}
    return [{**how, **label, "prompt": request.prompt} for request in found]


@contextmanager
def control(database: Path, *how: object) -> Iterator[None]:
    """`control` with nobody before it."""
    words = command("--db", database, "control", "--port", 0, *how)
    words += ["--set", f"look={LOOK}", "--set", "poll=1s"]
    with database.with_suffix(".control.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            yield
            if process.poll() is not None:
                raise EngineError(Path(log.name).read_text().strip()[-300:])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


class Circle:
    """A circle as it goes: its store and clients, and the ``moments`` (monotonic) of what
    happened."""

    def __init__(
        self, database: Path, site: Site, clients: serving.Clients, give_up_s: float
    ) -> None:
        self.store: TraceStore = stored(database)
        self.site, self.clients, self.moments = site, clients, dict[str, float]()
        self.turned = datetime.max.replace(tzinfo=UTC)
        self._began, self._give_up_s = time.monotonic(), give_up_s

    def note(self, what: str) -> None:
        self.moments[what] = time.monotonic()
        say(f"{self.moments[what] - self._began:5.0f} s {what}")

    def wait(self, what: str, until: Callable[[], bool]) -> None:
        """Returns, and notes it, once it is so. Raises EngineError after too long."""
        began = time.monotonic()
        while not until():
            if time.monotonic() - began > self._give_up_s:
                raise EngineError(f"{what}: not so after {self._give_up_s:.0f} s")
            time.sleep(0.5)
        self.note(what)

    def turn(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Lets the clients send others from now on."""
        self.note(TURN)
        self.clients.bodies, self.turned = bodies, datetime.now(UTC)

    def answered(self, moment: str) -> int:
        """How many requests had been answered."""
        at = self.moments[moment]
        return sum(answer.status == 200 and answer.at < at for answer in self.clients.answers)

    def tokens_per_s(self, begin: str, end: str) -> float:
        """What the clients got between two moments."""
        a, b = self.moments[begin], self.moments[end]
        within = [x for x in self.clients.answers if x.status == 200 and a <= x.at < b]
        return sum(answer.tokens for answer in within) / (b - a)


def measure(quick: bool, of: Callable[[Path], AbstractContextManager[Site]]) -> dict[str, Any]:
    size = TINY if quick else FULL
    with temporary_folder() as folder, of(folder / "x.db") as site:
        database = folder / "x.db"
        tuning = ("--pair", "demo", *(site.tuned or ("--budget", size.budget)), "--limit", 96)
        code, prose = (bodies(site.model, kind, size.prompts) for kind in ("code", "prose"))
        if site.first:
            run_json("--db", database, "tune", "--pair", "demo", *site.first)
        circle = Circle(database, site, serving.Clients(site.url, code, CLIENTS), size.give_up_s)
        with circle.clients.sending():
            run_through(circle, database, tuning, prose, size)
        store, about = circle.store, f"{circle.turned:%Y-%m-%dT%H:%M:%S}"
        (in_force,) = store.in_force()
        best = run_json("--db", database, "tune", *tuning, "--since", about, "--no-publish")
        replay = ("--db", database, "simulate", "--recording", best["recording"], *site.simulated)
        # A search alone names what it found otherwise.
        found = best.get("winner") or {key: best[key] for key in ("policy", "label")}
        speeds = [
            _tokens_per_s(run_json(*replay, "--policy", json.dumps(policy)))
            for policy in (in_force.policy.document, found["policy"])
        ]
        alarms = [alarm.to_json() for alarm in store.alarms(site.deployment)]
        rollouts = store.rollouts(site.deployment)
    share = speeds[0] / speeds[1]
    early = [a for a in alarms if a["at"] < circle.turned.isoformat()]
    delay_s = {k: circle.moments[k] - circle.moments[TURN] for k in (ALARM, DECIDED, TUNED, ENDED)}
    told = ", ".join(f"{r.policy.label} {r.verdict}" for r in reversed(rollouts))
    came = f"rolled out after {delay_s[ENDED]:.0f} s ({told})" if told else "nothing rolled out"
    cost = circle.tokens_per_s(DECIDED, TUNED) / circle.tokens_per_s(WATCHED, TURN)
    failed = [a.problem for a in circle.clients.answers if a.status not in (200, 429)]
    return {
        "summary": f"{len(early)} alarms in {circle.answered(TURN)} requests of code; prose is "
        f"seen after {delay_s[ALARM]:.0f} s ({circle.answered(ALARM) - circle.answered(TURN)} "
        f"requests), tuned for after {delay_s[TUNED]:.0f} s, {came}; in force is then "
        f"{in_force.policy.label}, by replay {share:.3f} times as fast there as "
        f"{found['label']}, which a tuning at rest finds; beside a tuning the traffic "
        f"gets {cost:.2f} of its tokens/s; {len(failed)} requests failed",
        "holds": not early and not failed and share >= WITHIN,
        "share": share,
        "cost": cost,
        "delay_s": delay_s,
        "alarms": alarms,
        "rollouts": [r.to_json() for r in rollouts],
        "in_force": in_force.policy.document,
        "best": found,
        "failed": failed[:5],
    }


def _tokens_per_s(simulated: Mapping[str, Any]) -> float:
    """Of what `simulate` says of a policy, alone or under one load."""
    (figures,) = simulated.get("loads", [simulated])
    return float(figures["tokens_per_s"])


def run_through(
    circle: Circle,
    database: Path,
    tuning: Sequence[object],
    prose: Sequence[Mapping[str, Any]],
    size: Size,
) -> None:
    """The circle, amid traffic: from code without a policy to prose under what was tuned for it."""
    store, deployment, recent = circle.store, circle.site.deployment, ("--since", "24h")
    rollout = "--rollout", "--set", f"block={BLOCK}"
    circle.site.publish(store, BY_HAND, PAIR.id)
    time.sleep(size.before_s)
    run_json(
        "--db", database, "schedule", "add", "keep", "--cron", "@yearly", *tuning, *recent, *rollout
    )
    with control(database, *circle.site.control):
        circle.note(WATCHED)
        time.sleep(size.stationary_s)
        circle.turn(prose)
        circle.wait(ALARM, lambda: any(a.at >= circle.turned for a in store.alarms(deployment)))
        circle.wait(DECIDED, lambda: any(a.due_at for a in store.alarms(deployment)))
        circle.wait(TUNED, lambda: bool(history(store.database, "keep")))
        circle.wait(ENDED, lambda: not store.rollouts(deployment, is_open=True))
        time.sleep(size.settled_s)


PARTS: dict[str, Part] = {"native": partial(measure, of=native), "vllm": partial(measure, of=vllm)}
