"""Memory references: the memrefs that a kernel names, the subviews and gathers that subscripts select, and how kernel
functions take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from tessera.core.errors import DTypeError, OutOfBoundsError, ShapeError, user_location
from tessera.core.shapes import broadcast, format_shape
from tessera.core.symbolic_dim import Dim, Size, proves_at_most
from tessera.core.types import DType, RefType, TensorType, bool_
from tessera.frontend.kernel.conversions import broadcast_to_shape, convert_to_dtype, convert_to_mask
from tessera.frontend.kernel.python_ast.source import UPDATING_FUNCTIONS
from tessera.frontend.kernel.trace import Index, add_indices, as_index, current_trace, emit_op, is_traced, reshape_to
from tessera.ir.analysis import AffineAnalysis, AffineForm, add_terms
from tessera.ir.core import Node, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.ops.tensor.basic import broadcast_to, full
from tessera.ops.tensor.shape import iota, reshape

# Affine analysis of indices: an index as a constant plus multiples of scalars and iotas, by use-def chains.


def find_affine_form(index: Index, deep: bool = True) -> AffineForm | None:
    """Find the affine form of an integer tensor, or None.

    A scalar that is not affine is a symbol; without `deep`, every scalar is.
    """
    if isinstance(index, int):
        return AffineForm(index)
    index = as_index(index)
    if not index.is_traced or not index.dtype.is_integer:
        return None
    producers = current_trace().builder.producers
    follows = _always if deep else _is_block_or_constant
    return AffineAnalysis(producers, follows, narrow=True).find_form(index.data)


def _always(node: Node) -> bool:
    return True


def _is_block_or_constant(node: Node) -> bool:
    return len(node.results) == 1 and (bool(node.out.type.rank) or node.op is basic.full)


def find_constant(index: Index) -> int | None:
    """Return the compile-time value of an index, or None."""
    found = index if isinstance(index, int) else find_affine_form(index)
    if isinstance(found, AffineForm):
        return found.constant if found.is_constant else None
    return found


def constant_difference(upper: Index, lower: Index) -> int | None:
    """Return upper - lower where it is a compile-time constant, or None."""
    high, low = find_affine_form(upper), find_affine_form(lower)
    if high is None or low is None:
        return None
    gap = high.plus(low, -1)
    if not gap.is_constant:  # equal expressions have equal values
        alike: dict[Any, int] = {}
        for scalar, factor in gap.scalars.items():
            alike = add_terms(alike, {_expression_key(scalar): factor})
        gap = AffineForm(gap.constant, alike, gap.ramps)
    return gap.constant if gap.is_constant else None


def _expression_key(value: Value) -> Any:
    """Make a key of a value's expression, where it reads no memory: equal expressions have equal keys."""
    node = current_trace().builder.producers.get(value)
    if node is None or node.op.effects or node.regions or len(node.results) != 1:
        return value
    return (node.op, node.attrs, tuple(map(_expression_key, node.args)))


def build_scalar_part(found: AffineForm) -> Index:
    """Build the index of the part of a form that is uniform over the block."""
    total: Index = 0
    for scalar, factor in found.scalars.items():
        each = Tensor(scalar)
        total = add_indices(total, each if factor == 1 else each * factor)  # type: ignore[operator]
    return add_indices(total, found.constant)


# Places in memory: a tensor or buffer that a kernel names, and blocks of it.


@dataclass(eq=False)
class MemRef:
    """A memory reference: its name in the kernel, its declared dims, and its IR value.

    Buffers in a list come to share one allocation: `prefix` is then this one's place in it. That
    works only as long as no node has `used` the value.
    """

    value: Value
    name: str
    dims: tuple[Size, ...] = ()
    prefix: tuple[int, ...] = ()
    used: bool = False

    @property
    def type(self) -> RefType:
        """The type of the ref."""
        assert isinstance(self.value.type, RefType)
        return self.value.type

    @property
    def shape(self) -> tuple[Size, ...]:
        """The shape of the memory, without the shared axis; symbolic sizes are those of the trace."""
        return self.type.shape[len(self.prefix) :]

    def named(self, name: str) -> None:
        """Name a buffer by the first variable that holds it."""
        if self.name.startswith("the "):
            self.name = name

    def ref(self) -> Value:
        """The IR value; marks it as used."""
        self.used = True
        return self.value


