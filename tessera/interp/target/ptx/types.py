"""PTX's fundamental types, and register bits seen as values of them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tessera.interp.target.ptx.syntax import Variable

BITS: dict[int, np.dtype] = {8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


@dataclass(frozen=True)
class Type:
    """A type: its name, the NumPy format of one part, its bits, its kind (b, u, s, f or p), and how many parts."""

    name: str
    dtype: np.dtype
    bits: int
    kind: str
    parts: int = 1


_FLOATS = {
    "f16": (np.float16, 16),
    "bf16": (ml_dtypes.bfloat16, 16),
    "f32": (np.float32, 32),
    "tf32": (np.float32, 32),
    "f64": (np.float64, 64),
    "e4m3": (ml_dtypes.float8_e4m3fn, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 8),
}
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _all_types() -> dict[str, Type]:
    found = {"pred": Type("pred", np.dtype(bool), 1, "p")}
    for kind, code in (("b", "u"), ("u", "u"), ("s", "i")):
        for bits in BITS:
            name = f"{kind}{bits}"
            found[name] = Type(name, np.dtype(f"{code}{bits // 8}"), bits, kind)
    for name, (dtype, bits) in _FLOATS.items():
        found[name] = Type(name, np.dtype(dtype), bits, "f")
    for name, part in _PAIRS.items():
        found[name] = Type(name, found[part].dtype, 2 * found[part].bits, "f", 2)
    found["b128"] = Type("b128", np.dtype("u8"), 128, "b", 2)  # two registers of 64 bits
    for kind, code in (("u", "u"), ("s", "i")):
        found[f"{kind}16x2"] = Type(f"{kind}16x2", np.dtype(f"{code}2"), 32, kind, 2)
    return found


TYPES = _all_types()


def size_of(v: Variable) -> int:
    """A variable's bytes."""
    return max(TYPES[v.type].bits // 8, 1) * v.vector * v.count


def values(bits: np.ndarray, type: Type) -> np.ndarray:
    """Register bits as numbers of a type; packed ones get their parts as a last axis."""
    if type.kind == "p":
        return bits if bits.dtype == bool else bits != 0
    container = BITS[type.bits]
    if bits.dtype != container:
        bits = bits.astype(container)
    if type.parts == 1:
        return bits if type.dtype == container else bits.view(type.dtype)
    return np.ascontiguousarray(bits)[..., None].view(type.dtype)


def bits_of(value: np.ndarray, type: Type, width: int) -> np.ndarray:
    """Numbers of a type as bits of a register that may be wider: signed ones are sign-extended."""
    if width == 1:
        return value if value.dtype == bool else value != 0
    if type.kind == "p":
        return value.astype(BITS[width])
    if value.dtype != type.dtype:
        value = value.astype(type.dtype)
    if type.parts > 1:
        value = np.ascontiguousarray(value).view(BITS[type.bits])[..., 0]
    elif type.kind == "s" and width != type.bits:
        value = value.astype(f"i{width // 8}")
    bits = value.view(BITS[8 * value.itemsize])
    return bits if 8 * bits.itemsize == width else bits.astype(BITS[width])
