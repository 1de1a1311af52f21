"""Reading arrays and numbers of artifacts that anybody may have written. All raise ValueError,
saying what an artifact is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Document = dict[str, Any]


def stored_array(what: str, arrays: Mapping[str, npt.NDArray[Any]], name: str) -> npt.NDArray[Any]:
    if name not in arrays:
        raise ValueError(f"not a {what}: it lacks the array {name}")
    return np.asarray(arrays[name])


def stored_integers(what: str, arrays: Mapping[str, npt.NDArray[Any]], name: str) -> IntArray:
    array = stored_array(what, arrays, name)
    if array.dtype.kind not in "iu":
        raise ValueError(f"not a {what}: {name} must be whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def stored_count(what: str, document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"not a {what}: its document lacks {name}, a whole number")
    return value


def check_sizes(what: str, document: Mapping[str, Any], **sizes: int) -> None:
    """Raises ValueError where a document says other sizes than its arrays have."""
    for name, size in sizes.items():
        if document.get(name) != size:
            raise ValueError(
                f"not a {what}: its document says {name} {document.get(name)!r}, its arrays "
                f"have {size}"
            )
