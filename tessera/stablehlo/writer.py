"""Writer of StableHLO text in MLIR's generic form: values, constants, operations and regions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import UNKNOWN, Location, UnsupportedOpError
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, TensorType, bool_, tf32
from tessera.ir.core import Block, Node, Value
from tessera.ir.numerics.conversion import convert
from tessera.ir.printer import print_string
from tessera.ir.rules import Rules

# row(writer, node, *operands) writes the operations of a node, and returns its result or a list of them.
export_rules = Rules("StableHLO export")
_INDENT = "  "


class Operand(NamedTuple):
    """A value of the text: its name and type."""

    name: str
    type: TensorType


def spell_type(type: Any) -> str:
    """A tensor type of StableHLO.

    Raises:
        UnsupportedOpError: it has a symbolic size, a policy with clauses, or an element type that StableHLO lacks.
    """
    if type.policy is not None and type.policy.clauses():
        raise UnsupportedOpError(
            "StableHLO has no numeric policies", received=str(type), suggestion="cast to the storage"
        )
    if not all(isinstance(n, int) for n in type.shape):
        raise UnsupportedOpError("the text has fixed sizes", received=str(type), suggestion="pass arrays as examples")
    if type.dtype == tf32:
        raise UnsupportedOpError("StableHLO has no element type for tf32", received=str(type))
    return f"tensor<{''.join(f'{n}x' for n in type.shape)}{type.dtype.mlir}>"


def spell_list(numbers: Sequence[Size]) -> str:
    """An attribute `array<i64: 1, 2>`."""
    return f"array<i64: {', '.join(map(str, numbers))}>" if numbers else "array<i64>"


def _spell_location(location: Location) -> str:
    if location == UNKNOWN or not location.line:
        return ""
    return f" loc({print_string(location.file)}:{location.line}:{max(location.column - 1, 0)})"


def _spell_number(value: Any, dtype: DType) -> str:
    """A number of a dense attribute: floats as their bits, which every reader takes."""
    if dtype == bool_:
        return "true" if value else "false"
    if dtype.is_integer:
        return str(int(value) & (2**dtype.bits - 1) if dtype.kind == "uint" else int(value))
    raw = np.asarray(value).astype(dtype.numpy)
    return f"0x{raw.reshape(1).view(f'u{dtype.numpy.itemsize}')[0]:0{dtype.numpy.itemsize * 2}X}"


class HloWriter:
    """The lines of a function; names count up."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth, self.count = 2, 0
        self.location = UNKNOWN

    def name(self) -> str:
        """A new name."""
        self.count += 1
        return f"%{self.count - 1}"

    def emit(
        self,
        op: str,
        operands: Sequence[Operand],
        types: Sequence[TensorType],
        attrs: Mapping[str, str] | None = None,
        regions: Sequence[tuple[Sequence[Operand], Callable[[], Sequence[Operand]]]] = (),
    ) -> list[Operand]:
        """Write an operation; each region is its parameters and a function that writes it and returns its results."""
        made = [Operand(self.name(), t) for t in types]
        head = f"{', '.join(m.name for m in made)} = " if made else ""
        given = ", ".join(o.name for o in operands)
        properties = f" <{{{', '.join(f'{k} = {v}' for k, v in sorted(attrs.items()))}}}>" if attrs else ""
        self._line(
            f'{head}"{op}"({given}){properties}' + (" ({" if regions else ""), bool(not regions) and (operands, types)
        )
        for i, (params, body) in enumerate(regions):
            self._region(params, body, last=i == len(regions) - 1, tail=self._signature(operands, types))
        return made

    def _line(self, text: str, typed: Any) -> None:
        tail = self._signature(*typed) if typed else ""
        self.lines.append(_INDENT * self.depth + text + tail)

    def _signature(self, operands: Sequence[Operand], types: Sequence[TensorType]) -> str:
        inputs, outputs = (", ".join(map(spell_type, ts)) for ts in ([o.type for o in operands], types))
        return f" : ({inputs}) -> ({outputs}){_spell_location(self.location)}"

    def _region(self, params: Sequence[Operand], body: Any, last: bool, tail: str) -> None:
        before = self.location
        if params:
            listed = ", ".join(f"{p.name}: {spell_type(p.type)}" for p in params)
            self.lines.append(f"{_INDENT * self.depth}^bb0({listed}):")
        self.depth += 1
        results = body()
        self.emit("stablehlo.return", results, [])
        self.depth -= 1
        self.location = before
        self.lines.append(_INDENT * self.depth + ("})" + tail if last else "}, {"))

    def one(
        self, op: str, operands: Sequence[Operand], type: TensorType, attrs: Mapping[str, str] | None = None
    ) -> Operand:
        """Write an operation with one result."""
        return self.emit(op, operands, [type], attrs)[0]

    def params(self, types: Sequence[TensorType]) -> list[Operand]:
        """New parameters of a region."""
        return [Operand(self.name(), t) for t in types]

    # Values that many rows use.

    def constant(self, value: Any, type: TensorType) -> Operand:
        """A tensor of one number."""
        exact = convert(np.asarray(value), type.dtype)
        text = f"dense<{_spell_number(exact, type.dtype)}> : {spell_type(type)}"
        return self.one("stablehlo.constant", [], type, {"value": text})

    def array(self, array: np.ndarray, type: TensorType) -> Operand:
        """An array as a constant."""
        flat = np.ascontiguousarray(array).reshape(-1)
        if not flat.size:
            body = ""
        elif type.dtype == bool_:
            body = str(_nest([_spell_number(x, bool_) for x in flat], type.shape)).replace("'", "")
        else:
            body = f'"0x{flat.tobytes().hex().upper()}"'
        return self.one("stablehlo.constant", [], type, {"value": f"dense<{body}> : {spell_type(type)}"})

    def binary(self, op: str, x: Operand, y: Operand) -> Operand:
        """An operation of two operands of the type of its result."""
        return self.one(f"stablehlo.{op}", [x, y], x.type)

    def compare(self, direction: str, x: Operand, y: Operand) -> Operand:
        """A comparison: LT, GT, EQ, ..."""
        kind = {"float": "FLOAT", "int": "SIGNED"}.get(x.type.dtype.kind, "UNSIGNED")
        attrs = {
            "comparison_direction": f"#stablehlo<comparison_direction {direction}>",
            "compare_type": f"#stablehlo<comparison_type {kind}>",
        }
        return self.one("stablehlo.compare", [x, y], x.type.with_dtype(bool_), attrs)

    def select(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        """`x` where the condition holds, else `y`."""
        return self.one("stablehlo.select", [condition, x, y], x.type)

    def convert(self, x: Operand, dtype: DType) -> Operand:
        """A conversion of elements; of numbers to bools, whether they are not 0."""
        if x.type.dtype == dtype:
            return x
        if dtype == bool_:
            return self.compare("NE", x, self.constant(0, x.type))
        return self.one("stablehlo.convert", [x], x.type.with_dtype(dtype))

    def reshape(self, x: Operand, shape: Sequence[Size]) -> Operand:
        """The same elements in another shape."""
        return (
            x if x.type.shape == tuple(shape) else self.one("stablehlo.reshape", [x], x.type.with_shape(tuple(shape)))
        )

    # Blocks.

    def block(self, block: Block, operands: Sequence[Operand]) -> list[Operand]:
        """The nodes of a block on operands; its results.

        Raises:
            UnsupportedOpError: a node has no row.
        """
        known = dict(zip(block.params, operands, strict=True))
        for node in block.nodes:
            found = self._write_node(node, [known[a] for a in node.args])
            known.update(zip(node.results, found, strict=True))
        return [known[v] for v in block.results]

    def _write_node(self, node: Node, operands: list[Operand]) -> list[Operand]:
        self.location = node.loc
        row = export_rules.get(node.op)
        if row is None:
            raise UnsupportedOpError(
                f"{node.op.name} has no form in StableHLO", location=node.loc,
                suggestion="ops on tensors can be exported; kernels and LAPACK's routines cannot",
            )  # fmt: skip
        try:
            for value in node.results:
                spell_type(value.type)
            found = row(self, node, *operands)
        except UnsupportedOpError as error:
            raise error.at(node.loc) from None
        return found if isinstance(found, list) else [found]


def _nest(flat: list[str], shape: Sequence[Any]) -> Any:
    if not shape:
        return flat[0]
    step = math.prod(shape[1:])
    return [_nest(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def tensor_type(value: Value) -> TensorType:
    """The type of a value of the Graph level."""
    assert isinstance(value.type, TensorType)
    return value.type
