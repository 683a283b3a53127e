"""Model reader: an ONNX file as an onnx-ir model whose graphs are sorted and whose external data lie in its folder.

Nothing of a model runs while it is read, and no file outside its folder is opened.
"""

from __future__ import annotations

import linecache
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import onnx_ir as ir
from google.protobuf.message import DecodeError

from tessera.core.errors import (
    ArgumentError,
    FileError,
    Location,
    ParseError,
    TesseraError,
    UnsupportedOpError,
    user_location,
)
from tessera.onnx.element_types import array_to_tensor

NEWEST_OPSET = onnx.defs.onnx_opset_version()
STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class ReadModel:
    """A model as onnx-ir has it, and the line of its text that stands for each node."""

    ir: ir.Model
    name: str
    locations: Mapping[int, Location] = field(repr=False)
    _constants: dict[int, Any] = field(default_factory=dict, repr=False)

    def constant(self, tensor: Any) -> Any:
        """A constant of the model as a value, read once.

        Raises:
            FileError: its data is truncated. DTypeError: its elements are complex numbers.
        """
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = array_to_tensor(tensor)
        return self._constants[id(tensor)]

    def locate(self, node: Any) -> Location | None:
        """The line of a node in the text of the model; None for a node of an operator's own function body."""
        return self.locations.get(id(node))


def read_model(source: Any, folder: str | os.PathLike[str] | None = None) -> ReadModel:
    """Read a model from a path, from bytes or from an `onnx.ModelProto`; `folder` holds external data of the others.

    Raises:
        FileError: the file is missing, truncated, or no ONNX model, or external data is not inside the folder.
        ParseError: the graph has a cycle, or a node reads a value that nothing computes.
        UnsupportedOpError: the model needs a newer version of the package onnx, or has sparse parameters.
    """
    proto, name, base = _read_proto(source, folder)
    _check_versions(proto, name)
    model = _deserialise(proto, name)
    try:
        return _check_model(model, name, base)
    except TesseraError:
        raise
    except Exception as error:  # onnx-ir reads some parts late, and raises errors of many types for malformed ones
        raise ParseError(f"{name} is not a valid ONNX model: {_describe(error)}") from None


def _check_model(model: ir.Model, name: str, folder: Path | None) -> ReadModel:
    """Check the graphs of a model, sort them, and write their text."""
    _check_functions(model)
    graphs = list(iterate_graphs(model))
    text = _ModelText(name)
    for title, graph in graphs:
        _check_text(graph, name)
        text.add_graph(title, graph)
    text.publish()
    read = ReadModel(model, name, text.locations)
    for _, graph in graphs:
        _sort_graph(graph, read)
        _check_names(graph, read)
        _check_external_data(graph, folder, name)
    return read


def _deserialise(proto: onnx.ModelProto, name: str) -> ir.Model:
    log = logging.getLogger("onnx_ir")
    before = log.level
    log.setLevel(logging.ERROR)  # it warns of what is an error here
    try:
        return ir.from_proto(proto)
    except Exception as error:  # onnx-ir raises errors of many types for a malformed model
        raise ParseError(f"{name} is not a valid ONNX model: {_describe(error)}") from None
    finally:
        log.setLevel(before)


def _check_text(graph: Any, name: str) -> None:
    """Refuse names that are not text: protobuf gives them as bytes."""
    values = [*graph.inputs, *graph.outputs, *(v for n in graph for v in (*n.inputs, *n.outputs) if v is not None)]
    names = [graph.name, *(v.name for v in values)]
    names += [text for n in graph for text in (n.name, n.op_type, n.domain, *n.attributes)]
    wrong = next((n for n in names if isinstance(n, bytes)), None)
    if wrong is not None:
        raise ParseError(f"{name} has a name that is not UTF-8 text", received=repr(wrong)[:80])


def _describe(error: BaseException) -> str:
    """The message of the innermost cause."""
    while (inner := error.__cause__ or error.__context__) is not None:  # onnx-ir fails while it describes some errors
        error = inner
    return " ".join(str(error).split())[:300]


def _read_proto(source: Any, folder: Any) -> tuple[onnx.ModelProto, str, Path | None]:
    if isinstance(source, onnx.ModelProto):
        return source, f"<{source.graph.name or 'onnx model'}>", None if folder is None else Path(folder)
    if isinstance(source, (bytes, bytearray)):
        return _parse_proto(bytes(source), "<bytes>"), "<bytes>", None if folder is None else Path(folder)
    if not isinstance(source, (str, os.PathLike)):
        raise ArgumentError(
            "this is no ONNX model", location=user_location(), expected="a path, bytes or an onnx.ModelProto",
            received=type(source).__name__,
        )  # fmt: skip
    path = Path(source)
    if not path.is_file():
        raise FileError(f"there is no file {path}", expected="an .onnx file", suggestion="check the path")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    return _parse_proto(data, str(path)), str(path), path.absolute().parent


