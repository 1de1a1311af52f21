"""Zstandard, as Python has it from 3.14 on."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

CHECKED: dict[int, int] = {zstd.CompressionParameter.checksum_flag: True}
"""Options of frames whose checksum tells damage."""
