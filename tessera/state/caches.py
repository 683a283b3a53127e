"""Caches: ring buffers and page tables as state, with eviction and write-through as declarations of their methods."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError, trace_location, user_location
from tessera.core.types import DType, f32, int32, to_python_numbers
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import broadcast_to
from tessera.ops.tensor.shape import gather, iota, reshape
from tessera.state.stateful_objects import Stateful

# mypy: disable-error-code="operator, attr-defined, index"

POLICIES = ("lru", "fifo", "lfu")


@kernel
def write_slots(x, first, data):
    """data[b, (first + s) mod capacity] = x[b, s], on the grid (B, S); the capacity is at least S."""
    b, s = tile.program_id(0), tile.program_id(1)
    slot = (first[0] + s) % data.shape[1]
    data[b, slot, 0 : data.shape[2]] = x[b, s, 0 : x.shape[2]]


@dataclass(frozen=True)
class Page:
    """A page of a buffer: its number, its size, and the row of the position that asked for it."""

    number: int
    size: int
    offset: int = 0


class RingBuffer(Stateful):
    """The last `capacity` rows that were pushed, for each of a batch: [batch, capacity, *shape] of one type.

    `buffer[i]` is slot i, `buffer[page]` the slots of a page; both can be assigned to. `count` is the number of rows
    pushed so far, a tensor.

    Raises:
        ArgumentError: a size is not positive.
    """

    def __init__(self, batch: int, capacity: int, *shape: int, dtype: DType = f32) -> None:
        check_sizes("ring buffer", batch=batch, capacity=capacity, **{f"shape[{i}]": n for i, n in enumerate(shape)})
        self.batch, self.capacity, self.shape = batch, capacity, shape
        self.data = zeros((batch, capacity, *shape), dtype=dtype)
        self.count = zeros((1,), dtype=int32)

    def push(self, x: Any) -> RingBuffer:
        """Add rows x [batch, n, *shape], n up to the capacity; the oldest are overwritten. Returns itself.

        Raises:
            ShapeError: x has another shape, or more rows than the buffer.
        """
        x = as_tensor(x)
        if x.ndim != 2 + len(self.shape) or (x.shape[0], *x.shape[2:]) != (self.batch, *self.shape):
            raise ShapeError("the rows do not fit the ring buffer", location=user_location(),
                             expected=f"[{self.batch}, n, {', '.join(map(str, self.shape))}]",
                             received=str(x.type))  # fmt: skip
        n = x.shape[1]
        if n > self.capacity:
            raise ShapeError("more rows are pushed than the ring buffer has", location=user_location(),
                             expected=f"up to {self.capacity}", received=n)  # fmt: skip
        if x.dtype != self.data.dtype:
            x = x.to(self.data.dtype)
        if n:
            flat = reshape(self.data, shape=(self.batch, self.capacity, -1))
            made = launch(write_slots, (self.batch, n), reshape(x, shape=(self.batch, n, -1)), self.count, flat)
            self.data = reshape(made, shape=self.data.shape)
            self.count = self.count + n
        return self

    def last(self, n: int) -> Tensor:
        """The last n rows, the oldest first: [batch, n, *shape]; rows that were never pushed are 0.

        Raises:
            ArgumentError: n is not in 0 to the capacity.
        """
        n = to_python_numbers(n)
        if not isinstance(n, int) or not 0 <= n <= self.capacity:
            raise ArgumentError(f"the last {n!r} rows of a ring buffer", location=user_location(),
                                expected=f"0 to {self.capacity}")  # fmt: skip
        places = (self.count - n + iota(shape=(n,), dtype=int32) + self.capacity) % self.capacity
        return gather(self.data, places, axis=1)

    def _slots(self, index: Any) -> tuple[int, int]:
        if isinstance(index, Page):
            first, size = index.number * index.size, index.size
        elif isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            first, size = int(index), 1
        else:
            raise ArgumentError("a ring buffer is indexed by a slot or a page", location=user_location(),
                                received=type(index).__name__)  # fmt: skip
        if not 0 <= first <= first + size <= self.capacity:
            raise OutOfBoundsError(
                "slots outside the ring buffer", location=user_location(), expected=f"slots 0 to {self.capacity - 1}",
                received=f"{first} to {first + size - 1}",
            )  # fmt: skip
        return first, size

    def __getitem__(self, index: Any) -> Tensor:
        first, size = self._slots(index)
        found = self.data[:, first : first + size]
        return found if isinstance(index, Page) else found[:, 0]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set a slot, or of a page all slots, or the row of its position if `value` lacks the axis of positions."""
        first, size = self._slots(index)
        value = as_tensor(value)
        row = (self.batch, *self.shape)
        if isinstance(index, Page) and tuple(value.shape) != (self.batch, size, *self.shape):
            first, size = first + index.offset, 1
        if size == 1 and tuple(value.shape) != (self.batch, 1, *self.shape):
            if tuple(value.shape) not in (row, self.shape, ()):
                raise ShapeError("the value does not fit the ring buffer", location=user_location(),
                                 expected=f"{row}", received=str(value.type))  # fmt: skip
            value = reshape(broadcast_to(value, shape=row), shape=(self.batch, 1, *self.shape))
        self.data = self.data.at[:, first : first + size].set(value)


