"""The errors a user can cause. The command line prints each as one line and exits 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spectune.traces.text import one_line


class SpectuneError(Exception):
    """What went wrong, where, and how to mend it, in one line of bounded length, whatever the
    message quotes."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Notes on an exception that nobody foresaw what was at hand; the command line says it."""
    try:
        yield
    except SpectuneError:  # says where itself
        raise
    except Exception as error:
        error.add_note(what)
        raise


class OutputError(SpectuneError):
    """A file of results cannot be written where it was asked for."""


class ConfigError(SpectuneError):
    """A file of settings (spectune.toml) is missing, malformed, or says what cannot be."""


class WorkloadError(SpectuneError):
    """A workload file or request is malformed, empty, or does not fit the model."""


class PairError(SpectuneError):
    """A target or draft cannot be loaded, or they do not belong together."""


class PolicyError(SpectuneError):
    """A policy document is not valid, or this pair, profile or verifier cannot run it."""


class TraceError(SpectuneError):
    """A recording, panorama or profile is missing, damaged, or too small for what is asked of
    it."""


class EngineError(SpectuneError):
    """An engine is not installed, cannot load a model, or died."""
