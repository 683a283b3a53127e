"""Graph evaluation: the walk over an ONNX graph that applies each node's rule to Tessera values.

On tensors it computes; under `ts.jit` it records a Graph function, and what depends on constants alone is computed
while it records (constant folding), so that shapes are numbers.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import onnx.defs
import onnx.helper
import onnx_ir as ir

import tessera.onnx.rules  # noqa: F401 - fills the table
from tessera.core.errors import ArgumentError, Location, ParseError, ResourceError, TesseraError
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import Carried, element_type
from tessera.onnx.model_reader import STANDARD_DOMAINS, ReadModel, describe_node
from tessera.onnx.node_rules import (
    MOVES,
    NodeCall,
    NodeRule,
    check_operands,
    find_rule,
    find_schema,
)
from tessera.transforms.recording import set_location

MAX_DEPTH = 64  # of functions that call functions
PYTHON_ERRORS = (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError)
Environment = MutableMapping[int, Any]


class GraphEvaluation:
    """An evaluation of a model: the values so far of one graph, and of the graphs around it.

    Values are Tensors, Carried tensors, arrays of strings, lists (sequences) and None (an empty optional).
    """

    def __init__(
        self,
        model: ReadModel,
        values: Environment,
        opsets: Mapping[str, int],
        attributes: Mapping[str, Any] | None = None,
        caller: NodeCall | None = None,
        depth: int = 0,
    ) -> None:
        self.model = model
        self.values = values
        self.opsets = opsets
        self.attributes = attributes or {}  # of the function whose body this is
        self.caller = caller
        self.depth = depth

    def run_graph(self, graph: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results of a graph inside this one: it sees the values around it.

        Raises:
            ArgumentError: it takes another number of inputs.
        """
        if len(inputs) != len(graph.inputs):
            raise ArgumentError(
                f"the graph {graph.name} takes {len(graph.inputs)} inputs", received=f"{len(inputs)} values"
            )
        inner = GraphEvaluation(
            self.model, ChainMap({}, self.values), self.opsets, self.attributes, self.caller, self.depth
        )
        return inner.run(graph, dict(zip(map(id, graph.inputs), inputs, strict=True)))

    def run(self, graph: Any, given: Mapping[int, Any]) -> list[Any]:
        """The results of a graph or function for these values of its inputs."""
        for value in getattr(graph, "initializers", {}).values():
            if value.const_value is not None:
                self.values[id(value)] = self.model.constant(value.const_value)
        self.values.update(given)
        for node in graph:
            with self._blame(node), set_location(self._locate(node) or Location()):
                results = self._run_node(node)
            for value, result in zip(node.outputs, results, strict=False):
                self.values[id(value)] = result
        return [self._read(v) for v in graph.outputs]

    def _locate(self, node: ir.Node) -> Location | None:
        return self.model.locate(node) or (self.caller.location if self.caller else None)

    @contextmanager
    def _blame(self, node: ir.Node) -> Iterator[None]:
        """Errors inside name the node and its line in the model."""
        try:
            yield
        except TesseraError as error:
            raise name_node(error, node, self._locate(node)) from error.__cause__
        except RecursionError:
            raise ParseError(f"{describe_node(node)}: graphs are nested too deeply") from None
        except MemoryError as error:
            raise ResourceError(
                f"{describe_node(node)} needs more memory than there is: {error}", location=self._locate(node)
            ) from None
        except PYTHON_ERRORS as error:
            raise ArgumentError(
                f"{describe_node(node)} does not fit its operands: {type(error).__name__}: {error}",
                location=self._locate(node), received=self._describe_operands(node),
            ) from error  # fmt: skip

    def _describe_operands(self, node: ir.Node) -> str:
        found = [self.values.get(id(v)) for v in node.inputs]
        return ", ".join(str(x.type) if isinstance(x, Tensor) else type(x).__name__ for x in found)

    def _read(self, value: ir.Value | None) -> Any:
        if value is None:
            return None
        if id(value) not in self.values:
            raise ParseError(f"nothing computes the value {value.name}")
        return self.values[id(value)]

    def _run_node(self, node: ir.Node) -> Sequence[Any]:
        operands = [self._read(v) for v in node.inputs]
        attributes = self._read_attributes(node)
        function = self.model.ir.functions.get(node.op_identifier())
        if function is not None:
            call = NodeCall(node, None, attributes, self, self._locate(node))  # type: ignore[arg-type]
            return self._call_function(function, operands, call, dict(function.opset_imports))
        domain = "" if node.domain in STANDARD_DOMAINS else node.domain
        version = self.opsets.get(domain, self.opsets.get("ai.onnx" if not domain else domain))
        schema = find_schema(node, version if version is not None else 1, self._locate(node))
        call = NodeCall(node, schema, attributes, self, self._locate(node))
        check_operands(call)
        row = find_rule(node)
        if row is None:
            return self._call_body(call, operands, version or 1)
        return self._apply(row, call, operands)

    def _read_attributes(self, node: ir.Node) -> dict[str, Any]:
        """The attributes of a node; one that refers to an attribute of the function around it has its value."""
        found: dict[str, Any] = {}
        for name, each in node.attributes.items():
            if not each.is_ref():
                found[name] = self._read_attribute(each)
            elif each.ref_attr_name and each.ref_attr_name in self.attributes:
                found[name] = self.attributes[each.ref_attr_name]
        return found

    def _read_attribute(self, attribute: ir.Attr) -> Any:
        """The value of an attribute: tensors as values."""
        if attribute.type == ir.AttributeType.TENSOR:
            return self.model.constant(attribute.as_tensor())
        if attribute.type == ir.AttributeType.TENSORS:
            return [self.model.constant(t) for t in attribute.as_tensors()]
        return attribute.value

    def _apply(self, row: NodeRule, call: NodeCall, operands: list[Any]) -> Sequence[Any]:
        carried = next((x.element for x in operands if isinstance(x, Carried)), None)
        if carried is not None and not row.carried:
            if call.operator not in MOVES:
                raise call.refuse(f"elements of type {carried.name} are only moved and converted")
            operands = [x.tensor if isinstance(x, Carried) else x for x in operands]
        with _folding(row, operands, self):
            out = row.function(call, *operands)
        results = list(out) if isinstance(out, tuple) else [out]
        if carried is not None and not row.carried:
            results = [Carried(x, carried) if isinstance(x, Tensor) else x for x in results]
        return results

    # Functions: of the model, and of operators that are defined by one.

    def _call_function(
        self, function: Any, operands: Sequence[Any], call: NodeCall, opsets: Mapping[str, int]
    ) -> list[Any]:
        if self.depth >= MAX_DEPTH:
            raise ParseError(f"{describe_node(call.node)}: functions that call themselves", location=call.location)
        if len(operands) > len(function.inputs):
            raise call.fail("too many operands", expected=len(function.inputs), received=len(operands))
        attributes = {k: self._read_attribute(a) for k, a in function.attributes.items() if a.value is not None}
        inner = GraphEvaluation(self.model, {}, opsets, {**attributes, **call.attributes}, call, self.depth + 1)
        padded = [*operands, *[None] * (len(function.inputs) - len(operands))]
        return inner.run(function, dict(zip(map(id, function.inputs), padded, strict=True)))

    def _call_body(self, call: NodeCall, operands: Sequence[Any], version: int) -> list[Any]:
        """The results of an operator that has no rule, by the function that defines it.

        Raises:
            UnsupportedOpError: it has none.
        """
        body = _find_body(call, operands, version)
        if body is None:
            raise call.refuse("the operator is not supported")
        function, places = _deserialise_body(body)
        defaults = {n: call.attr(n, None) for n in call.schema.attributes}
        attributes = {k: v for k, v in defaults.items() if v is not None}
        filled = NodeCall(call.node, call.schema, attributes, self, call.location)
        found = self._call_function(function, operands, filled, {**self.opsets, **function.opset_imports})
        results: list[Any] = [None] * (max(places, default=-1) + 1)
        for place, value in zip(places, found, strict=True):
            results[place] = value
        return results


