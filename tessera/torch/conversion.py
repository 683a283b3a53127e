"""Conversion: runs an fx graph of ATen ops on Tessera values, each node through its row of the table (torch.fx)."""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tessera.core.errors import UNKNOWN, Location, TesseraError, UnsupportedOpError
from tessera.core.types import DType, TensorType
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast
from tessera.torch.aten import ATEN
from tessera.torch.forms import FORMS, find_form_error
from tessera.torch.recurrent_layers import WHOLE_OPS
from tessera.torch.table import ATEN_FIRST, zeros
from tessera.torch.tensors import DTYPES, find_dtype, from_torch
from tessera.transforms.recording import record_block, set_location

LEFT_EMPTY = (0,)  # a result that PyTorch gives on some devices alone, as the statistics that a norm was given
# What says where and how memory lies, which values do not have.
PLACEMENT = frozenset(("layout", "device", "pin_memory", "memory_format", "non_blocking", "generator"))
# Functions of sizes, which are numbers.
SIZE_FUNCTIONS = frozenset(
    (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.truediv,
     operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_,
     operator.or_, operator.not_, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_int, torch.sym_float,
     torch.sym_ite)
)  # fmt: skip
# Checks of sizes, which exports leave in a graph: they hold for values that have a shape.
ASSERTIONS = frozenset(
    ("aten._assert_scalar.default", "aten._assert_tensor_metadata.default", "aten._assert_async.msg",
     "aten._linalg_check_errors.default", "aten.sym_constrain_range.default",
     "aten.sym_constrain_range_for_size.default")
)  # fmt: skip

# Numbers that depend on values.
NUMBERS = frozenset(("aten._local_scalar_dense.default", "aten.item.default"))

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def find_location(node: Node) -> Location:
    """The line of Python that a node comes from: the innermost one outside PyTorch."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(_TORCH_FOLDER)] or frames
    return Location(own[-1][0], int(own[-1][1])) if own else UNKNOWN


def name_op(target: Any) -> str:
    """The name of what a node calls: `aten.add.Tensor`, or that of a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        return WHOLE_OPS.get(str(target), str(target))
    return getattr(target, "__name__", None) or str(target)


def is_size_function(target: Any) -> bool:
    """Whether a node computes with sizes, not with tensors."""
    return target in SIZE_FUNCTIONS or getattr(target, "__module__", None) == "math"


class SchemaParameter(NamedTuple):
    """A parameter of an op's schema: its name and its default."""

    name: str
    default: Any


@functools.lru_cache(maxsize=4096)
def read_schema(op: Any) -> tuple[tuple[SchemaParameter, bool], ...]:
    """The parameters of an op, each with whether rows take it."""
    return tuple((SchemaParameter(a.name, _read_default(a)), a.name not in PLACEMENT) for a in op._schema.arguments)


# Schemas have element types as numbers where they are defaults.
DEFAULT_DTYPES = {4: torch.int64, 6: torch.float32}


def _read_default(argument: Any) -> Any:
    value = argument.default_value if argument.has_default_value() else None
    return DEFAULT_DTYPES[value] if argument.name == "dtype" and isinstance(value, int) else value


