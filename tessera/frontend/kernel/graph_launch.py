"""Kernel launches in traced programs: a launch becomes one op of the Graph level that holds the kernel's Tile IR.

`kernel[grid](x, out)` updates the tensors that the kernel writes: after it, `out` stands for the new memory.
`launch(kernel, grid, x, out=like(x))` returns the written memories, and changes no tensor (as JAX's `pallas_call`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import (
    ArgumentError,
    DTypeError,
    ExecutionError,
    ShapeError,
    TraceError,
    add_scope,
    is_library_kernel_file,
    library_caller_location,
    user_location,
)
from tessera.core.hooks import bind_region_op, bind_ruled_launch
from tessera.core.shapes import as_size
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, TensorType, as_dtype
from tessera.frontend.kernel.kernel_function import Kernel, KernelCall, KernelLaunch
from tessera.frontend.kernel.signature import KernelArguments
from tessera.ir.builder import CURRENT_BUILDER, Builder, copy_block
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor.basic import cast, full, parse_shape
from tessera.ops.tensor.shape import permute, reshape, slice_

VIEW_OPS = (reshape, permute, slice_)  # eager calls of these may share memory with their operand


@dataclass(frozen=True)
class OutputMemory:
    """An argument of `launch` that stands for new memory of a type, with unspecified elements."""

    type: TensorType


def like(x: Any = None, shape: Any = None, dtype: Any = None) -> OutputMemory:
    """New memory for a result of `ts.launch`: of the shape and element type of `x`, unless they are given.

    Without `x` both must be given.

    >>> str(like(Tensor([1.0, 2.0]), dtype="f16").type)
    '2xf16'
    >>> str(like(shape=(3,), dtype="f32").type)
    '3xf32'

    Raises:
        ArgumentError: neither `x` nor both of `shape` and `dtype` are given.
        DTypeError: `dtype` names no element type.
    """
    if x is None:
        if shape is None or dtype is None:
            raise ArgumentError(
                "the type of new memory is not known", location=user_location(),
                expected="ts.like(x), or ts.like(shape=..., dtype=...)",
            )  # fmt: skip
        return OutputMemory(TensorType(parse_shape(shape, as_size), as_dtype(dtype)))
    type = as_tensor(x).type
    sizes = type.shape if shape is None else parse_shape(shape, as_size)
    return OutputMemory(TensorType(sizes, type.dtype if dtype is None else as_dtype(dtype), type.policy))


def launch(kernel: Kernel, grid: Any, *args: Any, **named: Any) -> Any:
    """The memories that a kernel writes, as new tensors; the arguments themselves do not change.

    `grid` is what `kernel[grid]` takes: sizes, a function of the constants, or a tuple of a grid and a group. An
    argument `ts.like(x)` stands for new memory. Works in traced programs (`ts.jit`, `ts.vmap`, `ts.scan`) and outside.
    The results are in the order of the kernel's parameters, then what the kernel returns: one tensor, or a tuple.

    >>> from tessera import tile
    >>> from tessera.frontend.kernel import kernel
    >>> @kernel
    ... def double(x, out, *, BM: int = 2):
    ...     rows = tile.program_id(0) * BM
    ...     out[rows : rows + BM] = x[rows : rows + BM] * 2.0
    >>> x = Tensor([1.0, 2.0, 3.0, 4.0])
    >>> launch(double, (2,), x, like(x))
    Tensor([2., 4., 6., 8.], f32)

    Raises:
        ArgumentError: this is no kernel, or one tensor is passed twice and written.
        ShapeError: an argument's size is known by name alone.
    """
    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            f"launch takes a kernel, not a {type(kernel).__name__}", location=user_location(),
            expected="a function decorated with @ts.kernel", suggestion="ts.launch(kernel, grid, x, out=ts.like(x))",
        )  # fmt: skip
    chosen = kernel[grid]
    if CURRENT_BUILDER.get() is not None or any(is_differentiated(a) for a in (*args, *named.values())):
        return _unwrap(list(record_launch(chosen, args, named).values()))
    fresh: set[int] = set()
    given = [_make_memory(a, fresh) for a in args], {k: _make_memory(a, fresh) for k, a in named.items()}
    if kernel.options.tuning is not None:
        chosen = kernel.configured(chosen.tune(*given[0], **given[1]).config)[grid]
    return _run_on_copies(chosen, chosen.kernel.bind(*given), fresh)


def is_differentiated(argument: Any) -> bool:
    """Whether a tape records what is computed from an argument."""
    return isinstance(argument, Tensor) and argument.requires_grad


def _run_on_copies(chosen: KernelLaunch, found: KernelArguments, fresh: set[int]) -> Any:
    """Run a launch on copies of the memories that it writes."""
    grid, group = chosen.kernel.plan(found, chosen.grid, chosen.group)
    module = chosen.kernel.specialize(found.types, found.constants, grid, group)
    written = _find_written(module, len(found.arrays))
    held = [a.numpy() if a.__class__ is DeviceArray else a for a in found.arrays]
    arrays = [np.array(a) if i in written and id(a) not in fresh else a for i, a in enumerate(held)]
    found = found._replace(arrays=tuple(arrays), tensors=True)
    try:
        returned = chosen.run(module, found)
    except ExecutionError as error:
        if error.location is not None and is_library_kernel_file(error.location.file):
            error.location = add_scope(library_caller_location())
        raise
    rest = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    types = list(found.types.values())
    results = [Tensor(a, types[i].policy or types[i].dtype) for i, a in enumerate(arrays) if i in written]
    return _unwrap([*results, *rest])


def _make_memory(argument: Any, fresh: set[int]) -> Any:
    """Memory for an `OutputMemory`, whose array is noted in `fresh`; any other argument as it is."""
    if not isinstance(argument, OutputMemory):
        return argument
    array = np.zeros(tuple(int(n) for n in argument.type.shape), argument.type.dtype.numpy)
    fresh.add(id(array))
    return Tensor(array, argument.type.policy or argument.type.dtype)


def _name_arguments(kernel: Kernel, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the name of their parameter."""
    return {**dict(zip(kernel.parameters.signature.parameters, args, strict=False)), **named}