class MemRefAccess:
    """An access to memory: `load` and `store` record it; arithmetic loads implicitly."""

    memory: MemRef

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the loaded block."""
        raise NotImplementedError

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.memory.type.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the block."""
        return len(self.shape)

    @property
    def type(self) -> TensorType:
        """The type of the block."""
        return self.memory.type.block(self.shape)

    @property
    def is_element(self) -> bool:
        """Whether this is a single element of a larger memory."""
        return not self.shape and bool(self.memory.shape)

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """The block that lies here now."""
        raise NotImplementedError

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Write a block here; numbers and smaller shapes are broadcast."""
        raise NotImplementedError

    def indices(self) -> list[Tensor]:
        """An index for each axis of the memory, which together broadcast to the shape of the block."""
        raise NotImplementedError

    def operands(self, mask: Any, other: Any = None) -> tuple[Tensor | None, list[Tensor]]:
        """The mask operand, or the mask and value operands; a value alone gets a full mask."""
        given = convert_to_mask(mask, self.shape)
        if other is None:
            return given, [] if given is None else [given]
        given = full(shape=self.shape, value=True, dtype=bool_) if given is None else given
        return given, [given, convert_to_dtype(load_if_memref(other), self.dtype, f"`other` of {self.memory.name}")]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.load(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{self.memory.name}: {self.memory.type}"


def load_if_memref(x: Any) -> Any:
    """Load a memref; return anything else unchanged."""
    return x.load() if isinstance(x, MemRefAccess) else x


@dataclass(frozen=True, eq=False, repr=False)
class MemRefView(MemRefAccess):
    """A block of memory: its start and size along each axis; `dropped` axes have one element."""

    memory: MemRef
    starts: tuple[Index, ...]
    sizes: tuple[int, ...]  # in a view of whole memory maybe symbolic: nothing is read from it or written to it
    dropped: frozenset[int] = frozenset()
    vector: int = 1  # how many elements are contiguous and aligned

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block: the axes that were not indexed by a scalar."""
        return tuple(n for axis, n in enumerate(self.sizes) if axis not in self.dropped)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole memory."""
        at_zero = all(isinstance(s, int) and s == 0 for s in self.starts)
        return at_zero and not self.dropped and self.sizes == self.memory.shape

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """The size of the block along each axis of the ref.

        Raises:
            ShapeError: a size is symbolic, so that no block has it.
        """
        symbolic = next((s for s in self.sizes if isinstance(s, Dim)), None)
        if symbolic is not None:
            raise ShapeError(
                f"a block of {self.memory.name} has the size {symbolic}, which is known only when the program runs",
                location=user_location(), expected="blocks of constant sizes",
                suggestion='tile.load(A[start : start + BLOCK], edge="clip"), in a loop over tile.range(0, n, BLOCK)',
            )  # fmt: skip
        return (1,) * len(self.memory.prefix) + self.sizes

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """The block that lies here now."""
        given, rest = self.operands(mask, other)
        if given is None and edge == "error":
            self.check()
        if given is not None:
            rest[0] = reshape_to(given, self.full_sizes)
        if len(rest) > 1 and rest[1].shape:
            rest[1] = reshape_to(broadcast_to_shape(rest[1], self.shape, "the block"), self.full_sizes)
        operands = [self.memory.ref(), *self.origin(), *rest]
        return reshape_to(
            emit_op(tile.load, operands, shape=self.full_sizes, edge=edge, vector=self.vector), self.shape
        )

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Write a block here; numbers and smaller shapes are broadcast."""
        name = self.memory.name
        given, rest = self.operands(mask)
        if given is None and edge == "error":
            self.check()
        block = broadcast_to_shape(convert_to_dtype(value, self.dtype, name), self.shape, name)
        masks = [reshape_to(m, self.full_sizes) for m in rest]
        operands = [self.memory.ref(), reshape_to(block, self.full_sizes), *self.origin(), *masks]
        emit_op(tile.store, operands, edge=edge, vector=self.vector)

    def origin(self) -> list[Tensor]:
        """The start along each axis of the ref."""
        return [as_index(i) for i in (*self.memory.prefix, *self.starts)]

    def indices(self) -> list[Tensor]:
        """An index for each axis of the ref, which together broadcast to the shape of the block."""
        kept = [axis for axis in range(len(self.sizes)) if axis not in self.dropped]
        found: list[Tensor] = [as_index(i) for i in self.memory.prefix]
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if axis in self.dropped:
                found.append(as_index(start))
                continue
            along = tuple(size if a == axis else 1 for a in kept)
            ramp = reshape(iota(shape=(size,)), shape=along)
            found.append(broadcast_to(ramp + start, shape=self.shape))
        return found

    def check(self) -> None:
        """Check a block that is out of bounds at compile time."""
        for axis, (start, size, room) in enumerate(zip(self.starts, self.sizes, self.memory.shape, strict=True)):
            first = None if isinstance(room, Dim) else find_constant(start)
            if first is not None and (first < 0 or first + size > room):
                raise OutOfBoundsError(
                    f"{_format_span(first, size)} of {self.memory.name} is outside axis {axis} of size {room}",
                    expected=f"{self.memory.name} has shape {format_shape(self.memory.shape)}",
                    suggestion='tile.load(..., edge="clip") reads zeros outside' if size > 1 else None,
                )


