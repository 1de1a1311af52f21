"""Trains the demo pair, larger pairs of its kind, and an MTP layer for vLLM."""