def normalise_arguments(op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the op's schema, as its row takes them."""
    found = []
    for i, (parameter, kept) in enumerate(read_schema(op)):
        if kept:
            found.append(args[i] if i < len(args) else named.get(parameter.name, parameter.default))
    return [find_dtype(a) if isinstance(a, torch.dtype) else a for a in found]


# What the table has.

MAX_ROW_ERRORS = 8192
# What rows answered, by the op and the types and values of its arguments.
_ROW_ERRORS: dict[Any, str | None] = {}


def supported(node: Node) -> str | None:
    """The reason why a node cannot be converted: its op, an element type, or the form of its arguments; None if it can.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> supported(graph.call_function(torch.ops.aten.add.Tensor, (x, 1)))
    >>> supported(graph.call_function(torch.ops.aten._fft_r2c.default, (x, [0], 0, True)))
    'there is no row for aten._fft_r2c.default'
    """
    if node.op != "call_function":
        return _find_value_error(node) if node.op in ("placeholder", "get_attr") else None
    if node.target is operator.getitem or is_size_function(node.target):
        return None
    name = name_op(node.target)
    if name in ASSERTIONS:
        return _find_assertion_error(node)
    if name not in ATEN:
        return f"there is no row for {name}"
    if node.target._schema.is_mutable and name not in FORMS:  # type: ignore[union-attr]
        return f"{name} writes into an operand"
    values = [_find_value_error(n) for n in (node, *node.all_input_nodes)]
    return next((v for v in values if v), None) or find_form_error(node, name) or _find_row_error(node, name)


def _find_assertion_error(node: Node) -> str | None:
    condition = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if isinstance(condition, torch.SymBool) and free_unbacked_symbols(condition):
        return "a check of a number that depends on values: programs do not raise errors of their own"
    return None


def _find_value_error(node: Node) -> str | None:
    for value in _leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return f"{node.name} is sparse: {value.layout}"
            if value.dtype not in DTYPES:
                return f"{node.name} has elements of {value.dtype}"
            if free_unbacked_symbols(tuple(value.shape)):
                return f"the size of {node.name} depends on values; use torch.where, or torch.nonzero_static"
    return None


def _find_row_error(node: Node, name: str) -> str | None:
    """Why the row refuses the arguments: it is recorded for their types, where those are known, and not run."""
    inputs = node.all_input_nodes
    types = [_static_type(_read_value(n)) for n in inputs]
    if not all(types):
        return None
    step, by_node = _prepare(node, None), dict(zip(inputs, types, strict=True))
    given = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"{by_node[n]} {inputs.index(n)}")
    used = sorted(str(user.args[1]) for user in node.users if user.target is operator.getitem and user.users)
    key = (name, repr(given), str(step.types), *used)
    if key not in _ROW_ERRORS:
        if len(_ROW_ERRORS) >= MAX_ROW_ERRORS:
            _ROW_ERRORS.clear()
        _ROW_ERRORS[key] = _record_row(step, inputs, types)
    return _ROW_ERRORS[key]


def _record_row(step: Step, inputs: list[Node], types: Sequence[TensorType | None]) -> str | None:
    name = name_op(step.node.target)

    def run(given: list[Tensor]) -> list[Tensor]:
        found = _run_step(step, dict(zip(inputs, given, strict=True)))
        _check_uses(step.node, found)
        return [x for x in _leaves(found) if isinstance(x, Tensor)]

    try:
        record_block(run, types)  # type: ignore[arg-type]
    except TesseraError as error:
        return f"{name}: {error.message}" + (f" ({error.received})" if error.received is not None else "")
    except Exception as error:
        return f"the row of {name} does not take these arguments: {type(error).__name__}: {error}"
    return None


def _check_uses(node: Node, found: Any) -> None:
    """Refuse uses of a result that the row leaves out."""
    for user in node.users:
        if user.target is operator.getitem and user.users and found[user.args[1]] is None:  # type: ignore[index]
            expected = node.meta["val"][user.args[1]]
            if expected is not None:
                raise UnsupportedOpError(f"the row does not compute result {user.args[1]}")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


# Running a graph on Tessera values.


class Step(NamedTuple):
    """A node with what its run needs."""

    node: Node
    row: Callable[..., Any]
    location: Location
    types: tuple[TensorType | DType | None, ...]  # of a result of symbolic sizes the element type alone


def convert(graph_module: GraphModule, checked: bool = True) -> Callable[..., Any]:
    """A Python function of Tessera values that runs an fx graph of ATen ops through the table.

    It takes the values of the placeholders by position: tensors of Tessera, and numbers where the graph has sizes. It
    returns what the graph returns, in its containers. Under `ts.jit` it is traced to a Graph function, whose nodes have
    the locations of the graph's stack traces. Without `checked` the nodes are known to be supported.

    Raises:
        UnsupportedOpError: nodes cannot be converted; the error names all of them with their lines.
    """
    if checked:
        check_supported(graph_module)
    steps = [
        _prepare(node, graph_module) for node in graph_module.graph.nodes if node.op in ("call_function", "get_attr")
    ]
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph_module.graph.nodes if n.op == "output")

    def run(*values: Any) -> Any:
        env: dict[Node, Any] = dict(zip(inputs, values, strict=True))
        for step in steps:
            env[step.node] = _run_step(step, env)
        return torch.fx.node.map_arg(output.args[0], env.__getitem__)

    return run


