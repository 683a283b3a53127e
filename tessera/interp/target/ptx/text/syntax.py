"""PTX syntax tree and types: frozen records of modules, functions, variables, instructions and operands.

The fundamental types are those of PTX ISA 5.2; register bits are converted to and from their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from tessera.core.errors import Location, ParseError

# The syntax tree.


@dataclass(frozen=True)
class NameOperand:
    """A register, variable, label or function, by name."""

    text: str
    negated: bool = False


@dataclass(frozen=True)
class ImmediateOperand:
    """An immediate: an integer, or the bits of a float of 32 or 64 bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class AddressOperand:
    """`[base + offset]`; without a base it is an absolute address; `[map, {x, y}]` has coordinates.

    `[texture, sampler, {x, y}]` has a sampler too. In an initial value, `mask` selects a byte of the address.
    """

    base: str | None
    offset: int = 0
    coordinates: tuple[PtxOperand, ...] | None = None
    mask: int = 0
    sampler: str | None = None


@dataclass(frozen=True)
class VectorOperand:
    """`{a, b}`; with `pair` it is `a|b`; `(a, b)` in calls."""

    parts: tuple[PtxOperand, ...]
    pair: bool = False


PtxOperand = NameOperand | ImmediateOperand | AddressOperand | VectorOperand


@dataclass(frozen=True)
class PtxVariable:
    """A declared register, parameter or variable of `count` elements; `many` registers are name0 to name(many-1).

    A texref, samplerref or surfref (`opaque`) has properties, and the 8 bytes of a handle.
    """

    name: str
    space: str
    type: str
    align: int = 1
    count: int = 1
    many: int = 0
    vector: int = 1
    initial: tuple[PtxOperand, ...] = ()
    extern: bool = False
    location: Location = field(default_factory=Location, compare=False)
    opaque: str = ""
    properties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction; `source` is the source location of its `.loc`."""

    op: tuple[str, ...]
    operands: tuple[PtxOperand, ...]
    guard: NameOperand | None
    location: Location = field(compare=False)
    source: Location | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The opcode with its modifiers."""
        return ".".join(self.op)


@dataclass(frozen=True)
class PtxLabel:
    """A branch target."""

    name: str


@dataclass(frozen=True)
class PtxScope:
    """A body in braces."""

    items: tuple[BodyItem, ...]


@dataclass(frozen=True)
class BranchTargetList:
    """The labels of an indexed branch."""

    name: str
    labels: tuple[str, ...]


BodyItem = PtxVariable | PtxInstruction | PtxLabel | PtxScope | BranchTargetList


@dataclass(frozen=True)
class PtxFunction:
    """An entry or a function; one without a body is a declaration."""

    name: str
    entry: bool
    results: tuple[PtxVariable, ...]
    params: tuple[PtxVariable, ...]
    body: PtxScope | None
    limits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    location: Location = field(default_factory=Location, compare=False)


@dataclass(frozen=True)
class PtxModuleSyntax:
    """A whole module."""

    version: str
    target: tuple[str, ...]
    variables: tuple[PtxVariable, ...]
    functions: tuple[PtxFunction, ...]


def name_body_variable(v: PtxVariable) -> str:
    """The name under which a variable that is declared in a body is one of the module's."""
    return f"{v.name}@{v.location.line}:{v.location.column}"


def get_callee_operand(inst: PtxInstruction) -> NameOperand:
    """The function or register that a call names."""
    result = next((o for o in inst.operands if isinstance(o, NameOperand)), None)
    if result is None:
        raise ParseError("the call names no function", location=inst.location)
    return result


def list_call_operands(inst: PtxInstruction) -> list[PtxOperand]:
    """The operands of a call, results first."""
    return [part for o in inst.operands if isinstance(o, VectorOperand) for part in o.parts]


# Fundamental types, and the values of register bits.


BITS: dict[int, np.dtype] = {8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}


@dataclass(frozen=True)
class PtxType:
    """A type: its name, the NumPy dtype of a part, its bits, its kind (b, u, s, f or p), and the number of parts."""

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


def _list_types() -> dict[str, PtxType]:
    result = {"pred": PtxType("pred", np.dtype(bool), 1, "p")}
    for kind, code in (("b", "u"), ("u", "u"), ("s", "i")):
        for bits in BITS:
            name = f"{kind}{bits}"
            result[name] = PtxType(name, np.dtype(f"{code}{bits // 8}"), bits, kind)
    for name, (dtype, bits) in _FLOATS.items():
        result[name] = PtxType(name, np.dtype(dtype), bits, "f")
    for name, part in _PAIRS.items():
        result[name] = PtxType(name, result[part].dtype, 2 * result[part].bits, "f", 2)
    result["b128"] = PtxType("b128", np.dtype("u8"), 128, "b", 2)  # two registers of 64 bits
    for kind, code in (("u", "u"), ("s", "i")):
        result[f"{kind}16x2"] = PtxType(f"{kind}16x2", np.dtype(f"{code}2"), 32, kind, 2)
    return result


TYPES = _list_types()


def get_variable_size(v: PtxVariable) -> int:
    """The size of a variable in bytes."""
    return max(TYPES[v.type].bits // 8, 1) * v.vector * v.count


def bits_to_values(bits: np.ndarray, type: PtxType) -> np.ndarray:
    """Register bits as values of a type; a packed type has its parts as a last axis."""
    if type.kind == "p":
        return bits if bits.dtype == bool else bits != 0
    container = BITS[type.bits]
    if bits.dtype != container:
        bits = bits.astype(container)
    if type.parts == 1:
        return bits if type.dtype == container else bits.view(type.dtype)
    return np.ascontiguousarray(bits)[..., None].view(type.dtype)


def values_to_bits(value: np.ndarray, type: PtxType, width: int) -> np.ndarray:
    """Values of a type as bits of a register that may be wider: signed values are sign-extended."""
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