def name_node(error: TesseraError, node: ir.Node, location: Location | None) -> TesseraError:
    """An error that names the node and its line; the innermost node's if several are on the way."""
    if not getattr(error, "names_node", False):
        error.names_node = True  # type: ignore[attr-defined]
        named = describe_node(node)
        error.message = error.message if named in error.message else f"{named}: {error.message}"
        error.location = location or error.location
    return error


@contextmanager
def _folding(row: NodeRule, operands: Sequence[Any], evaluation: GraphEvaluation) -> Iterator[None]:
    """While a trace records: compute at once what depends on constants alone."""
    if CURRENT_BUILDER.get() is None or not row.foldable or any(_is_traced(x) for x in operands):
        yield
        return
    token = CURRENT_BUILDER.set(None)
    try:
        yield
    finally:
        CURRENT_BUILDER.reset(token)


def _is_traced(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_traced(v) for v in value)
    value = value.tensor if isinstance(value, Carried) else value
    return isinstance(value, Tensor) and value.is_traced


BODIES: dict[bytes, tuple[Any, list[int]]] = {}


def _deserialise_body(body: onnx.FunctionProto) -> tuple[Any, list[int]]:
    """A function body as onnx-ir has it, and which of its results it computes: those that the node asks for."""
    key = body.SerializeToString(deterministic=True)
    if key not in BODIES:
        proto = _rename_redefinitions(body)
        known = {name for node in proto.node for name in node.output} | set(proto.input)
        places = [i for i, name in enumerate(proto.output) if name in known]
        proto.output[:] = [proto.output[i] for i in places]
        BODIES[key] = ir.from_proto(proto), places
    return BODIES[key]


