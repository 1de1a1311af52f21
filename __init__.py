"""Finds, proves and keeps the best speculative-decoding policy for a target, its drafts, a device and its traffic.

The folders of the repository are this package's: ``spectune.runtime`` is ``runtime/``.
"""