def check_supported(graph_module: GraphModule) -> None:
    """Refuse a graph with nodes that cannot be converted.

    Raises:
        UnsupportedOpError: it names all of them with their lines.
    """
    found = [(node, reason) for node in graph_module.graph.nodes if (reason := supported(node)) is not None]
    if found:
        lines = [f"{find_location(node)}: {reason}" for node, reason in found]
        raise UnsupportedOpError(
            f"{len(found)} of {len(graph_module.graph.nodes)} nodes cannot be converted",
            location=find_location(found[0][0]),
            expected="ATen ops of the table in tessera/torch/aten.py",
            received="\n    " + "\n    ".join(dict.fromkeys(lines)),
        )  # fmt: skip


def _prepare(node: Node, graph_module: GraphModule | None) -> Step:
    location = find_location(node)
    if node.op == "get_attr":
        assert graph_module is not None
        value = _read_attribute(graph_module, str(node.target))
        return Step(node, lambda: value, location, ())
    name = name_op(node.target)
    if name in ASSERTIONS:
        return Step(node, lambda *args: None, location, ())
    row = ATEN[name] if name in ATEN else node.target
    if name in ATEN_FIRST and all(user.target is operator.getitem and user.args[1] == 0 for user in _find_users(node)):
        row = ATEN_FIRST[name]
    return Step(node, row, location, tuple(_find_type(v) for v in _leaves(node.meta.get("val"))))  # type: ignore[arg-type]


def _find_users(node: Node) -> list[Node]:
    """The nodes that use a node; results of it that nothing uses are none."""
    return [user for user in node.users if user.target is not operator.getitem or user.users]


def _read_attribute(graph_module: GraphModule, path: str) -> Any:
    value = functools.reduce(getattr, path.split("."), graph_module)
    return from_torch(value) if isinstance(value, torch.Tensor) else value


def _read_value(node: Node) -> Any:
    """What PyTorch knows of a node; of a number that depends on values, the tensor without axes that holds it."""
    value = node.meta.get("val")
    if name_op(node.target) in NUMBERS and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        return torch.empty((), dtype=source.dtype, device="meta")
    return value


def _static_type(value: Any) -> TensorType | None:
    """The type that a result must have, where it is known."""
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return TensorType(tuple(value.shape), find_dtype(value.dtype))


def _find_type(value: Any) -> TensorType | DType | None:
    """What is known of the type that a result must have."""
    if isinstance(value, torch.Tensor) and value.dtype in DTYPES:
        return _static_type(value) or find_dtype(value.dtype)
    return None


def _run_step(step: Step, env: dict[Node, Any]) -> Any:
    node = step.node
    args = torch.fx.node.map_arg(node.args, env.__getitem__)
    named = torch.fx.node.map_arg(node.kwargs, env.__getitem__)
    try:
        with set_location(step.location):
            if node.op == "get_attr" or not isinstance(node.target, torch._ops.OpOverload):
                return step.row(*args, **named)
            found = step.row(*normalise_arguments(node.target, args, named))  # type: ignore[arg-type]
            return _check_result(step, found)
    except TesseraError as error:
        raise error.at(step.location) from None


def _check_result(step: Step, found: Any) -> Any:
    """The result of a row, which must have the types that PyTorch gives; a float of another width is rounded."""
    values = list(_leaves(found))
    if not step.types:
        return found
    checked = [_match_type(step, v, t) for v, t in zip(values, step.types, strict=True)]
    if not isinstance(found, (tuple, list)):
        return checked[0]
    return tuple(checked)


def _match_type(step: Step, value: Any, wanted: TensorType | DType | None) -> Any:
    if wanted is None or not isinstance(value, Tensor):
        return value
    wanted = value.type.with_dtype(wanted) if isinstance(wanted, DType) else wanted
    if (value.shape, value.dtype) == (wanted.shape, wanted.dtype):
        return value
    if value.shape == wanted.shape and value.dtype.is_float and wanted.dtype.is_float:
        return cast(value, dtype=wanted.dtype)
    if wanted.shape == LEFT_EMPTY:
        return zeros(wanted.shape, wanted.dtype)
    raise UnsupportedOpError(
        f"the row of {name_op(step.node.target)} gives another type than PyTorch", location=step.location,
        expected=str(wanted), received=str(value.type),
    )  # fmt: skip
