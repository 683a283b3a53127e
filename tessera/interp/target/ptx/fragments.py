"""How the registers of a warp hold a matrix, and the arithmetic of tensor cores on whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import ml_dtypes
import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine, whole_teams
from tessera.interp.target.ptx.operands import Reader, Writer
from tessera.interp.target.ptx.types import Type

_TF32 = np.uint32(0xFFFFE000)


@lru_cache(maxsize=256)
def left(rows: int, depth: int, per: int) -> np.ndarray:
    """For each element [rows, depth] of A its slot: lane * elements a lane + element; `per` elements a register.

    A lane holds, register by register, `per` neighbours along the depth; registers go down by 8 rows, then along.
    (PTX ISA, "Matrix fragments for mma.m16n8k16", and alike for the other shapes.)
    """
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    warp, r = divmod(r, 16) if rows == 64 else (0, r)
    halves = min(rows, 16) // 8
    register = r // 8 + halves * (k // (4 * per))
    lane = 32 * warp + r % 8 * 4 + k % (4 * per) // per
    return (lane * (halves * depth // 4) + register * per + k % per).reshape(-1)


@lru_cache(maxsize=256)
def right(depth: int, per: int) -> np.ndarray:
    """For each element [depth, 8] of B its slot."""
    k, c = np.meshgrid(np.arange(depth), np.arange(8), indexing="ij")
    lane = c * 4 + k % (4 * per) // per
    return (lane * (depth // 4) + k // (4 * per) * per + k % per).reshape(-1)


@lru_cache(maxsize=256)
def result(rows: int, columns: int) -> np.ndarray:
    """For each slot of C or D the element [rows, columns] it holds: pairs of columns, 8 rows apart, 8 columns on."""
    lanes, halves = 2 * max(rows, 16) if rows == 64 else 32, min(rows, 16) // 8
    lane, i = np.meshgrid(np.arange(lanes), np.arange(rows * columns // lanes), indexing="ij")
    row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % halves)
    column = 8 * (i // (2 * halves)) + lane % 4 * 2 + i % 2
    return (row * columns + column).reshape(-1)


def collect(m: Machine, lanes: Lanes, readers: list[Reader], team: int = 32) -> np.ndarray:
    """Registers of whole teams as [teams, team, registers]."""
    if not (whole_teams(lanes, team) and lanes.shape[1] % team == 0) and lanes.count % team:
        raise Fault(f"needs whole groups of {team} threads", ExecutionError, int(lanes.flat[0]))
    found = [lanes.compress(r(m, lanes)) for r in readers]
    return np.stack(found, axis=-1).reshape(-1, team, len(readers))


def distribute(m: Machine, lanes: Lanes, writers: list[Writer], values: np.ndarray) -> None:
    """The reverse of `collect`."""
    flat = np.ascontiguousarray(values.reshape(lanes.count, len(writers)).T)
    for k, write in enumerate(writers):
        write(m, lanes, lanes.spread(flat[k]))


def matrix(registers: np.ndarray, t: Type, order: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The matrices [teams, rows, columns] that registers hold, in the order of a fragment, as float32 (f64: as is)."""
    elements = np.ascontiguousarray(registers).view(raw_of(t)).reshape(len(registers), -1)
    return widened(elements[:, order].reshape(-1, rows, columns), t)


def raw_of(t: Type) -> np.dtype:
    """The unsigned integers that hold elements of a type."""
    return np.dtype(f"u{t.dtype.itemsize}")


def widened(raw: np.ndarray, t: Type) -> np.ndarray:
    """Bits of a narrow type as float32, which holds each exactly; doubles stay."""
    return _WIDEN.get(t.name, lambda x: x.view(t.dtype).astype(np.float32))(raw)


_EIGHT = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
}
_WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "tf32": lambda x: (x & _TF32).view(np.float32),
    "e4m3": lambda x: _EIGHT["e4m3"][x],
    "e5m2": lambda x: _EIGHT["e5m2"][x],
    "f64": lambda x: x.view(np.float64),
}


def accumulate(product: np.ndarray, addend: np.ndarray, t: Type, saturate: bool) -> np.ndarray:
    """A product of matrices added to accumulators of a type.

    Tensor cores leave the order of the sum, and the width of its parts, open; here it is a float32 sum.
    """
    if t.kind == "f":
        wide = np.float64 if t.name == "f64" else np.float32
        return (product.astype(wide) + addend.astype(wide)).astype(t.dtype)
    total = product.astype(np.int64) + addend
    limits = np.iinfo(np.int32)
    return (np.clip(total, limits.min, limits.max) if saturate else total).astype(np.uint32).view(np.int32)
