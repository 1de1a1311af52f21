"""Latency profiles: rounds of a designed experiment, terms fitted to them, and a check."""

from spectune.runtime.profiling.measure import ACCEPTED_ERROR, environment, measure_profile

__all__ = ["ACCEPTED_ERROR", "environment", "measure_profile"]
