"""Key-value cache: the keys and values of attention as state, in pages or in a ring, updated in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError, trace_location, user_location
from tessera.core.types import DType, as_dtype, bool_, f32, int32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import full
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import concatenate, expand_dims, gather, iota, permute, reshape
from tessera.ops.tensor.sorting import argsort
from tessera.state.caches import Cache, check_sizes
from tessera.state.stateful_objects import stateful
from tessera.stdlib.paged_attention import append_pages, paged_attention


class RollingWindow:
    """The policy of a cache that keeps the last positions alone, in a ring."""

    def __repr__(self) -> str:
        return "rolling_window"


rolling_window = RollingWindow()


@dataclass(frozen=True)
class KVCacheType:
    """Sizes and element type of key-value caches; a call with the sizes that have names makes one.

    >>> kind = KVCache["B", 2, 16, 4] @ rolling_window
    >>> kind, kind(B=3).window
    (KVCache['B', 2, 16, 4, f32] @ rolling_window, 16)
    """

    sizes: tuple[int | str, ...]
    dtype: DType
    rolling: bool = False

    def __matmul__(self, policy: Any) -> KVCacheType:
        if not isinstance(policy, RollingWindow):
            raise ArgumentError(
                f"a key-value cache has no policy {policy!r}", location=user_location(), expected="ts.rolling_window",
                suggestion='a cache is moved with cache.to("cuda:0")',
            )  # fmt: skip
        return replace(self, rolling=True)

    def __call__(self, *, page_size: int = 64, step: int = 1, **sizes: int) -> KVCache:
        """A cache; with a rolling window the number of positions is the window.

        Raises:
            ArgumentError: a name has no size, or there is no such name.
        """
        names = {n for n in self.sizes if isinstance(n, str)}
        if names != sizes.keys():
            raise ArgumentError(
                f"the sizes of {self} are not known", location=user_location(),
                expected=", ".join(f"{n}=" for n in self.sizes if n in names) or "no sizes",
                received=", ".join(f"{n}=" for n in sizes) or "nothing",
            )  # fmt: skip
        batch, heads, longest, head_size = (sizes[n] if isinstance(n, str) else n for n in self.sizes)
        window = longest if self.rolling else None
        return KVCache(batch, heads, longest, head_size, self.dtype, page_size=page_size, window=window, step=step)

    def __repr__(self) -> str:
        listed = ", ".join(map(repr, self.sizes))
        return f"KVCache[{listed}, {self.dtype}]" + (" @ rolling_window" if self.rolling else "")


class KVCache(Cache):
    """The keys and values of a batch of sequences, with grouped queries and a sliding window if wanted.

    `KVCache(batch, heads, longest, head_size)` holds up to `longest` positions of each sequence, in whole pages. With a
    `window`, only so many earlier positions are seen, and memory holds them alone, in a ring: sequences may be of any
    length. `lengths` [batch] counts the positions so far. A step adds up to `step` positions to a ring; without a
    window as many as there is room.

    >>> cache = KVCache(1, 2, 16, 4)
    >>> one = np.ones((1, 1, 2, 4), np.float32)
    >>> cache.append(one, 3 * one).attend(np.zeros((1, 1, 4, 4), np.float32)).shape
    (1, 1, 4, 4)
    >>> cache.lengths
    Tensor([1], int32)

    `KVCache["B", "H", 16, 4, bf16] @ rolling_window` is a `KVCacheType`, which makes such caches.

    Raises:
        ArgumentError: a size is not positive.
    """

    def __class_getitem__(cls, sizes: Any) -> KVCacheType:
        """A type of caches: batch, heads, positions and head size (numbers or names), and the element type."""
        listed = sizes if isinstance(sizes, tuple) else (sizes,)
        dtype = as_dtype(listed[4]) if len(listed) == 5 else f32
        named = all(isinstance(n, (int, str)) and not isinstance(n, bool) for n in listed[:4])
        if len(listed) not in (4, 5) or not named:
            raise ArgumentError(
                "the sizes of a key-value cache are wrong", location=user_location(), received=repr(sizes),
                expected="KVCache[batch, heads, longest, head_size] or KVCache[..., dtype], of numbers or names",
            )  # fmt: skip
        return KVCacheType(tuple(listed[:4]), dtype)

    def __init__(
        self, batch: int, heads: int, longest: int, head_size: int, dtype: DType = f32, *, page_size: int = 64,
        window: int | None = None, step: int = 1,
    ) -> None:  # fmt: skip
        check_sizes("key-value cache", batch=batch, heads=heads, longest=longest, head_size=head_size, step=step,
                    page_size=page_size, **({} if window is None else {"window": window}))  # fmt: skip
        self.batch, self.heads, self.longest, self.head_size = batch, heads, longest, head_size
        self.window, self.page_size = window, page_size
        held = longest if window is None else min(longest, window) + step - 1
        count = -(-held // page_size)
        self.step = step if window is not None else count * page_size
        shape = (batch * count, heads, page_size, head_size)
        self.keys, self.values = (zeros(shape, dtype=as_dtype(dtype)) for _ in range(2))
        self.table = Tensor(np.arange(batch * count, dtype=np.int32).reshape(batch, count))
        self.lengths = zeros((batch,), dtype=int32)
        self.added = zeros((batch,), dtype=int32)

    @stateful
    def append(self, k: Any, v: Any, count: Any = None) -> KVCache:
        """Add k and v [B, S, heads, head_size] after what is there, of sequence b the first count[b]. Returns itself.

        Raises:
            ShapeError, DTypeError: k, v or the counts do not fit.
            ArgumentError: a count is below 0 or above S.
            OutOfBoundsError: a sequence would be longer than the cache, and the lengths are known.
            ExecutionError: it would be, in a compiled program.
        """
        k, v = as_tensor(k), as_tensor(v)
        if k.ndim != 4 or k.shape[0] != self.batch or (self.window is not None and k.shape[1] > self.step):
            raise ShapeError(
                "keys do not fit the cache", location=user_location(), received=str(k.type),
                expected=f"[{self.batch}, up to {self.step}, {self.heads}, {self.head_size}]",
                suggestion="make the cache with a larger step" if self.window is not None else None,
            )  # fmt: skip
        rows = k.shape[1]
        count = full(shape=(self.batch,), value=rows, dtype=int32) if count is None else self._check_count(count, rows)
        ring = self.window is not None
        if not ring:
            self._check_room(count)
        self.keys, self.values = append_pages(self.keys, self.values, k, v, self.table, self.lengths, count, ring=ring)
        self.lengths, self.added = self.lengths + count, count
        return self

    def _check_count(self, count: Any, rows: Any) -> Tensor:
        """The rows to append of each sequence (int32), checked where the host knows them."""
        count = as_tensor(count).to(int32)
        if count.shape not in ((), (self.batch,)):
            raise ShapeError(
                "count does not fit the cache", location=user_location(), expected=f"[{self.batch}]",
                received=str(count.type),
            )  # fmt: skip
        known = isinstance(count.data, np.ndarray) and isinstance(rows, int)
        if known and np.any((count.data < 0) | (count.data > rows)):
            raise ArgumentError(
                "so many rows cannot be appended", location=user_location(), received=str(count.tolist()),
                expected=f"0 to {rows} for each sequence",
            )  # fmt: skip
        return count

    def _check_room(self, count: Tensor) -> None:
        """Refuse rows past the end, where the host knows the lengths and counts; a program checks its own."""
        held, new = self.lengths.data, count.data
        if not isinstance(held, np.ndarray) or not isinstance(new, np.ndarray):
            return
        full = np.broadcast_to(held + new > self.step, held.shape)
        if full.any():
            b = int(full.argmax())
            more = int(np.broadcast_to(new, held.shape)[b])
            raise OutOfBoundsError(
                f"sequence {b} is written past the end of its cache", location=trace_location(),
                expected=f"up to {self.step} positions", received=f"{int(held[b])} and {more} more",
                suggestion="make the cache longer, or a ring of the last positions: KVCache(..., window=...)",
            )  # fmt: skip

    def attend(self, q: Any, scale: float | None = None) -> Tensor:
        """Attention of the queries of the last positions added, [B, S, H, head_size], to the cache (causal).

        H is a multiple of the cache's heads.
        """
        before = self.lengths - self.added
        return paged_attention(
            q, self.keys, self.values, self.table, before, self.added, scale=scale, window=self.window or 0,
            ring=self.window is not None,
        )  # fmt: skip

    @stateful
    def truncate(self, lengths: Any) -> KVCache:
        """Keep the first lengths[b] positions of each sequence: later ones are written again. Returns itself.

        Raises:
            ArgumentError: the cache is a ring, whose old positions are gone.
        """
        if self.window is not None:
            raise ArgumentError("a ring cannot be truncated: its old positions are overwritten",
                                location=user_location())  # fmt: skip
        self.lengths = as_tensor(lengths).to(int32)
        self.added = self.added * 0
        return self

    @stateful
    def prune(self, keep: Any = None, *, first: int = 0, last: int | None = None) -> KVCache:
        """Forget positions: keep those of the mask [batch, n], or the `first` and the `last` ones. Returns itself.

        What is kept moves to the front in its order, and `lengths` counts it; later positions than the mask's are
        forgotten. Keys stay as they were rotated: queries go on with the positions of the text, not with `lengths`.
        `first=4, last=n` keeps attention sinks and a window (StreamingLLM, Xiao et al. 2024).

        Raises:
            ArgumentError: the cache is a ring, or it is not said what to keep.
            ShapeError: the mask has another shape.
        """
        if self.window is not None:
            raise ArgumentError("a ring cannot be pruned: it keeps the last positions", location=user_location())
        if (keep is None) == (last is None):
            raise ArgumentError(
                "it is not said what a pruned cache keeps", location=user_location(),
                expected="a mask [batch, n], or first= and last=", received="both" if last is not None else "neither",
            )  # fmt: skip
        size, place = self.keys.shape[2], iota(shape=(self.step,), dtype=int32)
        lengths = expand_dims(self.lengths, -1)
        if keep is None:
            check_sizes("pruned cache", **{"first + 1": first + 1, "last + 1": last + 1})  # type: ignore[operator]
            held = (place < first) | (place >= lengths - last)
        else:
            held = self._widen_mask(keep)
        held = held & (place < lengths)
        order = argsort(where(held, place, place + self.step), axis=-1)
        slots = gather(self.table, place // size, axis=1) * size + place % size
        source, target = (reshape(x, shape=(-1,)) for x in (take_along_axis(slots, order, axis=1), slots))
        self.keys, self.values = (_move_rows(pages, source, target) for pages in (self.keys, self.values))
        self.lengths = sum(held.to(int32), axis=-1).to(int32)
        self.added = self.added * 0
        return self

    def _widen_mask(self, keep: Any) -> Tensor:
        keep = as_tensor(keep)
        if keep.ndim != 2 or keep.shape[0] != self.batch or keep.shape[1] > self.step or keep.dtype != bool_:
            raise ShapeError(
                "the mask of kept positions does not fit the cache", location=user_location(),
                expected=f"[{self.batch}, up to {self.step}] of bool", received=str(keep.type),
            )  # fmt: skip
        rest = zeros((self.batch, self.step - keep.shape[1]), dtype=bool_)
        return concatenate([keep, rest], axis=1) if rest.shape[1] else keep

    def clear(self) -> None:
        """Forget all positions."""
        super().clear()
        self.lengths, self.added = zeros((self.batch,), dtype=int32), zeros((self.batch,), dtype=int32)


def _move_rows(pages: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Pages [pages, heads, size, D] whose rows at `target` (page · size + row) are those at `source`."""
    count, heads, size, width = pages.shape
    rows = reshape(permute(pages, axes=(0, 2, 1, 3)), shape=(count * size, heads, width))
    moved = rows.at[target].set(gather(rows, source, axis=0))
    return permute(reshape(moved, shape=(count, size, heads, width)), axes=(0, 2, 1, 3))