def _format_span(first: int, size: int) -> str:
    return f"index {first}" if size == 1 else f"the block {first}:{first + size}"


@dataclass(frozen=True, eq=False, repr=False)
class MemRefGather(MemRefAccess):
    """One index for each axis of the memory, scalars or blocks, broadcast together."""

    memory: MemRef
    given: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the indices, broadcast."""
        return tuple(int(n) for n in broadcast(*(t.shape for t in self.given)))  # type: ignore[arg-type]

    def load(self, mask: Any = None, other: Any = None, edge: str = "error") -> Tensor:
        """Load the elements at the indices."""
        run = self.run()
        if run is not None:
            return reshape_to(run.load(*self._reshaped(run, mask, other), edge), self.shape)
        given, rest = self.operands(self._inside(mask, edge), other)
        if len(rest) > 1 and rest[1].shape:
            rest[1] = broadcast_to_shape(rest[1], self.shape, "the block")
        return emit_op(tile.gather, [self.memory.ref(), *self.indices(), *rest])

    def store(self, value: Any, mask: Any = None, edge: str = "error") -> None:
        """Store to the elements at the indices; numbers and smaller shapes are broadcast."""
        name = self.memory.name
        block = broadcast_to_shape(convert_to_dtype(value, self.dtype, name), self.shape, name)
        run = self.run()
        if run is not None:
            run.store(reshape_to(block, run.shape), self._reshaped(run, mask, None)[0], edge)
            return
        _, rest = self.operands(self._inside(mask, edge))
        emit_op(tile.scatter, [self.memory.ref(), block, *self.indices(), *rest])

    def indices(self) -> list[Tensor]:
        """An index for each axis of the ref, each of the shape of the block."""
        blocks = [t if t.shape == self.shape else broadcast_to(t, shape=self.shape) for t in self.given]
        return [*(as_index(i) for i in self.memory.prefix), *(as_index(t) for t in blocks)]

    def _inside(self, mask: Any, edge: str) -> Any:
        """Mask out-of-bounds elements for edge="clip": gathers have no edge mode."""
        if edge == "error":
            return mask
        for index, size in zip(self.given, self.memory.shape, strict=True):
            inside = (index >= 0) & (index < size)  # type: ignore[operator]
            mask = inside if mask is None else mask & inside
        return mask

    def _reshaped(self, run: MemRefView, mask: Any, other: Any) -> tuple[Any, Any]:
        return self._fitted(run, mask), self._fitted(run, other)

    def _fitted(self, run: MemRefView, block: Any) -> Any:
        if not isinstance(block, Tensor) or not block.shape:
            return block
        return reshape_to(broadcast_to_shape(block, self.shape, "the block"), run.shape)

    def run(self) -> MemRefView | None:
        """Convert the gather to a block access, where each axis of the memory has its own affine axis of indices.

        A block access is faster than a gather on every target, and is checked as a whole.
        """
        forms = [find_affine_form(t, deep=False) for t in self.given]
        shape, rank = self.shape, len(self.shape)
        starts, sizes, dropped, walked = [], [], set(), []
        for axis, found in enumerate(forms):
            if found is None or len(found.ramps) > 1 or any(step != 1 for step in found.ramps.values()):
                return None
            walked += list(found.ramps)
            if not found.ramps:
                dropped.add(axis)
            starts.append(found)
            sizes.append(shape[next(iter(found.ramps))] if found.ramps else 1)
        if walked != [a - rank for a in range(rank) if shape[a] != 1]:
            return None
        return MemRefView(self.memory, tuple(build_scalar_part(f) for f in starts), tuple(sizes), frozenset(dropped))


def view_whole(memory: MemRef) -> MemRefView:
    """View the whole of a memory."""
    return MemRefView(memory, (0,) * len(memory.shape), memory.shape)  # type: ignore[arg-type]


def subscript_view(view: MemRefView, index: Any) -> Any:
    """Subscript a view; with None in the index, load the block."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(i is None for i in items):
        return view.load()[index]  # type: ignore[index]
    items = _complete_items(view, [_evaluate_size(load_if_memref(i)) for i in items])
    if any(isinstance(i, Tensor) and i.ndim for i in items):
        return _select_gather(view, items)
    starts, sizes, dropped = list(view.starts), list(view.sizes), set(view.dropped)
    for axis, item in zip(_kept_axes(view), items, strict=True):
        start, size = _select_item(view, axis, item)
        starts[axis], sizes[axis] = add_indices(starts[axis], start), size
        if not isinstance(item, slice):
            dropped.add(axis)
    return MemRefView(view.memory, tuple(starts), tuple(sizes), frozenset(dropped))


