"""How the command line speaks: results on stdout, lines and progress on stderr."""

from __future__ import annotations

import os
import sys

import click
from rich import progress
from rich.console import Console

from spectune.optimizer.commands.common import Talk
from spectune.optimizer.commands.results import Result
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


class Meter:
    """Progress on stderr: a bar for each phase, with the time it still takes, on a terminal; a line
    per phase otherwise."""

    def __init__(self) -> None:
        self._bars: dict[str, progress.TaskID] = {}
        self._progress: progress.Progress | None = None

    def stop(self) -> None:
        """Leaves what is shown; the next phase begins below it."""
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._bars = None, {}

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
                disable=not console.is_terminal,
            )
            self._progress.start()
        phase = one_line(phase)
        key = phase.split(",")[0]
        if key not in self._bars:
            self._bars[key] = self._progress.add_task(phase, total=total)
            if self._progress.disable:
                click.echo(f"{key}: {total}", err=True)
        self._progress.update(self._bars[key], completed=done, total=total, description=phase)