def _rename_redefinitions(body: onnx.FunctionProto) -> onnx.FunctionProto:
    """A function in static single assignment: some of ONNX's own assign a name twice."""
    found = onnx.FunctionProto()
    found.CopyFrom(body)
    names: dict[str, str] = {name: name for name in found.input}
    for number, node in enumerate(found.node):
        node.input[:] = [names.get(n, n) for n in node.input]
        for i, name in enumerate(node.output):
            if name:
                node.output[i] = f"{name}.{number}" if name in names else name
                names[name] = node.output[i]
    found.output[:] = [names.get(n, n) for n in found.output]
    return found


def _find_body(call: NodeCall, operands: Sequence[Any], version: int) -> onnx.FunctionProto | None:
    """The function that defines an operator, for the types of these operands."""
    schema: Any = call.schema  # of compiled code
    if schema.has_function:
        return schema.function_body
    if not schema.has_context_dependent_function:
        return None
    try:
        proto = _resolve_references(ir.to_proto(call.node), call)
    except Exception as error:  # onnx-ir raises errors of many types for a malformed node
        raise call.fail(f"its attributes are malformed: {error}") from None
    types = [_type_proto(x).SerializeToString() for x in operands]
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    text = schema.get_context_dependent_function_with_opset_version(
        max(versions, default=version), proto.SerializeToString(), types
    )
    if not text:
        return None
    found = onnx.FunctionProto()
    found.ParseFromString(text)
    return found


def _resolve_references(proto: onnx.NodeProto, call: NodeCall) -> onnx.NodeProto:
    """A node whose attributes that refer to those of a function around it have their values."""
    kept = [a for a in proto.attribute if not a.ref_attr_name]
    named = [a.name for a in proto.attribute if a.ref_attr_name and a.name in call.attributes]
    del proto.attribute[:]
    proto.attribute.extend([*kept, *(onnx.helper.make_attribute(n, call.attributes[n]) for n in named)])
    return proto


def _type_proto(value: Any) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        inner = _type_proto(value[0]) if value else onnx.TypeProto()
        return onnx.helper.make_sequence_type_proto(inner)
    return onnx.helper.make_tensor_type_proto(int(element_type(value)), [int(n) for n in value.shape])
