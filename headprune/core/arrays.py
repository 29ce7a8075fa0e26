"""Arrays as the bytes of a safetensors file; equal arrays give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def packed(arrays: Mapping[str, NDArray[np.generic]], marks: Mapping[str, str]) -> bytes:
    """Serialise arrays with metadata; equal ones give equal bytes.

    The library itself writes metadata in a random order.

    Args:
        arrays: The arrays by name.
        marks: The metadata.

    >>> import numpy as np
    >>> marks = {"b": "1", "a": "2", "c": "3", "d": "4"}
    >>> b'"__metadata__":{"a":"2","b":"1","c":"3","d":"4"}' in packed({"x": np.zeros(2)}, marks)
    True
    """
    from safetensors.numpy import save

    data: bytes = save(dict(arrays), dict(marks))
    # A safetensors file is the header's length in 8 bytes, a JSON header, and the numbers.
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + length :]
