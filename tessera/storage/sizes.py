"""Sizes as people write them: "8GB" of memory."""

from __future__ import annotations

import re

from tessera.errors import ArgumentError, here

_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def as_bytes(size: int | str) -> int:
    """A count of bytes: an int, or text with K, M, G or T (powers of 1024), with or without B.

    Raises:
        ArgumentError: this is no size.

    >>> as_bytes("8GB") == 8 * 1024**3, as_bytes("1.5K"), as_bytes(64)
    (True, 1536, 64)
    """
    if type(size) is int and size >= 0:
        return size
    found = _WRITTEN.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        raise ArgumentError(f"{size!r} is no size of memory", location=here(), expected='bytes, or text such as "8GB"')
    return int(float(found[1]) * 1024 ** _POWERS[found[2].upper()])
