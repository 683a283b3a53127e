"""ONNX models as functions: `load` reads one; call it with tensors, run it on arrays, or compile it for a target."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core.device import INTERP, find_generator_name
from tessera.core.errors import ArgumentError, DTypeError, ShapeError, UnsupportedOpError, hides_internal_frames
from tessera.core.types import TensorType
from tessera.frontend.jit.tracing import Jit
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import (
    CARRIERS,
    ELEMENTS,
    Carried,
    array_to_value,
    element_type,
    value_to_array,
)
from tessera.onnx.graph_evaluation import GraphEvaluation
from tessera.onnx.model_reader import ReadModel, node_graphs, read_model
from tessera.onnx.node_rules import find_rule

SHAPE_READERS = ("Shape", "Size")  # their results depend on no elements of their operand


@dataclass(frozen=True)
class Signature:
    """An input or a result of a model: its name, and its type as the model declares it.

    `shape` has a number, a name or None for each axis; it is None where the rank is unknown.
    """

    name: str
    element: ir.DataType | None
    shape: tuple[int | str | None, ...] | None

    def __str__(self) -> str:
        sizes = "?" if self.shape is None else "x".join("?" if n is None else str(n) for n in self.shape)
        return f"{self.name}: {sizes} {self.element.name if self.element else 'sequence'}"


def load(model: Any, folder: str | os.PathLike[str] | None = None) -> OnnxModel:
    """Read an ONNX model from a path, from bytes, or from an `onnx.ModelProto`.

    `folder` holds the external data of a model that is not read from a path. Nothing of the model runs, and no file
    outside its folder is read.

    Raises:
        FileError: the file is missing or truncated, or external data is not inside the folder.
        ParseError: the graph has a cycle, or a node reads a value that nothing computes.
        UnsupportedOpError: the model needs a newer opset than the installed package onnx has.

    >>> import onnx.parser, numpy as np
    >>> text = '<ir_version: 10, opset_import: ["": 22]> double (float[n] x) => (float[n] y) { y = Add(x, x) }'
    >>> load(onnx.parser.parse_model(text)).run([np.float32([1, 2])])
    [array([2., 4.], dtype=float32)]
    """
    return OnnxModel(read_model(model, folder))


class OnnxModel:
    """A function of tensors that an ONNX model describes.

    Call it with tensors: at once, or inside `ts.jit`, where it is recorded in the Graph function. `run` takes and
    gives arrays, on any target. `parameters` are its initialisers by name, and `apply(parameters, ...)` calls it with
    others, for gradients.
    """

    def __init__(self, read: ReadModel) -> None:
        self._read = read
        graph = read.ir.graph
        held = graph.initializers
        self.name = re.sub(r"\W", "_", graph.name or "model") or "model"
        self.path = read.name
        self._inputs = [v for v in graph.inputs if v.name not in held]
        self.inputs = tuple(_sign(v) for v in self._inputs)
        self.outputs = tuple(_sign(v) for v in graph.outputs)
        self.opsets: dict[str, int] = dict(read.ir.opset_imports)
        self._compiled: dict[Hashable, Jit] = {}

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The initialisers by name."""
        found = {n: self._read.constant(v.const_value) for n, v in self._read.ir.graph.initializers.items()}
        return {n: x for n, x in found.items() if isinstance(x, Tensor)}

    def __repr__(self) -> str:
        return f"OnnxModel({self.name}: {', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))})"

    @hides_internal_frames
    def __call__(self, *args: Any, **named: Any) -> Any:
        """The results for tensors (or arrays), by position or by the names of the model's inputs.

        One result is returned as it is, several as a tuple. An initialiser that is also an input may be given by name.
        """
        results = self._evaluate(self._bind(args, named), {})
        return results[0] if len(results) == 1 else tuple(results)

    def apply(self, parameters: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """As a call, with these tensors in place of the initialisers of the same names.

        Raises:
            ArgumentError: the model has no such initialiser.
        """
        results = self._evaluate(self._bind(args, named), parameters)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], target: str | None = None) -> list[Any]:
        """The results as arrays, for arrays in the order of the inputs or by name; a sequence is a list.

        Without a target the interpreter computes node by node. With one ("llvm", "cuda:0", ...) the model is compiled
        for the shapes of these inputs, and for the values of integer inputs that decide shapes, and kept.

        Raises:
            ArgumentError: an input is missing. DTypeError, ShapeError: one has another type than the model declares.
            TraceError: compiled, a shape depends on the values of an input.
            UnsupportedOpError: an operator is not supported.
        """
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        values = self._bind(() if isinstance(inputs, Mapping) else tuple(inputs), named)
        if target is None or find_generator_name(target) == INTERP:
            return [value_to_array(v) for v in self._evaluate(values, {})]
        return [self._declare(v, s) for v, s in zip(self._run_compiled(values, target), self.outputs, strict=True)]

    def jit(self, target: str | None = None, **static: Any) -> Jit:
        """The model as a jit function of its inputs, without those whose values are given by name.

        >>> import onnx.parser, numpy as np
        >>> text = '<ir_version: 10, opset_import: ["": 22]> double (float[n] x) => (float[n] y) { y = Add(x, x) }'
        >>> load(onnx.parser.parse_model(text)).jit().trace(np.ones(3, np.float32)).function.name
        'double'
        """
        fixed = {n: self._check_input(self._input(n), x) for n, x in static.items()}
        return Jit(self._make_function(fixed), target=target)

    def entry(self) -> Jit:
        """The model as a jit function of all its inputs; those that decide shapes are static arguments."""
        function = self._make_function({})
        free = dict(zip(make_identifiers([str(v.name) for v in self._inputs]), self._inputs, strict=True))
        return Jit(function, static_argnames=[n for n, v in free.items() if v.name in self.shape_inputs])

    @cached_property
    def shape_inputs(self) -> tuple[str, ...]:
        """The inputs whose values decide shapes or branches: a compiled model is compiled for their values.

        Of the inputs that a condition of If is computed from these are single integers and truth values: a branch that
        is not taken need not fit the other inputs.
        """
        graph = self._read.ir.graph
        shapes = self._find_demanded(graph, set())
        found = [v for v in self._inputs if id(v) in shapes]
        branches = [v for v in self._inputs if id(v) in self._find_demanded(graph, shapes, branches=True)]
        if all(v in found or _is_flag(v) for v in branches):
            found = branches
        return tuple(str(v.name) for v in found)

    def _find_demanded(self, graph: Any, demanded: set[int], branches: bool = False) -> set[int]:
        """The values of a graph whose elements must be known while it is compiled (a walk backwards)."""
        for node in reversed(list(graph)):
            needed = any(id(v) in demanded for v in node.outputs) and node.op_type not in SHAPE_READERS
            for inner in node_graphs(node):
                demanded |= {id(v) for v in inner.outputs if needed}
                demanded = self._find_demanded(inner, demanded, branches)
            needed = needed or (branches and node.op_type == "If")
            static = range(len(node.inputs)) if needed else self._find_static_operands(node)
            demanded |= {id(v) for i, v in enumerate(node.inputs) if i in static and v is not None}
        return demanded

    def _find_static_operands(self, node: ir.Node) -> Sequence[int]:
        """The operands of a node whose values decide shapes, by its rule or its function's body."""
        row = find_rule(node)
        if row is not None:
            return row.static
        function = self._read.ir.functions.get(node.op_identifier())
        if function is None:
            return ()
        demanded = self._find_demanded(function, set())
        return [i for i, v in enumerate(function.inputs) if id(v) in demanded]

    # Arguments.

    def _input(self, name: str) -> ir.Value:
        known = {v.name: v for v in self._read.ir.graph.inputs}
        if name not in known:
            raise ArgumentError(f"{self.name} has no input {name}", expected=", ".join(map(str, known)) or "none")
        return known[name]

    def _bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[int, Any]:
        if len(args) > len(self._inputs):
            raise ArgumentError(
                f"{self.name} takes {len(self._inputs)} inputs", received=f"{len(args)}",
                expected=", ".join(map(str, self.inputs)),
            )  # fmt: skip
        pairs = [*zip(self._inputs, args, strict=False), *((self._input(n), x) for n, x in named.items())]
        found = {id(v): self._check_input(v, x) for v, x in pairs}
        missing = [str(v.name) for v in self._inputs if id(v) not in found]
        if missing:
            raise ArgumentError(f"{self.name} lacks its input {missing[0]}", expected=", ".join(map(str, self.inputs)))
        return found

    def _check_input(self, value: ir.Value, given: Any) -> Any:
        """A given input as a value, of the type that the model declares."""
        found = _to_value(given, str(value.name))
        wanted = _sign(value)
        if wanted.element is None or found is None or isinstance(found, list):
            return found
        if element_type(found) != wanted.element:
            raise DTypeError(
                f"{self.name}: the input {value.name} has another element type", expected=wanted.element.name,
                received=element_type(found).name, suggestion="convert the array",
            )  # fmt: skip
        if wanted.shape is not None and not _fits(wanted.shape, found.shape):
            raise ShapeError(
                f"{self.name}: the input {value.name} has another shape", expected=str(wanted),
                received=str(tuple(found.shape)),
            )  # fmt: skip
        return found

    # Evaluation and compilation.

    def _evaluate(self, values: Mapping[int, Any], parameters: Mapping[str, Any]) -> list[Any]:
        held = self._read.ir.graph.initializers
        unknown = [n for n in parameters if n not in held]
        if unknown:
            raise ArgumentError(f"{self.name} has no parameter {unknown[0]}", expected=", ".join(held) or "none")
        replaced = {id(held[n]): _to_value(x, n) for n, x in parameters.items()}
        return GraphEvaluation(self._read, {}, self.opsets).run(self._read.ir.graph, {**replaced, **values})

    def _make_function(self, fixed: Mapping[str, Any]) -> Callable[..., Any]:
        """The model as a Python function of the inputs that are not fixed."""
        free = [v for v in self._inputs if v.name not in fixed]
        names = make_identifiers([str(v.name) for v in free])
        pinned = {id(self._input(n)): x for n, x in fixed.items()}

        def function(*args: Any) -> Any:
            given = {id(v): _carry(v, x) for v, x in zip(free, args, strict=True)}
            results = [_unwrap(r) for r in self._evaluate({**pinned, **given}, {})]
            if not all(isinstance(r, Tensor) for r in results) and CURRENT_BUILDER.get() is not None:
                raise UnsupportedOpError(
                    f"{self.name}: a compiled model returns tensors",
                    received=", ".join(map(str, self.outputs)),
                    suggestion="run the model without a target",
                )  # fmt: skip
            return results[0] if len(results) == 1 else tuple(results)

        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        function.__name__ = function.__qualname__ = self.name
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return function

    def _run_compiled(self, values: Mapping[int, Any], target: str) -> list[Any]:
        by_name = {str(v.name): _unwrap(values[id(v)]) for v in self._inputs}
        fixed = {n: by_name[n] for n in self.shape_inputs}
        others = [x for n, x in by_name.items() if n not in fixed]
        carried = next((x for x in by_name.values() if not isinstance(x, Tensor)), None)
        if carried is not None:
            raise UnsupportedOpError(
                f"{self.name}: inputs of a compiled model are tensors", received=type(carried).__name__,
                suggestion="run the model without a target",
            )  # fmt: skip
        key = (target, tuple((n, x.numpy().tobytes(), x.shape) for n, x in fixed.items()))
        if key not in self._compiled:
            self._compiled[key] = Jit(self._make_function(fixed), target=target)
        out = self._compiled[key](*others)
        return list(out) if isinstance(out, tuple) else [out]

    def _declare(self, value: Any, signature: Signature) -> Any:
        """A result of a compiled model as an array of the element type that the model declares."""
        if signature.element in CARRIERS and isinstance(value, Tensor):
            return value_to_array(Carried(value, signature.element))
        return value_to_array(value)