def _evaluate_size(item: Any) -> Any:
    """An index that is a symbolic size as its value at run time; anything else unchanged."""
    return as_index(item) if isinstance(item, Dim) else item


def _kept_axes(view: MemRefView) -> list[int]:
    return [axis for axis in range(len(view.sizes)) if axis not in view.dropped]


def _complete_items(view: MemRefView, items: list[Any]) -> list[Any]:
    """Complete an index to one item for each axis: `...` and missing axes are full slices."""
    used = sum(i is not Ellipsis for i in items)
    if used > len(view.shape):
        raise ShapeError(
            f"{used} indices for {view.memory.name}, which has rank {len(view.shape)}",
            received=format_shape(view.shape),
        )
    fill = [slice(None)] * (len(view.shape) - used)
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    return [*items[:at], *fill, *items[at + 1 :]]


def _select_item(view: MemRefView, axis: int, item: Any) -> tuple[Index, int]:
    """Convert an item to its start and size along an axis of the view."""
    rule = _ITEM_RULES.get(type(item))
    if rule is None:
        raise DTypeError(
            f"{item!r} is not an index into {view.memory.name}",
            expected="an int, a slice or a block of ints",
            received=type(item).__name__,
        )
    return rule(view, axis, item)


def _select_number(view: MemRefView, axis: int, item: int) -> tuple[Index, int]:
    size = view.sizes[axis]
    _check_bound(view, axis, item, "index", None if isinstance(size, Dim) else size - 1)
    return item, 1


def _select_scalar(view: MemRefView, axis: int, item: Tensor) -> tuple[Index, int]:
    if not item.dtype.is_integer:
        raise DTypeError(
            f"an index into {view.memory.name} is not an integer", expected="int64", received=str(item.type),
            suggestion="choose elements: A[...] = tile.where(condition, new, old)" if item.dtype == bool_ else
            "cast it: int(x)",
        )  # fmt: skip
    return item, 1


def _select_slice(view: MemRefView, axis: int, item: slice) -> tuple[Index, int]:
    lower, upper = (_evaluate_size(load_if_memref(x)) for x in (item.start, item.stop))
    if item.step not in (None, 1):
        raise ShapeError(
            "a slice of memory has no step", received=f"step {item.step}",
            suggestion="use a block of indices: A[start + step * tile.arange(0, n)]"
            + ("; tile.flip(A[0:n]) reverses a block" if item.step == -1 else ""),
        )  # fmt: skip
    lower = 0 if lower is None else lower
    upper = _evaluate_size(view.sizes[axis]) if upper is None else upper
    for bound in (lower, upper):
        if not is_traced(bound):
            _check_bound(view, axis, bound, "bound", None)
    for bound in (lower, upper):
        if isinstance(bound, Tensor) and not bound.dtype.is_integer:
            raise DTypeError(
                f"a bound of this slice of {view.memory.name} is not an integer", expected="int64",
                received=str(bound.type), suggestion="divide by // instead of /, or cast it: int(x)",
            )  # fmt: skip
    size = constant_difference(upper, lower)
    if size is None:
        raise ShapeError(
            f"the size of this slice of {view.memory.name} is not known while compiling",
            expected="bounds whose difference is a constant",
            suggestion='A[start : start + BLOCK]; at an edge tile.load(A[start : start + BLOCK], edge="clip")',
        )
    if size < 0:
        raise ShapeError(f"a slice of {view.memory.name} ends before it starts", received=f"{size} elements")
    return lower, size


