"""Drafts: what proposes tokens for the target to verify. A file per kind: a language model, prompt
lookup, an EAGLE head."""
