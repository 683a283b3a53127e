"""Atomic operations: lanes that meet at one address take turns in the order of lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.interp.target.ptx.address import Target, known_words, spots, target
from tessera.interp.target.ptx.decode import Decoder, rule
from tessera.interp.target.ptx.floats import flush
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine, Step
from tessera.interp.target.ptx.moves import observe
from tessera.interp.target.ptx.operands import Reader, Writer, parts_of
from tessera.interp.target.ptx.syntax import Instruction, Name, Operand
from tessera.interp.target.ptx.types import TYPES, Type, bits_of, values

Update = Callable[..., Any]
_ASSOCIATIVE: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_ASSOCIATIVE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ZERO, _ONE = np.uint32(0), np.uint32(1)
_OTHER: dict[str, Update] = {
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, _ZERO, old + _ONE),
    "dec": lambda old, b: np.where((old == _ZERO) | (old > b), b, old - _ONE),
}


@rule("atom", "red")
def _(d: Decoder, inst: Instruction) -> Step:
    """The order that hardware leaves open is that of lanes here."""
    if inst.op[1] == "async":
        raise d.unsupported(inst)
    type = next((w for w in inst.op[1:] if w in TYPES), "")  # vectors have the operation behind it
    inst = replace(inst, op=(*(w for w in inst.op if w != type), type))
    t = TYPES[type]
    words = [w for w in inst.op[1:-1] if w in _ASSOCIATIVE or w in _OTHER]
    known_words(d, inst, "noftz", "v2", "v4", "v8", *words)
    (name,) = words
    returns = inst.op[0] == "atom"
    where = target(d, inst, inst.operands[returns])
    sources = inst.operands[returns + 1 : len(inst.operands) - ("L2::cache_hint" in inst.op)]
    if len(sources) != (2 if name == "cas" else 1):
        raise d.unsupported(inst)
    if t.bits > 64:
        return _whole(d, inst, where, name, sources)
    vector = [parts_of(o) for o in sources]
    readers = [[d.reader(p, t) for p in parts] for parts in zip(*vector, strict=True)]
    results = parts_of(inst.operands[0]) if returns else (Name("_"),) * len(readers)
    writers = [d.writer(r, t) for r in results]
    return _step(where, name, t, readers, writers, returns)


def _step(where: Any, name: str, t: Type, readers: list[list[Reader]], writers: list[Writer], returns: bool) -> Step:
    size, kind = t.bits // 8, "atomic" if returns else "write"

    def update(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size * len(readers)):
            observe(m, spot, size * len(readers), kind, strong=True)
            index, cells = spot.lanes.compress(spot.offset) // size, m.flat[spot.space].views[size]
            # In global memory a float sum flushes subnormal numbers.
            flushes = t.name == "f32" and name == "add" and spot.space == "global"
            for k, (read, write) in enumerate(zip(readers, writers, strict=True)):
                sources = [spot.lanes.compress(bits_of(r(m, spot.lanes), t, t.bits)) for r in read]
                old = _update(cells, index + k, sources, name, t, flushes, returns)
                if old is not None:
                    write(m, spot.lanes, values(spot.lanes.spread(old), t))

    return update


def _whole(d: Decoder, inst: Instruction, where: Target, name: str, sources: tuple[Operand, ...]) -> Step:
    """An exchange of 128 bits at once: two registers of 64."""
    u64, size = TYPES["u64"], 16
    readers = [[d.reader(p, u64) for p in parts_of(o)] for o in sources]
    writers = [d.writer(p, u64) for p in parts_of(inst.operands[0])]
    function = {"exch": _OTHER["exch"], "cas": _exchange_wide}[name]

    def update(m: Machine, lanes: Lanes) -> None:
        for spot in spots(m, lanes, where, size):
            observe(m, spot, size, "atomic", strong=True)
            some, cells = spot.lanes, m.flat[spot.space].views[8].reshape(-1, 2)
            given = [np.stack([some.compress(r(m, some)) for r in parts], axis=1) for parts in readers]
            old = _take_turns(cells, some.compress(spot.offset) // size, given, function, u64)
            for k, write in enumerate(writers):
                write(m, some, some.spread(old[:, k]))

    return update


def _exchange_wide(old: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.where((old == b).all(axis=1, keepdims=True), c, old)


def _update(
    cells: np.ndarray, index: np.ndarray, sources: list[np.ndarray], name: str, t: Type, flushes: bool, returns: bool
) -> np.ndarray | None:
    """Apply an operation; what each lane found, where that is asked for."""
    old, function = None, _function(name, t)
    if flushes:
        sources = [flush(t, s.view(t.dtype)).view(s.dtype) for s in sources]
    if not returns and name in _ASSOCIATIVE and t.parts == 1 and (t.kind != "f" or t.bits >= 32):
        # `at` goes through the lanes one by one: the same turns, in machine code.
        function.at(cells.view(t.dtype), index, values(sources[0], t))  # type: ignore[attr-defined]
    else:
        old = _take_turns(cells, index, sources, function, t)
    if flushes:  # sums on the way are not looked at: what is left is
        cells[index] = flush(t, cells[index].view(t.dtype)).view(cells.dtype)
    return old if returns else None


def _function(name: str, t: Type) -> Update:
    """From the old value and the operands to the new value."""
    if t.kind == "f" and name in ("min", "max"):
        return np.fmin if name == "min" else np.fmax
    return _ASSOCIATIVE.get(name) or _OTHER[name]


def _take_turns(
    cells: np.ndarray, index: np.ndarray, sources: list[np.ndarray], function: Update, t: Type
) -> np.ndarray:
    old = np.empty((len(index), *cells.shape[1:]), cells.dtype)
    for turn in turns(index):
        old[turn] = cells[index[turn]]
        new = function(values(old[turn], t), *(values(s[turn], t) for s in sources))
        cells[index[turn]] = bits_of(np.asarray(new), t, t.bits)
    return old


def turns(index: np.ndarray) -> list[np.ndarray]:
    """Positions divided so that no index comes twice in one part.

    >>> [p.tolist() for p in turns(np.array([5, 7, 5]))]
    [[0, 1], [2]]
    """
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    by_rank = order[np.argsort(rank, kind="stable")]
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])


def reduce_cells(cells: np.ndarray, index: np.ndarray, bits: np.ndarray, name: str, t: Type) -> None:
    """A reduction into memory whose result nobody reads, in the order of the values."""
    _take_turns(cells, index, [bits], _function(name, t), t)