def _unwrap(results: list[Tensor]) -> Any:
    return tuple(results) if len(results) > 1 else results[0] if results else None


def update_arguments(chosen: KernelLaunch, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Record a launch whose written tensors stand for their new memory afterwards; return what the kernel returns.

    Raises:
        TraceError: the kernel writes a tensor that is not made in this trace, or one of which views exist.
    """
    given = _name_arguments(chosen.kernel, args, named)
    builder = CURRENT_BUILDER.get()
    assert builder is not None, "a launch outside of a trace runs at once"
    before = {n: a.data for n, a in given.items() if isinstance(a, Tensor)}
    results = record_launch(chosen, args, named)
    for name, value in before.items():
        if name in results:
            _check_updatable(builder, chosen.kernel, name, value)
    for name in before:
        if name in results:
            given[name].data = results.pop(name).data
    outer = [n for n in results if n in given]
    if outer:
        raise _make_ownership_error(chosen.kernel, outer[0])
    return _unwrap(list(results.values()))


def _check_updatable(builder: Builder, kernel: Kernel, name: str, value: Any) -> None:
    node = builder.producers.get(value) if isinstance(value, Value) else None
    if node is None or not builder.holds(node):
        raise _make_ownership_error(kernel, name)
    views = [n for n in builder.producers.values() if n.op in VIEW_OPS and value in n.args]
    if node.op in VIEW_OPS or views:
        other = views[0] if views else node
        raise TraceError(
            f"{kernel.parameters.name} writes `{name}`, which shares memory with a view of it ({other.op.__name__} at "
            f"{other.loc})", location=user_location(), expected="a tensor without views",
            suggestion=f"pass the whole tensor, or write {name}_new = ts.launch(kernel, grid, ..., {name}={name})",
        )  # fmt: skip


def _make_ownership_error(kernel: Kernel, name: str) -> TraceError:
    return TraceError(
        f"{kernel.parameters.name} writes `{name}`, which is not made in the function being traced",
        location=user_location(), expected="a tensor that this function makes: ts.empty(...), ts.zeros(...)",
        suggestion=f"out = ts.launch(kernel, grid, ..., {name}=ts.like({name})) returns the memory that it writes",
    )  # fmt: skip


def record_launch(chosen: KernelLaunch, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """Record a launch in the open trace: the written memories by parameter, then the values that the kernel returns."""
    fresh: dict[Value, OutputMemory] = {}

    def stand_in(argument: Any) -> Any:
        if not isinstance(argument, OutputMemory):
            return argument
        value = Value(argument.type)
        fresh[value] = argument
        return Tensor(value)

    kernel = chosen.kernel
    given = [stand_in(a) for a in args], {k: stand_in(a) for k, a in named.items()}
    found = kernel.bind(*given)
    tensors = _name_arguments(kernel, *given)  # as tensors, so that a tape knows them
    arrays = [
        x if isinstance(x := tensors.get(n), Tensor) else a for n, a in zip(found.types, found.arrays, strict=True)
    ]
    found = found._replace(arrays=tuple(arrays))
    grid, group = kernel.plan(found, chosen.grid, chosen.group)
    module = kernel.specialize(found.types, found.constants, grid, group)
    return _LaunchRecorder(module, found, fresh, kernel).record()


def _check_static(kernel: Kernel, name: str, type: Any) -> None:
    if symbol_names(type.shape):
        raise ShapeError(
            f"a kernel needs sizes that are numbers: `{name}` of {kernel.parameters.name} has {type}",
            location=user_location(), expected="a known shape", received=str(type),
        )  # fmt: skip


def _find_written(module: Module, count: int) -> set[int]:
    """The numbers of the first `count` parameters that a kernel writes."""
    kernel = module.functions[1]
    targets = tile.find_written_refs(kernel.body)
    return {i for i, p in enumerate(kernel.params[:count]) if p in targets}


@dataclass(frozen=True)
class _LaunchRecorder:
    """A launch that is recorded: its module, its bound arguments, and the values that stand for new memory."""

    module: Module
    found: KernelArguments
    fresh: Mapping[Value, OutputMemory]
    kernel: Kernel

    def record(self) -> dict[str, Tensor]:
        """Add the node, and return its results by name."""
        function, arrays = self.module.functions[1], self.found.arrays
        stored = _find_written(self.module, len(arrays))
        pairs = list(zip(function.params, arrays, strict=False))
        self._check_aliasing(function, pairs, stored)
        if not stored and not function.params[len(arrays) :]:
            raise TraceError(
                f"{function.name} writes no memory, so it has no part in a traced function", location=user_location(),
                expected="a kernel that writes an argument or returns a value",
            )  # fmt: skip
        memories = [p for p, a in pairs if isinstance(p.type, RefType) and not self._is_fresh(a)]
        new = [p for p, a in pairs if self._is_fresh(a)] + list(function.params[len(arrays) :])
        constants = [_make_constant(p, a, function) for p, a in pairs if not isinstance(p.type, RefType)]
        params = (*memories, *new)
        nodes = _locate_checks(function).nodes if is_library_kernel_file(function.loc.file) else function.body.nodes
        body = copy_block(Block(params, (*constants, *nodes), ()))
        operands = [_make_operand(p, a) for p, a in pairs if p in memories]
        # In the order of the kernel's parameters.
        results = [p for i, p in enumerate(function.params) if i in stored or p in new]
        hints = {k: v for k, v in function.attrs.items() if k != "grid"}
        written = tuple(params.index(p) for p in results)
        attrs = {"kernel": function.name, "grid": function.attrs["grid"], "written": written, "attrs": Attrs(hints)}
        types = tuple(TensorType(p.type.shape, p.type.dtype, p.type.policy) for p in results)  # type: ignore[union-attr]
        names = [p.hint for p in memories], [p.hint for p in results]
        found = self._bind(operands, attrs, body, types, names)
        return dict(zip(names[1], found, strict=True))

    def _bind(
        self, operands: list[Tensor], attrs: dict[str, Any], body: Block, types: Any, names: tuple[list[str], list[str]]
    ) -> list[Tensor]:
        """The results of the node, which has the derivative rules of its kernel."""

        def bind(given: Sequence[Tensor]) -> list[Tensor]:
            return bind_region_op(control_flow.launch, given, attrs, [body], types)

        if not self.kernel.rules:
            return bind(operands)
        numbers = {n: a for n, a in zip(self.found.types, self.found.arrays, strict=True) if np.isscalar(a)}
        group = int(attrs["attrs"].get("group", 1))
        call = KernelCall(tuple(attrs["grid"]), group, {**self.found.constants, **numbers})
        return bind_ruled_launch(bind, operands, names, call, self.kernel)

    def _is_fresh(self, argument: Any) -> bool:
        return isinstance(argument, Tensor) and argument.is_traced and argument.data in self.fresh

    def _check_aliasing(self, function: Function, pairs: Sequence[tuple[Value, Any]], written: set[int]) -> None:
        """Refuse one tensor as two arguments of which the kernel writes one: the kernel would read what it writes."""
        held = [(i, p, a.data if isinstance(a, Tensor) else a) for i, (p, a) in enumerate(pairs)]
        for i, param, array in held:
            twin = next((q for j, q, other in held if j != i and other is array and not np.isscalar(array)), None)
            if i in written and twin is not None:
                store = next(n for n in function.body.walk() if n.op.effects & {"write"} and n.args[0] is param)
                raise ArgumentError(
                    f"one tensor is passed as `{param.hint}` and as `{twin.hint}`, and the kernel writes "
                    f"`{param.hint}` at {store.loc}", location=user_location(),
                    expected="different tensors", suggestion=f"{param.hint}=ts.like({twin.hint})",
                )  # fmt: skip


def _locate_checks(function: Function) -> Block:
    """The body of a kernel of this package, whose assertions are at the user's op or call."""
    builder = CURRENT_BUILDER.get()
    place = (builder.location if builder is not None else None) or add_scope(library_caller_location())

    def locate(block: Block) -> Block:
        return replace(block, nodes=tuple(map(locate_node, block.nodes)))

    def locate_node(node: Node) -> Node:
        loc = place if node.op is tile.assert_ else node.loc
        return replace(node, loc=loc, regions=tuple(map(locate, node.regions)))

    return locate(function.body) if any(n.op is tile.assert_ for n in function.body.walk()) else function.body


def _make_constant(param: Value, value: Any, function: Function) -> Node:
    """A number that a launch passes: a constant of the traced program."""
    assert isinstance(param.type, TensorType)
    attrs = Attrs({"shape": (), "value": np.asarray(value).item(), "dtype": param.type.dtype})
    return Node(full, (), attrs, (param,), (), function.loc)


def _make_operand(param: Value, argument: Any) -> Tensor:
    tensor = argument if isinstance(argument, Tensor) else Tensor(np.asarray(argument))
    if tensor.dtype != param.type.dtype:
        tensor = cast(tensor, dtype=param.type.dtype)
    if tensor.type.shape != param.type.shape:
        raise DTypeError(
            f"argument `{param.hint}` has another type", location=user_location(), received=str(tensor.type)
        )
    return tensor
