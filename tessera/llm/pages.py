"""Page pool: which pages of a cache belong to which request; the host's side of a paged cache."""

from __future__ import annotations

import numpy as np

from tessera.core.errors import ArgumentError, ResourceError, user_location


class PagePool:
    """Numbers of free pages, and the pages of each request in order.

    >>> pool = PagePool(pages=4, size=16, requests=2, longest=48)
    >>> pool.reserve(0, 17)
    >>> pool.table[0].tolist(), pool.free
    ([0, 1, -1], 2)

    Raises:
        ArgumentError: a number is not positive.
    """

    def __init__(self, pages: int, size: int, requests: int, longest: int) -> None:
        for name, value in (("pages", pages), ("size", size), ("requests", requests), ("longest", longest)):
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ArgumentError(f"a page pool with {name} {value!r}", location=user_location(),
                                    expected="a positive integer")  # fmt: skip
        self.size, self.longest = size, longest
        self.table = np.full((requests, -(-longest // size)), -1, np.int32)
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def reserve(self, request: int, length: int) -> None:
        """Give a request the pages for its first `length` positions; nothing changes if that fails.

        Raises:
            ArgumentError: that is more than a request may have: the cache would be written past its end.
            ResourceError: there are not as many free pages.
        """
        row = self.table[request]
        needed = [i for i in range(-(-length // self.size)) if i >= len(row) or row[i] < 0]
        if length > self.longest:
            raise ArgumentError(
                f"request {request} would write the cache past its end", location=user_location(),
                expected=f"up to {self.longest} positions", received=length,
                suggestion="generate fewer tokens, or make the cache longer",
            )  # fmt: skip
        if len(needed) > self.free:
            raise ResourceError(
                f"the cache has no pages left for request {request}", location=user_location(),
                expected=f"{len(needed)} free pages of {self.size} positions", received=f"{self.free}",
            )  # fmt: skip
        for i in needed:
            row[i] = self._free.pop()

    def release(self, request: int) -> None:
        """Return the pages of a request."""
        row = self.table[request]
        self._free += [int(p) for p in row[row >= 0]][::-1]
        row[:] = -1
