"""ONNX export: a Graph function as an ONNX model, op by op by a table; composites without a row are expanded first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.checker
from onnx import helper, numpy_helper

from tessera.core.errors import ArgumentError, UnsupportedOpError, user_location
from tessera.core.io import check_writable, write_file
from tessera.core.types import DType
from tessera.frontend.jit.tracing import Jit, TracedFunction
from tessera.ir.core import Block, Node, Value
from tessera.ir.rewrite import expand_composites
from tessera.ir.rules import Op
from tessera.onnx.element_types import NAMES
from tessera.onnx.export_table import EXPORTS
from tessera.onnx.model import OnnxModel
from tessera.onnx.model_reader import NEWEST_OPSET

OPSET = 21
IR_VERSION = 10
EXTERNAL_BYTES = 1 << 30  # a protobuf file holds less than 2 GiB


def export(
    function: Callable[..., Any], path: str | os.PathLike[str] | None, *args: Any, opset: int = OPSET
) -> onnx.ModelProto:
    """Write a function of tensors as an ONNX model, for the shapes and types of these arguments (arrays or types).

    Arrays that the function closes over become initialisers. The model is checked by `onnx.checker`; with a path of
    None it is returned only. Nodes carry the lines of Python that they come from.

    Raises:
        UnsupportedOpError: ONNX has no operator for an op: launches of kernels, decompositions of matrices, random
            numbers, sizes known by name alone.
        ArgumentError: an opset that is not between 21 and the newest installed one; a path that is none.

    >>> import tessera as ts
    >>> model = export(lambda x: ts.tanh(x) + x, None, np.ones((2, 3), np.float32))
    >>> [node.op_type for node in model.graph.node]
    ['Tanh', 'Add']
    """
    if not OPSET <= opset <= NEWEST_OPSET:
        raise ArgumentError(
            f"a model of opset {opset}", location=user_location(), expected=f"from {OPSET} to {NEWEST_OPSET}"
        )
    if path is not None:
        check_writable(_require_path(path))
    traced = _trace(function, args)
    model = _Writer(opset).write_model(traced)
    if path is None or model.ByteSize() < EXTERNAL_BYTES:
        onnx.checker.check_model(model, full_check=True)
    if path is not None:
        _save(model, Path(path))
    return model


def _require_path(path: Any) -> Path:
    if isinstance(path, (str, os.PathLike)):
        return Path(path)
    raise ArgumentError(
        "the second argument of export is the file to write", location=user_location(), expected="a path, or None",
        received=f"an argument of type {type(path).__name__}", suggestion='ts.onnx.export(function, "model.onnx", x)',
    )  # fmt: skip


def _trace(function: Callable[..., Any], args: Sequence[Any]) -> TracedFunction:
    if isinstance(function, OnnxModel):
        function = function.jit()
    traced = (function if isinstance(function, Jit) else Jit(function)).trace(*args)
    if traced.random is not None:
        raise UnsupportedOpError(
            f"{traced.function.name} draws random numbers, which an ONNX model cannot repeat",
            location=traced.function.loc, suggestion="pass them as an argument",
        )  # fmt: skip
    return traced


def _save(model: onnx.ModelProto, path: Path) -> None:
    if model.ByteSize() >= EXTERNAL_BYTES:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")
        onnx.checker.check_model(str(path))
        return
    write_file(path, lambda handle: handle.write(model.SerializeToString(deterministic=True)))


@dataclass
class _Writer:
    """An ONNX graph in the making: `nodes` of the innermost graph, names of values, and constants by their bytes."""

    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    constants: dict[Any, str] = field(default_factory=dict)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    current: Node | None = None

    def write_model(self, traced: TracedFunction) -> onnx.ModelProto:
        """The model of a traced function."""
        function = expand_composites(traced.function, self.keeps)
        free = len(function.params) - len(traced.captures)
        for number, value in enumerate(function.params):
            self.names[value] = self.make_name(value.hint or f"x{number}")
        for value, array in zip(function.params[free:], traced.captures, strict=True):
            self.initializers.append(self.make_tensor(np.asarray(array), self.names[value]))
        outputs = self.write_block(function.body)
        graph = helper.make_graph(
            self.nodes, function.name, [self.make_info(v, self.names[v]) for v in function.params[:free]],
            [self.make_info(v, n) for v, n in zip(function.body.results, outputs, strict=True)], self.initializers,
        )  # fmt: skip
        return helper.make_model(
            graph, producer_name="tessera", ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", self.opset)]
        )

    def keeps(self, op: Op) -> bool:
        """Whether an op has a row."""
        return op.name in EXPORTS

    def write_block(self, block: Block) -> list[str]:
        """Write the nodes of a block, and give names of its own to its results."""
        for node in block.nodes:
            self.current = node
            if node.op.name not in EXPORTS:
                raise UnsupportedOpError(
                    f"ONNX has no operator for {node.op.name}", location=node.loc,
                    suggestion="leave this part out of the exported function",
                )  # fmt: skip
            out = EXPORTS[node.op.name](self, node, *(self.names[v] for v in node.args))
            names = [out] if isinstance(out, str) else list(out)
            self.names.update(zip(node.results, names, strict=True))
        produced = {name for node in self.nodes for name in node.output}
        results: list[str] = []
        for value in block.results:
            name = self.names[value]
            results.append(name if name in produced and name not in results else self.add("Identity", name))
        return results

    def add(self, operator: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        """Append a node; its result's name, or the list of them where `count` is given."""
        outputs = [self.make_name(operator.lower()) for _ in range(count)]
        node = helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes)
        if self.current is not None and self.current.loc.line:
            node.doc_string = f"{Path(self.current.loc.file).name}:{self.current.loc.line}"
        self.nodes.append(node)
        return outputs[0] if count == 1 else outputs

    def make_name(self, text: str) -> str:
        """A name that is not used yet."""
        name, number = text, 0
        while name in self.used:
            number += 1
            name = f"{text}_{number}"
        self.used.add(name)
        return name

    def constant(self, value: Any, dtype: DType | np.dtype | None = None) -> str:
        """The name of a constant array; equal ones are written once."""
        storage = dtype.numpy if isinstance(dtype, DType) else dtype
        array = np.asarray(value) if storage is None else np.asarray(value).astype(storage)
        key = (array.tobytes(), array.shape, str(array.dtype))
        if key not in self.constants:
            self.constants[key] = self.make_name("const")
            self.initializers.append(self.make_tensor(array, self.constants[key]))
        return self.constants[key]

    def ints(self, values: Sequence[Any]) -> str:
        """The name of a constant vector of int64: sizes must be numbers."""
        return self.constant(np.array([self.size(n) for n in values], np.int64))

    def size(self, value: Any) -> int:
        """A size as a number.

        Raises:
            UnsupportedOpError: it is known by name alone.
        """
        if isinstance(value, (int, np.integer)):
            return int(value)
        place = self.current.loc if self.current is not None else None
        raise UnsupportedOpError(
            f"the size {value} is known by name alone", location=place, suggestion="export for arrays of known shapes"
        )

    def make_tensor(self, array: np.ndarray, name: str) -> onnx.TensorProto:
        """An array as a constant of the model."""
        return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)

    def make_info(self, value: Value, name: str) -> onnx.ValueInfoProto:
        """The declaration of an input or a result."""
        return helper.make_tensor_value_info(
            name, int(NAMES[value.type.dtype]), [self.size(n) for n in value.type.shape]
        )

    @contextmanager
    def graph(self) -> Iterator[list[onnx.NodeProto]]:
        """Collect the nodes of an inner graph."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer
