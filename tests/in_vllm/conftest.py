"""Tests that need vLLM: collected where it is installed (`make test-vllm`)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
