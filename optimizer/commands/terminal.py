"""How the command line speaks: results on stdout, lines and progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import click
from rich import progress
from rich.console import Console

from spectune.optimizer.commands.common import Talk
from spectune.optimizer.commands.results import Result
from spectune.runtime.progress import Progress, silent
from spectune.traces.text import one_line, printable


def console_for(stderr: bool = False) -> Console:
    """Rich's console, which reads no markup and no names of emoji in what it prints; 100 columns
    wide where there is no terminal."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else 100
    return Console(
        stderr=stderr, width=width, soft_wrap=False, highlight=False, markup=False, emoji=False
    )


def note(text: str) -> None:
    """Prints lines that may hold what others wrote on stderr."""
    click.echo(printable(text), err=True)


class Terminal:
    """Prints results, and the progress of what leads to them until it is left."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json, self.meter = as_json, Meter()
        console = console_for(stderr=as_json)
        console.width = console.width if console.is_terminal else 10_000
        self.talk = Talk(note, self.meter, console)

    def __enter__(self) -> Terminal:
        # Replay loads a model only where it has to: of its library's bars nothing may be shown.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return self

    def __exit__(self, *exc: object) -> None:
        self.meter.stop()

    def print(self, result: Result) -> None:
        """Shows a result."""
        self.meter.stop()
        result.print(console_for(), as_json=self.as_json)


LINES_S = 30.0
"""Where there is no terminal a phase says so often how far it is."""


class Meter:
    """Progress on stderr: a bar for each phase, with the time it still takes, on a terminal and in
    a notebook; else a line as a phase begins, and one each :data:`LINES_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bars: dict[str, progress.TaskID] = {}
        self._progress: progress.Progress | None = None
        self._clock = clock
        self._began: dict[str, float] = {}
        self._told_at = 0.0

    def stop(self) -> None:
        """Leaves what is shown; the next phase begins below it."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._bars, self._began = None, {}, {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._progress is None:
            console = console_for(stderr=True)
            self._progress = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=console,
                disable=not shows_bars(console),
            )
            self._progress.start()
        phase = one_line(phase)
        key = phase.split(",")[0]
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(phase, total=total)
            self._began[key] = self._told_at = self._clock()
            if self._progress.disable:
                click.echo(f"{key}: {total}", err=True)
        self._progress.update(self._bars[key], completed=done, total=total, description=phase)
        now = self._clock()
        if self._progress.disable and done < total and now - self._told_at >= LINES_S:
            left_s = (now - self._began[key]) / max(1, done) * (total - done)
            click.echo(f"{key}: {done} of {total}, {in_words(left_s)} left", err=True)
            self._told_at = now


def shows_bars(console: Console) -> bool:
    """Whether bars can be drawn: on a terminal, and in a notebook that has its widgets."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


def in_words(seconds: float) -> str:
    """About how long that is."""
    if seconds < 100:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"


@contextmanager
def meter_of_python() -> Iterator[Progress]:
    """The progress that a call from Python shows: a :class:`Meter` where somebody looks on."""
    console = console_for(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield silent
        return
    meter = Meter()
    try:
        yield meter
    finally:
        meter.stop()