class PageTable:
    """Which page of a buffer holds which positions; pages are given on demand, and taken back by an eviction policy.

    >>> table = PageTable(page_size=4, num_pages=2)
    >>> [table.allocate_page(p).number for p in (0, 5, 1)]
    [0, 1, 0]
    >>> table.allocate_page(9).number, table.evicted
    (1, [1])

    Raises:
        ArgumentError: a size is not positive, or there is no such policy.
    """

    def __init__(self, page_size: int, num_pages: int, policy: str | None = "lru") -> None:
        check_sizes("page table", page_size=page_size, num_pages=num_pages)
        self.page_size, self.num_pages, self.policy = page_size, num_pages, check_policy(policy)
        self.evicted: list[int] = []  # the logical pages that were taken back, in order
        self._pages: OrderedDict[int, int] = OrderedDict()  # logical to physical, the oldest first
        self._uses: dict[int, int] = {}

    def __contains__(self, position: int) -> bool:
        return position // self.page_size in self._pages

    def _key(self, position: Any) -> int:
        if not isinstance(position, (int, np.integer)) or isinstance(position, bool) or position < 0:
            raise ArgumentError(f"position {position!r} of a page table", location=user_location(),
                                expected="an integer, 0 or more")  # fmt: skip
        return int(position) // self.page_size

    def get_page(self, position: int) -> Page:
        """The page of a position.

        Raises:
            OutOfBoundsError: it has none: it was never written, or evicted.
        """
        key = self._key(position)
        if key not in self._pages:
            what = "was evicted" if key in self.evicted else "was never written"
            raise OutOfBoundsError(f"position {position} has no page: it {what}", location=user_location(),
                                   expected=f"a position of {sorted(self._pages)} pages of {self.page_size}",
                                   received=position)  # fmt: skip
        return self._touch(key, int(position))

    def allocate_page(self, position: int) -> Page:
        """The page of a position, a new one if it has none; if no page is free, the policy evicts one.

        Raises:
            OutOfBoundsError: no page is free, and there is no policy: the cache would be written past its end.
        """
        key = self._key(position)
        if key not in self._pages:
            taken = set(self._pages.values())
            free = next((n for n in range(self.num_pages) if n not in taken), None)
            if free is None:
                free = self._evict(position)
            self._pages[key], self._uses[key] = free, 0
        return self._touch(key, int(position))

    def _evict(self, position: int) -> int:
        if self.policy is None:
            raise OutOfBoundsError(
                f"position {position} would be written past the cache's end", location=trace_location(),
                expected=f"{self.num_pages} pages of {self.page_size}", received="all in use",
                suggestion='set an eviction policy: @ts.cache.eviction_policy("lru")',
            )  # fmt: skip
        key = min(self._pages, key=lambda k: self._uses[k]) if self.policy == "lfu" else next(iter(self._pages))
        self.evicted.append(key)
        del self._uses[key]
        return self._pages.pop(key)

    def _touch(self, key: int, position: int) -> Page:
        self._uses[key] += 1
        if self.policy == "lru":
            self._pages.move_to_end(key)
        return Page(self._pages[key], self.page_size, position % self.page_size)

    def clear(self) -> None:
        """Free all pages."""
        self._pages.clear()
        self._uses.clear()
        self.evicted.clear()


