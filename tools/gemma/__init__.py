"""Gemma 3 270M as a target: fetched, never redistributed; Gemma's terms apply to its use."""