def _sign(value: ir.Value) -> Signature:
    element = None
    if isinstance(value.type, ir.TensorType):
        element = value.type.dtype
    sizes = None
    if value.shape is not None:
        sizes = tuple(_read_size(n) for n in value.shape)
    return Signature(str(value.name), element, sizes)


def _read_size(size: Any) -> int | str | None:
    """A declared size; -1 and "?" are exporters' words for an unknown one."""
    if isinstance(size, int):
        return size if size >= 0 else None
    return None if size.value == "?" else size.value


def _is_flag(value: ir.Value) -> bool:
    """Whether an input is one integer or truth value."""
    signature = _sign(value)
    kind = ELEMENTS[signature.element].kind if signature.element in ELEMENTS else "float"
    return kind != "float" and signature.shape is not None and all(n == 1 for n in signature.shape)


def _unwrap(value: Any) -> Any:
    return value.tensor if isinstance(value, Carried) else value


def _carry(value: ir.Value, tensor: Any) -> Any:
    """An argument of a compiled model as a value of the element type that the model declares."""
    element = _sign(value).element
    tensor = Tensor(tensor) if isinstance(tensor, np.ndarray) else tensor
    return Carried(tensor, element) if element in CARRIERS and isinstance(tensor, Tensor) else tensor


def _fits(wanted: Sequence[Any], shape: Sequence[Any]) -> bool:
    """Whether a shape has the declared sizes; equal names need not stand for equal sizes, as in other runtimes."""
    if len(wanted) != len(shape):
        return False
    return all(not isinstance(w, int) or not isinstance(n, int) or w == n for w, n in zip(wanted, shape, strict=True))


def _to_value(given: Any, name: str) -> Any:
    if given is None or isinstance(given, (Tensor, Carried)):
        return given
    if isinstance(given, TensorType):
        raise ArgumentError(f"the input {name} is a type", expected="a tensor or an array")
    if isinstance(given, (list, tuple)) and any(isinstance(x, (np.ndarray, Tensor, list)) or x is None for x in given):
        return [_to_value(x, name) for x in given]
    return array_to_value(np.asarray(given), f"the input {name}")


def make_identifiers(names: Sequence[str]) -> list[str]:
    """Names as Python identifiers, all different."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name) or "x"
        plain = f"_{plain}" if plain[0].isdigit() else plain
        while plain in found:
            plain += "_"
        found.append(plain)
    return found