def _check_bound(view: MemRefView, axis: int, bound: int, what: str, last: int | None) -> None:
    if bound < 0 or (last is not None and bound > last):
        name, size = view.memory.name, view.sizes[axis]
        raise OutOfBoundsError(
            f"{what} {bound} is outside axis {axis} of {name}, which has size {size}",
            expected=f"{what}es from 0 to {size - 1}" if last is not None else "bounds from 0 on",
            suggestion=f"count from the start: {size + bound}" if bound < 0 and proves_at_most(-bound, size) else None,
        )


_ITEM_RULES: dict[type, Callable[..., tuple[Index, int]]] = {
    int: _select_number,
    Tensor: _select_scalar,
    slice: _select_slice,
}


def _select_gather(view: MemRefView, items: Sequence[Any]) -> MemRefGather:
    """Select elements by blocks of indices; beside a slice each block has an axis of its own."""
    kept = dict(zip(_kept_axes(view), items, strict=True))
    outer = any(isinstance(i, slice) for i in items)
    axes = [a for a, i in kept.items() if isinstance(i, slice) or (isinstance(i, Tensor) and i.ndim)]
    given: list[Any] = []
    for axis, start in enumerate(view.starts):
        item = kept.get(axis, 0)
        block: Any = _slice_indices(view, axis, item) if isinstance(item, slice) else _as_index_block(view, item)
        if outer and block.ndim == 1:
            block = reshape(block, shape=(-1,) + (1,) * (len(axes) - axes.index(axis) - 1))
        given.append(block if isinstance(start, int) and start == 0 else block + start)
    return MemRefGather(view.memory, tuple(given))


def _slice_indices(view: MemRefView, axis: int, item: slice) -> Any:
    start, size = _select_slice(view, axis, item)
    return iota(shape=(size,)) + start


def _as_index_block(view: MemRefView, item: Any) -> Tensor:
    return _select_scalar(view, 0, item)[0] if isinstance(item, Tensor) else as_index(item)  # type: ignore[return-value]


# Calling conventions of kernel functions: memrefs passed unloaded, updated first arguments, inlining.


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
TAKES_MEMREFS: set[Any] = {len, isinstance, type}
# A function here, called as a statement with so many arguments (None: any number), gives its first
# argument, a variable, the result: blocks are values, and the call would otherwise do nothing.
UPDATES_FIRST: dict[Any, int | None] = {}


def takes_memrefs(function: AnyFunction) -> AnyFunction:
    """Pass memory views to the function unloaded."""
    TAKES_MEMREFS.add(function)
    return function


def updates_first(function: AnyFunction, arguments: int | None = None) -> AnyFunction:
    """Let the function, called as a statement, update its first argument."""
    assert function.__name__ in UPDATING_FUNCTIONS, "liveness must know that this updates a variable"
    UPDATES_FIRST[function] = arguments
    return function


def find_inlinable(function: Any, args: Sequence[Any]) -> FunctionType | None:
    """Find the Python function to inline from source; None for a function that runs at compile time."""
    found = getattr(function, "kernel_function", function)  # a kernel that a kernel calls
    if not isinstance(found, FunctionType) or not _is_user_code(found):
        return None
    if found is not function or any(_is_runtime_value(a) for a in args) or _uses_tile_names(found):
        return found
    return None


# Modules of this package that are written in the kernel language: they are read as source, as a user's are.
_KERNEL_LANGUAGE = ("tessera.stdlib", "tessera.frontend.kernel.tile_api.online_softmax")


def _is_user_code(function: FunctionType) -> bool:
    """Whether this is user code, not a function of this package, which records ops itself."""
    module = function.__module__ or ""
    package = module.partition(".")[0]
    return (package != "tessera" or module.startswith(_KERNEL_LANGUAGE)) and package != "numpy"


def _is_runtime_value(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_is_runtime_value(a) for a in argument)
    return isinstance(argument, MemRefAccess) or is_traced(argument)


def _uses_tile_names(function: FunctionType) -> bool:
    """Whether a function names something of this package: it may use ids or memory."""
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return any(_package_of(x) == "tessera" for x in named)


def _package_of(x: Any) -> str:
    name = x.__name__ if isinstance(x, ModuleType) else getattr(x, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""
