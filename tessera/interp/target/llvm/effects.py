"""Instructions that touch memory: load, store, alloca and the atomics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.access import Access, access
from tessera.interp.target.llvm.arith import Binary, as_unsigned, float_function, integer_function
from tessera.interp.target.llvm.float_math import float_math
from tessera.interp.target.llvm.frame import Frame, Step
from tessera.interp.target.llvm.lanes import Value, widen
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.syntax import Instruction
from tessera.interp.target.llvm.types import Aggregate, Float, Type

# From an instruction, the registers of its operands and of its result, to what it does.
Build = Callable[[Instruction, tuple[int, ...], int], Step]


def _load(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    (pointer,), type = args, i.source
    align = i.align or type.align
    if isinstance(type, Aggregate):
        return lambda f: f.w.__setitem__(out, _load_parts(f.memory, f.w[pointer], type, align))
    kind = access(type, align)

    def step(f: Frame) -> None:
        f.w[out] = f.memory.load(f.w[pointer], kind)

    return step


def _load_parts(memory: Memory, address: np.ndarray, type: Type, align: int) -> Value:
    """A scalar or vector at once, an aggregate member by member."""
    if not isinstance(type, Aggregate):
        return memory.load(address, access(type, align))
    return tuple(_load_parts(memory, address + at, part, gcd(align, at)) for at, part in type.parts)


def _store(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    (value, pointer), type = args, i.source
    align = i.align or type.align
    if isinstance(type, Aggregate):
        return lambda f: _store_parts(f.memory, f.w[pointer], f.w[value], type, align)
    kind = access(type, align)

    def step(f: Frame) -> None:
        f.memory.store(f.w[pointer], f.w[value], kind)

    return step


def _store_parts(memory: Memory, address: np.ndarray, value: Value, type: Type, align: int) -> None:
    if not isinstance(type, Aggregate):
        memory.store(address, np.asarray(value), access(type, align))
        return
    for (at, part), member in zip(type.parts, value, strict=True):
        _store_parts(memory, address + at, member, part, gcd(align, at))


def _alloca(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    name, size, align = f"alloca %{i.result}", i.source.stride, i.align or i.source.align

    def step(f: Frame) -> None:
        count = int(f.w[args[0]].max()) if args else 1
        address = f.memory.allocate(name, size * count, align, f.n)
        f.allocated.append(int(address[0]))
        f.w[out] = address

    return step


def _rounds(address: np.ndarray) -> Iterator[np.ndarray]:
    """Sets of lanes with different addresses: those that share one take turns, in order."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(first)
    turn = np.arange(len(address)) - np.repeat(starts, np.diff(np.r_[starts, len(address)]))
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


def _wrap_up(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, np.zeros_like(old), old + old.dtype.type(1))


def _wrap_down(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_FLOAT_WORDS = {"fmax": "maxnum", "fmin": "minnum", "fmaximum": "maximum", "fminimum": "minimum"}
_SIGNED_WORDS: dict[str, Binary] = {"max": np.maximum, "min": np.minimum, "nand": lambda a, b: ~(a & b)}
_UNSIGNED_WORDS: dict[str, Binary] = {
    "umax": np.maximum,
    "umin": np.minimum,
    "uinc_wrap": _wrap_up,
    "udec_wrap": _wrap_down,
}


def _change(word: str, type: Type) -> Binary:
    """What an atomicrmw makes of the old value and its operand."""
    if word == "xchg":
        return lambda old, new: new
    if word in _SIGNED_WORDS:
        return _SIGNED_WORDS[word]
    if word in _UNSIGNED_WORDS:
        return as_unsigned(_UNSIGNED_WORDS[word], type)
    if word in ("add", "sub", "and", "or", "xor"):
        return integer_function(word, type)
    if word in ("fadd", "fsub") and isinstance(type, Float):
        return float_function(word, type)
    found = float_math(_FLOAT_WORDS.get(word, ""), type)
    if found is None:
        raise UnsupportedOpError(f"atomicrmw {word} is not supported")
    return found


def _in_turn(f: Frame, pointer: np.ndarray, kind: Access, change: Callable) -> np.ndarray:
    """Change memory lane after lane; the old values. `change` maps old values and lanes to new values."""
    address = widen(pointer, f.n)
    old = np.array(widen(f.memory.load(address, kind, "atomic update"), f.n))  # checks all lanes beforehand
    for lanes in _rounds(address):
        old[lanes] = now = f.memory.load(address[lanes], kind, "atomic update")
        f.memory.store(address[lanes], change(now, lanes), kind, "atomic update")
    return old


def _atomic(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    (pointer, operand), kind = args, access(i.type, i.align)
    change = _change(i.word, i.type)

    def step(f: Frame) -> None:
        by = widen(f.w[operand], f.n)
        f.w[out] = _in_turn(f, f.w[pointer], kind, lambda now, lanes: change(now, by[lanes]))

    return step


def _exchange(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    (pointer, expected, new), kind = args, access(i.operands[1].type, i.align)

    def step(f: Frame) -> None:
        want, put = (widen(f.w[register], f.n) for register in (expected, new))
        old = _in_turn(f, f.w[pointer], kind, lambda now, at: np.where(now == want[at], put[at], now))
        f.w[out] = (old, old == want)

    return step


TABLE: dict[str, Build] = {
    "load": _load,
    "store": _store,
    "alloca": _alloca,
    "atomicrmw": _atomic,
    "cmpxchg": _exchange,
    "fence": lambda i, args, out: lambda f: None,
}
