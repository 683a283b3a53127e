"""Shared pages: the pages of a cache, with reference counts and an index of the prompt prefixes that they hold.

A full page of a prompt is never written again, so that requests with the same prefix read one copy (Kwon et al. 2023).
The name of a page is the SHA-256 of the prefix that ends with it. A page that no request uses stays until its memory is
needed; the least recently used goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tessera.core.errors import ArgumentError, ResourceError, user_location


class SharedPages:
    """Free pages, pages in use with their number of users, and pages that are kept for their content.

    >>> pages = SharedPages(2, size=4)
    >>> first = pages.take()
    >>> pages.publish(first, name_prefixes([1, 2, 3, 4], 4)[0])
    >>> pages.release(first)
    >>> pages.find(name_prefixes([1, 2, 3, 4, 5], 4)[0]) == first, pages.available
    (True, 1)

    Raises:
        ArgumentError: a number is not positive.
    """

    def __init__(self, count: int, size: int) -> None:
        for name, value in (("pages", count), ("positions in a page", size)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"a cache with {value!r} {name}", location=user_location(),
                                    expected="a positive integer")  # fmt: skip
        self.count, self.size = int(count), int(size)
        self._free = list(range(self.count))[::-1]
        self._users = [0] * self.count
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # pages without a user, the least recently used first

    @property
    def available(self) -> int:
        """The pages that `take` can give: free ones, and those that are only kept."""
        return len(self._free) + len(self._kept)

    @property
    def kept(self) -> int:
        """The pages without a user whose content is kept."""
        return len(self._kept)

    def take(self) -> int:
        """A page to write, with one user.

        Raises:
            ResourceError: all pages are in use.
        """
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            del self._named[self._names.pop(page)]
        else:
            raise ResourceError("the cache has no page left", location=user_location(),
                                expected=f"a page of {self.size} positions", received="0")  # fmt: skip
        self._users[page] = 1
        return page

    def find(self, name: bytes) -> int | None:
        """The page with a prefix, which gets one user more; None where no page has it."""
        page = self._named.get(name)
        if page is not None:
            self._users[page] += 1
            self._kept.pop(page, None)
        return page

    def holds(self, name: bytes) -> bool:
        """Whether a page has a prefix."""
        return name in self._named

    def publish(self, page: int, name: bytes) -> None:
        """Name the content of a full page, which is written no more; the first page of a name keeps it."""
        if name not in self._named and page not in self._names:
            self._named[name], self._names[page] = page, name

    def release(self, page: int) -> None:
        """One user less."""
        assert self._users[page] > 0
        self._users[page] -= 1
        if self._users[page] == 0:
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)


def name_prefixes(tokens: Sequence[int] | np.ndarray, size: int) -> list[bytes]:
    """The name of each prefix of whole pages of a prompt.

    >>> [len(n) for n in name_prefixes(range(9), 4)]
    [32, 32]
    """
    held = np.asarray(tokens, np.int32)
    names, chain = [], hashlib.sha256()
    for start in range(0, len(held) // size * size, size):
        chain.update(held[start : start + size].tobytes())
        names.append(chain.digest())
    return names