class Cache(Stateful):
    """Base class of caches: a subclass declares its policies at its methods.

    `@ts.cache.eviction_policy("lru")` at the method that reads sets the policy of the cache's page tables.
    `@ts.cache.write_through` at the method that writes keeps what is written in `backing` too, so that a read of an
    evicted position writes it again instead of failing.
    """

    backing: dict[Any, Any]

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        found = {getattr(m, "__eviction__", None) for m in vars(cls).values()} - {None}
        if len(found) > 1:
            raise ArgumentError(f"{cls.__name__} has several eviction policies", location=user_location(),
                                received=", ".join(sorted(map(str, found))))  # fmt: skip

    def clear(self) -> None:
        """Forget all positions."""
        for table in _find_tables(self):
            table.clear()
        self.__dict__.pop("backing", None)


def _find_tables(cache: Any) -> list[PageTable]:
    return [v for v in vars(cache).values() if isinstance(v, PageTable)]


def eviction_policy(policy: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of a cache's reading method: which page is evicted if none is free: "lru", "fifo" or "lfu".

    Raises:
        ArgumentError: there is no such policy.
    """
    check_policy(policy)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, position: int, *args: Any, **named: Any) -> Any:
            _apply_policy(self)
            backing = self.__dict__.get("backing", {})
            lost = [k for k in backing if k == position or _same_page(self, k, position)]
            if lost and any(position not in t for t in _find_tables(self)):
                for each in lost:
                    backing[each][0](self, each, *backing[each][1])
            return method(self, position, *args, **named)

        read.__eviction__ = policy  # type: ignore[attr-defined]
        return read

    return decorate


def _same_page(cache: Any, one: int, other: int) -> bool:
    return any(one // t.page_size == other // t.page_size for t in _find_tables(cache))


def _apply_policy(cache: Any) -> None:
    """Give the tables of a cache the policy that its class declares."""
    found = {getattr(m, "__eviction__", None) for c in type(cache).__mro__ for m in vars(c).values()} - {None}
    for policy in found:
        for table in _find_tables(cache):
            table.policy = policy


def write_through(method: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a cache's writing method `(self, position, *values)`: what it writes is kept in `backing` too."""

    @functools.wraps(method)
    def write(self: Any, position: int, *values: Any) -> Any:
        _apply_policy(self)
        found = method(self, position, *values)
        self.__dict__.setdefault("backing", {})[position] = method, values
        return found

    return write


def check_policy(policy: str | None) -> str | None:
    """An eviction policy, or None for none.

    Raises:
        ArgumentError: there is no such policy.
    """
    if policy is not None and policy not in POLICIES:
        raise ArgumentError(f"there is no eviction policy {policy!r}", location=user_location(),
                            expected=", ".join(POLICIES))  # fmt: skip
    return policy


def check_sizes(what: str, **sizes: Any) -> None:
    """Refuse sizes that are not positive integers.

    Raises:
        ArgumentError: one is not.
    """
    for name, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"a {what} with {name} {value!r}", location=user_location(),
                                expected="a positive integer")  # fmt: skip
