"""Scopes: the names of a function being interpreted, its mutable lists and dicts, and debug locations of its lines."""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from tessera.core.errors import Location, TesseraError, UnknownNameError, UnsupportedSyntaxError
from tessera.core.types import BY_NAME, bool_
from tessera.frontend.jit.line_marks import LINE_MARKS_ENABLED
from tessera.frontend.kernel.memref import MemRefAccess, MemRefView
from tessera.frontend.kernel.python_ast.source import FunctionSource, find_writes
from tessera.frontend.kernel.tile_api.synchronisation import MBarrier
from tessera.frontend.kernel.trace import TraceState, current_trace, is_traced, normalise_constant
from tessera.ir.core import Value
from tessera.ir.rules import REGISTRY
from tessera.ir.tensor import Tensor
from tessera.ops.api import methods
from tessera.ops.dialects import tile
from tessera.ops.tensor.basic import full

# The names of a function being interpreted, and where a name is looked up.


_MISSING = object()


class UnboundName:
    """A name that may have no value here; reading it gives this error."""

    def __init__(self, error: TesseraError) -> None:
        self.error = error


class KernelFrame:
    """One call of an interpreted function: its names, its source, and the scope around it."""

    def __init__(
        self, trace: TraceState, source: FunctionSource, names: dict[str, Any], outer: Callable[[str], Any]
    ) -> None:
        self.trace = trace
        self.source = source
        self.names = names
        self.outer = outer
        self.result: Any = None
        self.lost: frozenset[str] = frozenset()  # names whose values a stepped program no longer has
        self.returned: Location | None = None  # where the result was given

    def find(self, name: str) -> Any:
        """The value of a name.

        Raises:
            UnknownNameError: nothing defines it, or not on every way here.
        """
        found = self.lookup(name)
        if found is _MISSING:
            raise self.unknown(name)
        if isinstance(found, UnboundName):
            raise found.error
        return found

    def lookup(self, name: str) -> Any:
        """The value of a name, or a marker where it has none."""
        found = self.names.get(name, _MISSING)
        return self.outer(name) if found is _MISSING else found

    def unknown(self, name: str) -> UnknownNameError:
        """The error for a name that nothing defines."""
        known = [*self.names, *_bind_outer_names(self.outer), *dir(builtins)]
        near = difflib.get_close_matches(name, known, 1)
        return UnknownNameError(
            f"`{name}` is not defined",
            expected="a parameter, a variable, a dim of an annotation, or a name of the file",
            suggestion=FOREIGN_SPELLINGS.get(name) or (f"did you mean `{near[0]}`?" if near else _suggest_op(name)),
        )

    def child(self, names: dict[str, Any], source: FunctionSource | None = None) -> KernelFrame:
        """The frame of an inner function, which sees the names of this one."""
        return KernelFrame(self.trace, source or self.source, names, self.lookup)

    def place(self, node: ast.AST) -> Location:
        """Where a piece of syntax stands in its file."""
        return self.source.location(node)


def _suggest_op(name: str) -> str | None:
    """An op of about this name, as a kernel calls it."""
    ops = {full.partition(".")[2]: full for full in REGISTRY}
    near = difflib.get_close_matches(name, ops, 1)
    return f"did you mean `{ops[near[0]]}`?" if near else None


def _bind_outer_names(outer: Any) -> list[str]:
    return list(outer.names()) if isinstance(outer, OuterScope) else list(outer.__self__.names)


class OuterScope:
    """The names a Python function sees outside itself: its closure, its module, the builtins.

    Each value read is noted in the trace, since the compiled kernel depends on it.
    """

    def __init__(self, function: FunctionType, trace: TraceState | None = None) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.cells: Mapping[str, Any] = dict(cells)
        self.globals = function.__globals__
        self.trace = trace

    def names(self) -> list[str]:
        """Every name there is."""
        return [*self.cells, *self.globals]

    def peek(self, name: str) -> Any:
        """What a name holds now, or a marker."""
        if name in self.cells:
            return self.cells[name].cell_contents
        found = self.globals.get(name, _MISSING)
        return getattr(builtins, name, _MISSING) if found is _MISSING else found

    def __call__(self, name: str) -> Any:
        found = self.peek(name)
        if self.trace is not None and found is not _MISSING:
            self.trace.guards.append((self, name, found))
        return normalise_constant(found)


def guards_hold(guards: list[tuple[Any, str, Any]]) -> bool:
    """Whether the outer names a kernel was compiled with still hold what they held."""
    for scope, name, held in guards:
        now = scope.peek(name)
        if now is not held and not _is_unchanged(now, held):
            return False
    return True


def _is_unchanged(now: Any, held: Any) -> bool:
    plain = isinstance(now, (bool, int, float, str, tuple, np.generic)) and type(now) is type(held)
    return plain and bool(now == held)


