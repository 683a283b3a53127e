"""Embedded languages: classes whose methods are programs in a vocabulary of patterns, compiled as jit functions.

The vocabulary is that of attention: `tiled_attention` (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao
et al. 2022), `windowed_attention` (blocks of queries that see a window of keys, Beltagy et al. 2020) and
`masked_attention`.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.nn import softmax
from tessera.ops.tensor.shape import concatenate, iota, reshape

LOWEST = -1e30  # of a score that is masked off: its weight is 0 in every float type that is widened to f32


def _check_operands(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (as_tensor(x) for x in (q, k, v))
    fits = min(len(x.shape) for x in (q, k, v)) >= 2 and q.shape[-1] == k.shape[-1] and k.shape[-2] == v.shape[-2]
    if not fits or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ShapeError(
            "the operands of attention do not fit", location=user_location(),
            expected="q [..., S, D], k [..., T, D], v [..., T, E]", received=f"{q.type}, {k.type}, {v.type}",
        )  # fmt: skip
    return q, k, v


def _check_count(name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(
            f"{name} is no size", location=user_location(), expected=f"an int of {least} or more", received=repr(value)
        )
    return value


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return matmul(q, matrix_transpose(k)) * (1.0 / math.sqrt(int(q.shape[-1])))


class AttentionVocabulary:
    """The patterns that a class under `@ts.dsl` may use: each gives [..., S, E] for q [..., S, D], k and v."""

    def tiled_attention(
        self, q: Any, k: Any, v: Any, tile_size: int = 64, use_online_softmax: bool = True, causal: bool = False
    ) -> Tensor:
        """Attention over tiles of keys: no more than `tile_size` columns of scores are alive at once.

        With the online softmax one pass keeps a running maximum and sum; without it, a first pass finds them.
        """
        q, k, v = _check_operands(q, k, v)
        tile = _check_count("tile_size", tile_size)
        count = int(k.shape[-2])
        starts = range(0, count, tile)
        parts = [(_mask_causal(_scores(q, _rows(k, s, s + tile)), s, causal), _rows(v, s, s + tile)) for s in starts]
        if use_online_softmax:
            return _accumulate_online(parts)
        top = _largest([reduce.max(s, axis=-1, keepdims=True) for s, _ in parts])
        weights = [e.exp(s - top) for s, _ in parts]
        total = _add_up([reduce.sum(w, axis=-1, keepdims=True) for w in weights])
        return _add_up([matmul(w, x) for w, (_, x) in zip(weights, parts, strict=True)]) / total

    def windowed_attention(self, q: Any, k: Any, v: Any, window_size: int = 256, overlap: int = 0) -> Tensor:
        """Attention of blocks: the queries of a block of `window_size` see its keys and `overlap` more on each side."""
        q, k, v = _check_operands(q, k, v)
        window, more = _check_count("window_size", window_size), _check_count("overlap", overlap, 0)
        length = int(q.shape[-2])
        if length != int(k.shape[-2]):
            raise ShapeError(
                "windows need as many keys as queries",
                location=user_location(),
                expected=str(q.type),
                received=str(k.type),
            )
        blocks = []
        for start in range(0, length, window):
            low, high = max(start - more, 0), min(start + window + more, length)
            weights = softmax(_scores(_rows(q, start, start + window), _rows(k, low, high)), axis=-1)
            blocks.append(matmul(weights, _rows(v, low, high)))
        return concatenate(blocks, axis=-2)

    def masked_attention(self, q: Any, k: Any, v: Any, mask: Any) -> Tensor:
        """Attention where `mask` [S, T] is true."""
        q, k, v = _check_operands(q, k, v)
        scores = _scores(q, k)
        return matmul(softmax(e.where(as_tensor(mask), scores, LOWEST), axis=-1), v)


def _rows(x: Tensor, low: int, high: int) -> Tensor:
    return x[..., low : min(high, int(x.shape[-2])), :]


def _mask_causal(scores: Tensor, first: int, causal: bool) -> Tensor:
    if not causal:
        return scores
    rows, columns = int(scores.shape[-2]), int(scores.shape[-1])
    place = reshape(iota(shape=(rows,), axis=0), (rows, 1))
    return e.where(place >= iota(shape=(columns,), axis=0) + first, scores, LOWEST)


def _largest(values: list[Tensor]) -> Tensor:
    top = values[0]
    for value in values[1:]:
        top = e.maximum(top, value)
    return top


def _add_up(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _accumulate_online(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One pass: what was summed so far is scaled down whenever the running maximum grows."""
    top = total = out = None
    for scores, values in parts:
        here = reduce.max(scores, axis=-1, keepdims=True)
        new = here if top is None else e.maximum(top, here)
        weights = e.exp(scores - new)
        added, product = reduce.sum(weights, axis=-1, keepdims=True), matmul(weights, values)
        if top is None:
            total, out = added, product
        else:
            scale = e.exp(top - new)
            total, out = total * scale + added, out * scale + product
        top = new
    assert out is not None and total is not None
    return out / total


def dsl(kind: type) -> type:
    """A class whose methods use the vocabulary; `compile_dsl(instance)` compiles them.

    >>> @dsl
    ... class Local:
    ...     def near(self, q, k, v):
    ...         return self.windowed_attention(q, k, v, window_size=2)
    >>> x = Tensor([[1.0, 1.0]] * 4)
    >>> compile_dsl(Local()).near(x, x, x)[0]
    Tensor([1., 1.], f32)

    Raises:
        ArgumentError: it is no class.
    """
    if not inspect.isclass(kind):
        raise ArgumentError("@ts.dsl decorates a class", location=user_location(), received=repr(kind)[:80])
    return kind if issubclass(kind, AttentionVocabulary) else type(kind.__name__, (kind, AttentionVocabulary), {
        "__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__,
    })  # fmt: skip


def compile_dsl(program: Any, target: str | None = None, **options: Any) -> SimpleNamespace:
    """The methods of a program in the vocabulary, as jit functions under their names; settings (`window=64`) are
    static.

    Raises:
        ArgumentError: it is no instance of a class under `@ts.dsl`, or has no method.
    """
    if not isinstance(program, AttentionVocabulary):
        raise ArgumentError(
            "this is no program of a language", location=user_location(),
            expected="an instance of a class under @ts.dsl", received=repr(program)[:80],
        )  # fmt: skip
    inherited = {*dir(AttentionVocabulary), "compile"}
    names = [n for n in dir(type(program)) if n not in inherited and not n.startswith("_")]
    methods = {n: getattr(program, n) for n in names if callable(getattr(program, n))}
    if not methods:
        raise ArgumentError("the program has no method", location=user_location(), received=type(program).__name__)
    made = {}
    for name, method in methods.items():
        parameters = inspect.signature(method).parameters.values()
        static = [p.name for p in parameters if p.default is not p.empty]
        made[name] = Jit(method, static_argnames=static, target=target, **options)
    return SimpleNamespace(**made)
