"""Node rules: the table from ONNX operators to functions of Tessera values, and the view of a node that they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.defs
import onnx.helper
import onnx_ir as ir

from tessera.core.errors import ArgumentError, Location, ParseError, TraceError, UnsupportedOpError
from tessera.ir.tensor import Tensor
from tessera.onnx.model_reader import STANDARD_DOMAINS, describe_node

MISSING = object()


class GraphRunner(Protocol):
    """What a rule of control flow needs of the evaluation: to run a graph that is an attribute of its node."""

    def run_graph(self, graph: ir.Graph, inputs: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class NodeCall:
    """A node as its rule sees it: attributes with the operator's defaults, and the version that it follows.

    `since` is the version of the operator set that introduced the operator's present meaning.
    """

    node: ir.Node
    schema: onnx.defs.OpSchema
    attributes: Mapping[str, Any]
    runner: GraphRunner
    location: Location | None

    @property
    def since(self) -> int:
        """The version of the operator set since which the operator has this meaning."""
        return self.schema.since_version

    @property
    def operator(self) -> str:
        """The name of the operator."""
        return self.node.op_type

    def attr(self, name: str, default: Any = MISSING) -> Any:
        """An attribute; else the operator's default for it, else `default`."""
        if name in self.attributes:
            return self.attributes[name]
        known = self.schema.attributes.get(name)
        if known is not None and known.default_value.name:
            return _decode(onnx.helper.get_attribute_value(known.default_value))
        if default is MISSING:
            raise ParseError(f"{describe_node(self.node)} lacks its attribute {name}", location=self.location)
        return default

    def wants(self, index: int) -> bool:
        """Whether the model uses the node's result number `index`."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index].name)

    def run_graph(self, name: str, inputs: Sequence[Any]) -> list[Any]:
        """The results of the graph that is attribute `name`."""
        return self.runner.run_graph(self.attr(name), inputs)

    def refuse(self, what: str, suggestion: str | None = None) -> UnsupportedOpError:
        """The error for a use of the operator that is not supported."""
        return UnsupportedOpError(f"{describe_node(self.node)}: {what}", location=self.location, suggestion=suggestion)

    def fail(self, what: str, **details: Any) -> ArgumentError:
        """The error for operands or attributes that the operator does not allow."""
        return ArgumentError(f"{describe_node(self.node)}: {what}", location=self.location, **details)

    def array(self, value: Any, what: str) -> np.ndarray:
        """The elements of an operand that decides a shape.

        Raises:
            TraceError: they are not known while the model is compiled.
        """
        if isinstance(value, Tensor) and value.is_traced:
            raise TraceError(
                f"{describe_node(self.node)}: {what} decides a shape, and is computed from the inputs",
                location=self.location, expected="a constant, or a function of shapes and of integer inputs",
                suggestion="run the model without a target: the interpreter takes shapes from values",
            )  # fmt: skip
        return value.numpy() if isinstance(value, Tensor) else np.asarray(value)

    def ints(self, value: Any, what: str) -> list[int]:
        """As `array`, for a vector of integers."""
        return [int(n) for n in self.array(value, what).reshape(-1)]


def _decode(value: Any) -> Any:
    """Bytes as text, also in a list."""
    if isinstance(value, bytes):
        return value.decode()
    return [_decode(v) for v in value] if isinstance(value, list) else value


Rule = Callable[..., Any]


@dataclass(frozen=True)
class NodeRule:
    """A row of the table: the function, and the operands whose values decide shapes."""

    function: Rule
    static: tuple[int, ...] = ()
    foldable: bool = True
    carried: bool = False


# Operators that only move elements: they do so for carried elements too.
MOVES = frozenset(
    "Identity Reshape Transpose Squeeze Unsqueeze Flatten Slice Gather GatherElements GatherND Concat Split Expand "
    "Tile DepthToSpace SpaceToDepth ReverseSequence Shape Size".split()
)
NODE_RULES: dict[tuple[str, str], NodeRule] = {}


def rule(
    *names: str, static: Sequence[int] = (), domain: str = "", foldable: bool = True, carried: bool = False
) -> Callable[[Rule], Rule]:
    """Add a row for operators: a function of the NodeCall and the operands (None for one left out).

    `static` are the operands whose values decide shapes: a compiled model takes inputs that reach them by value. A row
    that is not `foldable` is never computed while a model is traced, as those of random operators. One that takes
    `carried` operands gets them as they are.
    """

    def add(function: Rule) -> Rule:
        for name in names:
            assert (domain, name) not in NODE_RULES, f"two rows for {name}"
            NODE_RULES[domain, name] = NodeRule(function, tuple(static), foldable, carried)
        return function

    return add


def find_rule(node: ir.Node) -> NodeRule | None:
    """The row of a node's operator, or None."""
    return NODE_RULES.get(("" if node.domain in STANDARD_DOMAINS else node.domain, node.op_type))


def find_schema(node: ir.Node, version: int, location: Location | None) -> onnx.defs.OpSchema:
    """The definition of a node's operator in a version of its operator set.

    Raises:
        UnsupportedOpError: the set has no such operator.
    """
    domain = "" if node.domain in STANDARD_DOMAINS else node.domain
    try:
        return onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        raise UnsupportedOpError(
            f"{describe_node(node)}: there is no such operator", location=location,
            expected=f"an operator of {domain or 'ONNX'} in version {version}, or a function of the model",
        ) from None  # fmt: skip


def check_operands(call: NodeCall) -> None:
    """Refuse a node with too few or too many operands, or with an attribute that its operator does not have."""
    schema, count = call.schema, len(call.node.inputs)
    required = [p for p in schema.inputs if p.option == onnx.defs.OpSchema.FormalParameterOption.Single]
    if not schema.min_input <= count <= schema.max_input or any(
        v is None for v, p in zip(call.node.inputs, schema.inputs, strict=False) if p in required
    ):
        raise call.fail(
            "a wrong number of operands", expected=f"{schema.min_input} to {schema.max_input}", received=count
        )
    unknown = [name for name in call.attributes if name not in schema.attributes]
    if unknown:
        raise call.fail(f"no attribute {unknown[0]}", expected=", ".join(schema.attributes) or "none")