class ModuleScope:
    """The names of a module, as something a trace can depend on."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def peek(self, name: str) -> Any:
        """What a name holds now."""
        return getattr(self.module, name, _MISSING)


def read_attribute(frame: KernelFrame, base: Any, name: str) -> Any:
    """`base.name`, noted in the trace where `base` is a module.

    Raises:
        UnknownNameError: there is no such attribute.
    """
    try:
        found = getattr(base, name)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(Tensor if isinstance(base, MemRefAccess) else base), 1)
        kind = getattr(base, "__name__", type(base).__name__).rpartition(".")[2]
        raise UnknownNameError(
            f"{'a tensor' if isinstance(base, (MemRefAccess, Tensor)) else f'`{kind}`'} has no `{name}`",
            suggestion=_suggest_attribute(base, name, near),
        ) from None
    if isinstance(base, ModuleType):
        frame.trace.guards.append((ModuleScope(base), name, found))
    return normalise_constant(found)


# Names of Triton, CUDA C++ and Numba, and what a kernel writes instead.
_NO_HINT = "leave it out: the compiler infers it"
_NO_POINTER = "name the elements: tile.load(x[i : i + BLOCK], other=0.0)"
_NO_THREADS = "a kernel computes on blocks: tile.program_id(0) * BLOCK + tile.arange(0, BLOCK)"
_TYPE_NAMES = {"float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16", "int1": "bool"}
FOREIGN_SPELLINGS = {
    **{name: f"write ts.{own}" for name, own in {**_TYPE_NAMES, **{n: n for n in BY_NAME}}.items()},
    **dict.fromkeys(("assume", "max_constancy", "max_contiguous", "multiple_of"), _NO_HINT),
    **dict.fromkeys(("advance", "make_block_ptr", "make_tensor_descriptor", "pointer_type"), _NO_POINTER),
    **dict.fromkeys(("blockDim", "cuda", "threadIdx"), _NO_THREADS),
    **dict.fromkeys(("debug_barrier", "syncthreads", "__syncthreads"), "write tile.barrier()"),
    **dict.fromkeys(("device_assert", "static_assert"), "write assert condition, message"),
    **dict.fromkeys(("device_print", "static_print", "printf"), "write print(x)"),
    **dict.fromkeys(("extra", "libdevice", "math"), "the functions are in tile itself: tile.exp(x)"),
    **dict.fromkeys(("ravel", "view"), "write tile.reshape(x, shape)"),
    **dict.fromkeys(("tl", "triton"), "write tile, after `from tessera import tile`"),
    **dict.fromkeys(("permute", "trans"), "write tile.transpose(x), or x.permute(order) for more than two axes"),
    "associative_scan": "write tile.scan(x, combine, axis=-1)",
    "atomic_xchg": "write tile.atomic_exchange(place, value)",
    "blockIdx": "write tile.program_id(axis)",
    "broadcast_to": "write tile.broadcast(x, shape)",
    "cat": "write tile.join(a, b), whose last axis has size 2, and tile.reshape",
    "clamp": "write tile.clip(x, low, high)",
    "constexpr": "write ts.constexpr",
    "dot_scaled": "multiply by the scales: tile.dot(a, b) * a_scale * b_scale",
    "expand_dims": "write x[:, None]",
    "fdiv": "write a / b",
    "gridDim": "write tile.num_programs(axis)",
    "interleave": "write tile.join(a, b) and tile.reshape",
    "rand": "write tile.random(seed, offsets)",
    "xor_sum": 'write tile.reduce(x, "xor")',
}


def _suggest_attribute(base: Any, name: str, near: list[str]) -> str | None:
    """What to write instead of `base.name`: for a name of another language its counterpart, else a close spelling."""
    if isinstance(base, ModuleType) and base.__name__.startswith("tessera") and name in FOREIGN_SPELLINGS:
        return FOREIGN_SPELLINGS[name]
    if isinstance(base, (MemRefAccess, Tensor)) and name in methods.SPELLINGS:
        return f"write {methods.SPELLINGS[name]}"
    return f"did you mean `{near[0]}`?" if near else _suggest_spelling(name)


def _suggest_spelling(name: str) -> str | None:
    near = difflib.get_close_matches(name, BY_NAME, 1)
    return f"did you mean the type `ts.{near[0]}`?" if near else None


MUTATING_METHODS = frozenset(
    {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem"}
)


@contextmanager
def freeze_containers(frame: KernelFrame) -> Iterator[None]:
    """A loop or branch walked at run time begins: the lists and dicts there are stay as they are in it."""
    trace = frame.trace
    seen = (v for each in _enclosing_frames(frame) for v in _find_containers(each.names.values()))
    before, trace.frozen_containers = trace.frozen_containers, {**trace.frozen_containers, **{id(v): v for v in seen}}
    try:
        yield
    finally:
        trace.frozen_containers = before


def _enclosing_frames(frame: KernelFrame) -> Iterator[KernelFrame]:
    """A frame, and those of the functions that its function stands in."""
    here: Any = frame
    while isinstance(here, KernelFrame):
        yield here
        here = getattr(here.outer, "__self__", None)


def _find_containers(values: Any) -> Iterator[Any]:
    """The lists and dicts among values, and in them."""
    for value in values:
        if isinstance(value, (list, dict)):
            yield value
        if isinstance(value, (list, tuple, dict)):
            yield from _find_containers(value.values() if isinstance(value, dict) else value)


def check_mutation(trace: TraceState, container: Any) -> None:
    """Refuse to change a list or dict from outside the kernel, or from outside a loop or branch walked at run time.

    Raises:
        UnsupportedSyntaxError: this is one.
    """
    kind = type(container).__name__
    if any(
        container is held
        for held in _find_containers([*trace.constants.values(), *(held for _, _, held in trace.guards)])
    ):
        raise UnsupportedSyntaxError(
            f"a {kind} from outside is changed: to a kernel it is a constant, read once while compiling",
            expected=f"a {kind} made in the kernel, or memory that it writes",
            suggestion="pass a NumPy array or a ts.Tensor, which kernels write in place: out[i] = value",
        )
    if id(container) in trace.frozen_containers:
        raise UnsupportedSyntaxError(
            f"a {kind} made outside is changed in a loop or branch walked at run time",
            expected=f"a {kind} changed by what is known while compiling: it exists only then",
            suggestion="unroll the loop (tile.static_range), or use variables, or memory: tile.alloc_register",
        )


def check_mutating_call(trace: TraceState, function: Any) -> None:
    """The same for its methods."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, (list, dict)) and getattr(function, "__name__", "") in MUTATING_METHODS:
        check_mutation(trace, owner)