def _parse_proto(data: bytes, name: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise FileError(
            f"{name} is not an ONNX model, or is truncated", expected="a complete onnx.ModelProto",
            received=f"{len(data)} bytes that do not parse",
        ) from None  # fmt: skip
    if not proto.HasField("graph") or not proto.opset_import:
        raise FileError(
            f"{name} is not an ONNX model, or is truncated", expected="a graph and the versions of its operators",
            received=f"{len(data)} bytes without them",
        )  # fmt: skip
    return proto


def _check_versions(proto: onnx.ModelProto, name: str) -> None:
    for known in proto.opset_import:
        if known.domain in STANDARD_DOMAINS and known.version > NEWEST_OPSET:
            raise UnsupportedOpError(
                f"{name} uses a newer version of ONNX's operators", expected=f"opset 1 to {NEWEST_OPSET}",
                received=f"opset {known.version}", suggestion="update the package onnx, or export an older opset",
            )  # fmt: skip
    if proto.graph.sparse_initializer:
        first = proto.graph.sparse_initializer[0].values.name
        raise UnsupportedOpError(f"{name} has sparse parameters", received=first, suggestion="store dense tensors")


MAX_NODES = 10_000_000  # of a model whose functions are expanded


def _check_functions(model: ir.Model) -> None:
    """Refuse functions that call themselves, and those that would expand into more nodes than a computer can run."""
    sizes: dict[Any, int] = {}

    def measure(graph: Any, callers: tuple[Any, ...]) -> int:
        total = 0
        for node in graph:
            called = node.op_identifier()
            if called in callers:
                raise ParseError(f"functions that call themselves: {describe_node(node)}")
            if called in model.functions and called not in sizes:
                sizes[called] = measure(model.functions[called], (*callers, called))
            total += 1 + sizes.get(called, 0) + sum(measure(g, callers) for g in node_graphs(node))
        if total > MAX_NODES:
            raise ParseError(f"the functions expand into more than {MAX_NODES:,} nodes")
        return total

    measure(model.graph, ())


def iterate_graphs(model: ir.Model) -> Iterator[tuple[str, Any]]:
    """The graph of a model, its functions, and the graphs that are attributes of nodes, each with a title."""
    for title, graph in [("graph", model.graph), *((f.name, f) for f in model.functions.values())]:
        yield from _iterate_nested(str(title), graph)


def _iterate_nested(title: str, graph: Any) -> Iterator[tuple[str, Any]]:
    yield title, graph
    for node in graph:
        for inner in node_graphs(node):
            yield from _iterate_nested(f"{title}, inside {node.name or node.op_type}", inner)


def node_graphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that are attributes of a node: the branches of If, the bodies of loops."""
    found: list[ir.Graph] = []
    for each in node.attributes.values():
        if each.is_ref():
            continue
        if each.type == ir.AttributeType.GRAPH:
            found.append(each.as_graph())
        elif each.type == ir.AttributeType.GRAPHS:
            found += each.as_graphs()
    return found


# The text of a model: a line for each node, so that errors, `inspect` and the debugger show nodes as source lines.


class _ModelText:
    """The lines of a model, under its name in linecache."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.locations: dict[int, Location] = {}

    def add_graph(self, title: str, graph: Any) -> None:
        """Add a title and a line for each node."""
        inputs = ", ".join(str(v.name) for v in graph.inputs)
        self.lines.append(f"{title} {graph.name or ''}({inputs})")
        for node in graph:
            line = _format_node(node)
            self.lines.append(line)
            start = len(line) - len(line.lstrip()) + 1
            self.locations[id(node)] = Location(self.name, len(self.lines), start, len(line) + 1)

    def publish(self) -> None:
        """Let linecache have the lines."""
        lines = [line + "\n" for line in self.lines]
        linecache.cache[self.name] = (sum(map(len, lines)), None, lines, self.name)


def _format_node(node: ir.Node) -> str:
    operands = [("" if v is None else str(v.name)) for v in node.inputs]
    operands += [f"{k}={_format_attribute(a)}" for k, a in node.attributes.items()]
    results = ", ".join(str(v.name) for v in node.outputs)
    return f"    {results} = {node.op_type}({', '.join(operands)})" + (f"  # {node.name}" if node.name else "")


def _format_attribute(attribute: Any) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    kind = attribute.type
    if kind in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "{...}"
    if kind in (ir.AttributeType.TENSOR, ir.AttributeType.TENSORS):
        return "<tensor>"
    text = " ".join(str(attribute.value).split())
    return text if len(text) <= 60 else text[:57] + "..."


# Checks of a graph: order, names, and where external data lies.


def _sort_graph(graph: Any, read: ReadModel) -> None:
    """Sort the nodes if they are not; an error names a node of a cycle."""
    node = _find_unsorted(graph)
    if node is None:
        return
    try:
        graph.sort()
        node = _find_unsorted(graph)
    except ValueError:
        pass
    if node is not None:
        raise ParseError(
            f"the graph has a cycle: {describe_node(node)} reads a value that depends on its own results",
            location=read.locate(node),
        )


def _find_unsorted(graph: Any) -> ir.Node | None:
    """The first node that reads a result of itself or of a later node of the same graph."""
    done: set[int] = set()
    own = {id(v) for node in graph for v in node.outputs}
    for node in graph:
        read = [*node.inputs, *(v for g in node_graphs(node) for v in _outer_values(g))]
        if any(v is not None and id(v) in own and id(v) not in done for v in read):
            return node
        done.update(id(v) for v in node.outputs)
    return None


def _outer_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that the nodes of a graph read, and those of graphs inside it."""
    for node in graph:
        yield from (v for v in node.inputs if v is not None)
        for inner in node_graphs(node):
            yield from _outer_values(inner)


def _check_names(graph: Any, read: ReadModel) -> None:
    """Refuse values that nothing computes."""
    for node in graph:
        for value in node.inputs:
            if value is not None and _is_undefined(value):
                raise ParseError(
                    f"{describe_node(node)} reads {value.name}, which nothing computes", location=read.locate(node)
                )
    for value in graph.outputs:
        if _is_undefined(value):
            raise ParseError(f"{read.name}: nothing computes the result {value.name}")


def _is_undefined(value: ir.Value) -> bool:
    return value.producer() is None and not value.is_graph_input() and value.const_value is None


def describe_node(node: ir.Node) -> str:
    """A node for errors: its name and operator."""
    domain = "" if node.domain in STANDARD_DOMAINS else f"{node.domain}."
    return f"node {node.name} ({domain}{node.op_type})" if node.name else f"a node {domain}{node.op_type}"


def _check_external_data(graph: Any, folder: Path | None, name: str) -> None:
    """Check where each external tensor of a graph lies, and give it its folder."""
    held = list(getattr(graph, "initializers", {}).values())
    tensors = [v.const_value for v in held]
    for node in graph:
        for each in node.attributes.values():
            if not each.is_ref() and each.type == ir.AttributeType.TENSOR:
                tensors.append(each.as_tensor())
            elif not each.is_ref() and each.type == ir.AttributeType.TENSORS:
                tensors += each.as_tensors()
    for tensor in tensors:
        if isinstance(tensor, ir.ExternalTensor):
            _check_external_tensor(tensor, folder, name)


def _check_external_tensor(tensor: ir.ExternalTensor, folder: Path | None, name: str) -> None:
    location = str(tensor.location)
    parts = Path(location).parts
    if folder is None:
        raise FileError(
            f"{name} has data in the file {location}, and no folder", suggestion="load the model from its path"
        )
    if not parts or Path(location).is_absolute() or ".." in parts:
        raise _outside_error(tensor, location)
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise _outside_error(tensor, f"{location}, by the link {path.name}")
    try:
        found = os.stat(path)
    except OSError as error:
        raise FileError(f"{tensor.name}: the file {path} cannot be read: {error.strerror}") from None
    start, length = tensor.offset or 0, tensor.length or tensor.nbytes
    if not stat.S_ISREG(found.st_mode) or start < 0 or start + max(length, tensor.nbytes) > found.st_size:
        raise FileError(
            f"{tensor.name}: the file {path} does not hold its data", expected=f"{length} bytes from {start} on",
            received=f"a file of {found.st_size} bytes", suggestion="copy the model's files again",
        )  # fmt: skip
    tensor.base_dir = folder


def _outside_error(tensor: ir.ExternalTensor, location: str) -> FileError:
    return FileError(
        f"{tensor.name}: its data is not in the model's folder", expected="a file beside the model, no link",
        received=location, suggestion="a model from a stranger may try to read other files; do not trust it",
    )  # fmt: skip
