"""Token ids as vLLM's agent writes them: base64 of 32-bit whole numbers, lowest byte first."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np


def encoded(ids: Iterable[int]) -> str:
    return base64.b64encode(np.array([*ids], "<i4").tobytes()).decode()


def decoded(text: str) -> list[int]:
    return np.frombuffer(base64.b64decode(text), "<i4").tolist()