# Line marks: debug locations before each source line, with the live variables, for stepping.


_MAX_REPR_LENGTH = 200


def mark_statement(frame: KernelFrame, node: ast.stmt) -> None:
    """Note the statement that is read next; with LINES, mark it in the program."""
    frame.trace.frame = frame
    if LINE_MARKS_ENABLED.get() and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):  # no docstrings
        _emit_mark(frame, tile.line, [])
    if isinstance(node, ast.For):  # in its body the counter has a value again
        frame.lost -= find_writes([node.target])


def drop_dead_names(frame: KernelFrame, node: ast.stmt) -> None:
    """Forget what a branch or loop assigned and nothing reads: the program does not keep it."""
    if isinstance(node, (ast.If, ast.For, ast.While)):
        frame.lost |= find_writes([node]) - frame.source.live.after.get(node, frozenset())
    else:
        frame.lost -= find_writes([node])


def pause(condition: Any = True) -> None:
    """Stop in the debugger here, in the programs where the condition (a bool or bool scalar) holds."""
    trace = current_trace("ts.debug.break_here")
    assert trace.frame is not None
    trace.pauses = True
    if not is_traced(condition):
        condition = full(shape=(), value=bool(condition), dtype=bool_)
    _emit_mark(trace.frame, tile.pause, [condition.data])


@contextmanager
def compile_with_marks() -> Iterator[None]:
    """Compile kernels and traced functions in here with a mark before each line."""
    token = LINE_MARKS_ENABLED.set(True)
    try:
        yield
    finally:
        LINE_MARKS_ENABLED.reset(token)


def needs_marks(trace: TraceState) -> bool:
    """Whether a kernel just read must be read again, with marks: it stops in the debugger somewhere."""
    return trace.pauses and not LINE_MARKS_ENABLED.get()


def _emit_mark(frame: KernelFrame, op: Any, first: Sequence[Value]) -> None:
    names, values, known = [], [], []
    for name, held in frame.names.items():
        value = _visible_value(held)
        if value is not None and name not in frame.lost:
            names.append(name)
            values.append(value)
        elif not isinstance(held, (UnboundName, Tensor, MemRefView, ModuleType)) and not callable(held):
            known.append((name, repr(held)[:_MAX_REPR_LENGTH]))
    attrs = {"names": tuple(names), "known": tuple(known), "function": frame.source.name, "depth": frame.trace.depth}
    frame.trace.builder.add(op, [*first, *values], attrs, loc=frame.trace.builder.location)


def _visible_value(held: Any) -> Value | None:
    if isinstance(held, Tensor) and held.is_traced:
        return held.data
    if isinstance(held, MBarrier) and held.is_whole:
        return held.memory.value
    # Fresh buffers may yet come to share one allocation (buffers.py): only what is in use has its value for good.
    if isinstance(held, MemRefView) and held.is_whole and not held.memory.prefix:
        return held.memory.value if held.memory.used or held.memory.type.space == "global" else None
    return None
