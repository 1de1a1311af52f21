"""Latency profiles: rounds of a designed experiment, terms fitted to them, and a check."""
