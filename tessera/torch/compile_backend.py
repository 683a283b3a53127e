"""Backend of torch.compile: forward and backward graphs of ATen ops as compiled programs (TorchDynamo, AOTAutograd).

`torch.compile(model, backend="tessera")` finds `tessera` through the entry point group `torch_dynamo_backends`. What
the op table does not have, PyTorch runs; `report()` and the log say what and why.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, cast

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from tessera.codegen.contract import get_capable_backend
from tessera.core.errors import ArgumentError, DTypeError, Location, ShapeError, TesseraError, UnsupportedOpError
from tessera.core.shapes import bind_shapes
from tessera.core.size_guards import holds_for
from tessera.core.symbolic_dim import SizeGuards, UnknownSizeError
from tessera.core.types import TensorType
from tessera.frontend.jit.dynamic_shapes import trace_symbols
from tessera.frontend.jit.tracing import Jit, TracedFunction
from tessera.ir.array_interchange import POINTER_ALIGN
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import permute
from tessera.torch.conversion import convert, find_location, name_op
from tessera.torch.decompositions import find_decompositions
from tessera.torch.input_layouts import InputLayout, find_axis_order, find_layout, holds_enclosing, invert_order
from tessera.torch.input_writes import InputWrites, extract_writes
from tessera.torch.interop import (
    ProgramOptions,
    RunOnTensors,
    SliceInUseError,
    TensorProgram,
    choose_target,
    compile_in_place,
    describe_tensor,
    reads_in_place,
)
from tessera.torch.interpolation import rewrite_interpolations
from tessera.torch.partition import (
    Support,
    anchor_strided_views,
    describe_fake,
    get_fake,
    hint,
    leave_result_views,
    list_fakes,
    partition,
    to_size,
)
from tessera.torch.recurrent_layers import capture_recurrent_layers, rewrite_layers
from tessera.torch.tensors import find_dtype

MAX_PROGRAMS = 32  # programs that a piece keeps, one for each combination of sizes
LEVELS = ("graph", "schedule", "tile")
log = logging.getLogger("tessera.torch")

# Options.


@dataclass(frozen=True)
class BackendOptions:
    """The options of torch.compile(..., backend="tessera", options={...}).

    Attributes:
        fallback: False: an op that is not taken is an error, which names all of them.
        target: "llvm" or "ptx"; by default that of the tensors' device.
        level: "graph", "schedule" or "tile": run in the interpreter of that level.
        debug: run in the Graph interpreter, which reports the first NaN or infinity with its line.
        fallback_random: leave random ops to PyTorch, so that they draw the numbers of eager PyTorch.
    """

    fallback: bool = True
    target: str | None = None
    level: str | None = None
    debug: bool = False
    fallback_random: bool = False

    @staticmethod
    def of(options: Mapping[str, Any]) -> BackendOptions:
        """The options of a call.

        Raises:
            ArgumentError: there is no such option, level or target, or a value has another type.
        """
        known = {f.name for f in fields(BackendOptions)}
        if unknown := sorted(options.keys() - known):
            raise ArgumentError(
                f"the backend has no option {unknown[0]}", expected=", ".join(sorted(known)), received=unknown[0]
            )
        found = BackendOptions(**options)
        for name in ("fallback", "debug", "fallback_random"):
            if not isinstance(getattr(found, name), bool):
                raise ArgumentError(
                    f"the option {name} is no bool", expected="True or False", received=repr(getattr(found, name))
                )
        if found.target is not None:
            get_capable_backend(str(found.target), "runtime")
        if found.level is not None and found.level not in LEVELS:
            raise ArgumentError(
                f'"{found.level}" is no level that runs on tensors', expected=", ".join(LEVELS), received=found.level
            )
        return found


# The report: what was compiled, and what PyTorch runs.


@dataclass(frozen=True)
class Fallback:
    """An op that PyTorch runs: its name, the reason, and the user's line."""

    op: str
    reason: str
    location: Location


@dataclass
class CompileReport:
    """What the backend has compiled since the start, or since `reset_report()`."""

    graphs: int = 0
    pieces: int = 0
    ops: int = 0
    programs: int = 0
    seconds: float = 0.0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)

    def __str__(self) -> str:
        left = sum(self.fallbacks.values())
        head = (
            f"{self.graphs} graphs: {self.ops} ops in {self.pieces} pieces, {self.programs} programs compiled in "
            f"{self.seconds:.2f} s; {left} ops left to PyTorch"
        )
        return "\n".join(
            [head, *(f"{n:5} {f.op} at {f.location}: {f.reason}" for f, n in self.fallbacks.most_common())]
        )


_REPORT = CompileReport()
_LOCK = threading.Lock()


def report() -> CompileReport:
    """What the backend has compiled, and which ops PyTorch runs: each with the reason, the line and a count.

    >>> reset_report()
    >>> print(report())
    0 graphs: 0 ops in 0 pieces, 0 programs compiled in 0.00 s; 0 ops left to PyTorch
    """
    with _LOCK:
        return replace(_REPORT, fallbacks=Counter(_REPORT.fallbacks))


def reset_report() -> None:
    """Start the report anew."""
    global _REPORT
    with _LOCK:
        _REPORT = CompileReport()


def _count(**numbers: float) -> None:
    with _LOCK:
        for name, number in numbers.items():
            setattr(_REPORT, name, getattr(_REPORT, name) + number)


def _count_fallbacks(found: Sequence[tuple[Node, str]]) -> None:
    listed = [Fallback(name_op(n.target), reason, find_location(n)) for n, reason in found]
    for each in dict.fromkeys(listed):
        log.warning("%s runs in PyTorch: %s (%s)", each.op, each.reason, each.location)
    with _LOCK:
        _REPORT.fallbacks.update(listed)


# The backend.


def backend(module: GraphModule, inputs: Sequence[Any], **named: Any) -> Callable[..., Any]:
    """The backend: compiles a graph that TorchDynamo has captured, with its backward graph.

    Raises:
        ArgumentError: an option is unknown.
        UnsupportedOpError: with `fallback=False`, ops are not taken.
    """
    options = BackendOptions.of(named.get("options") or {})
    rewrite_layers(module)
    rewrite_interpolations(module)
    compiler = aot_autograd(
        fw_compiler=partial(compile_graph_module, options=options),
        inference_compiler=partial(compile_graph_module, options=options, inference=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=find_decompositions(),
        keep_inference_input_mutations=True,
    )
    return compiler(module, inputs)


capture_recurrent_layers(backend)


def compile_graph_module(
    module: GraphModule, inputs: Sequence[Any], options: BackendOptions, inference: bool = False
) -> Callable[..., Any]:
    """Compile a graph of ATen ops: the pieces that are taken as programs, called by what PyTorch runs.

    The function that it returns takes a list of the inputs, which it clears. In inference all results are the caller's.

    Raises:
        UnsupportedOpError: with `fallback=False`, ops are not taken; it names all of them with their lines.
    """
    support = Support(_choose_device(module), _refuse_random if options.fallback_random else _refuse_nothing)
    writes = extract_writes(module)
    total = sum(n.op == "call_function" for n in module.graph.nodes)
    anchor_strided_views(module)
    _guard_strides(module, support)
    leave_result_views(module, support, inference, writes.private if writes else ())
    outer, names = partition(module, support)
    left = list(support.reasons.items())
    if not options.fallback:
        _refuse_fallbacks(left)
    overwritten = _find_overwritten(outer, writes) if writes and len(names) == 1 else {}
    with unset_fake_temporarily():
        pieces = [Piece(cast(GraphModule, outer.get_submodule(name)), options, overwritten) for name in names]
    for name, piece in zip(names, pieces, strict=True):
        setattr(outer, name, piece)
        left += piece.left
    _count_fallbacks(left)
    _count(graphs=1, pieces=len(names), ops=total - len(left))
    outer.recompile()
    run = _find_only_piece(outer) or outer
    return make_boxed_func(writes.apply(run) if writes else run)


def _find_overwritten(outer: GraphModule, writes: InputWrites) -> dict[int, int]:
    """The results of the only piece, by place, that may take the memory of one of its inputs.

    Nothing else of the graph may read the input, or have views of the result: PyTorch makes them after the piece.
    """
    inputs = [n for n in outer.graph.nodes if n.op == "placeholder"]
    piece = next(n for n in outer.graph.nodes if n.op == "call_module")
    results = next(n for n in outer.graph.nodes if n.op == "output").args[0]
    found = {}
    for place, result in writes.written:
        given, item = inputs[place], results[result]
        is_item = item.target is operator.getitem and item.args[0] is piece and len(item.users) == 1
        if result in writes.private and is_item and set(given.users) <= {piece} and given in piece.args:
            found[int(item.args[1])] = piece.args.index(given)
    return found


def _guard_strides(module: GraphModule, support: Support) -> None:
    """Leave a whole graph to PyTorch where PyTorch would read a result by strides: only its own lies as it expects."""
    nodes = [n for n in module.graph.nodes if n.op == "call_function"]
    for node in nodes:
        by_strides = "as_strided" in name_op(node.target) and node.args[0].op != "placeholder"
        if by_strides and not support.is_node_supported({}, node):
            for each in nodes:
                if support.is_node_supported({}, each):
                    support.refuse(each, f"{name_op(node.target)} of the same graph reads memory by strides")


def _choose_device(module: GraphModule) -> str:
    """The device whose tensors a graph's pieces take: a GPU, if the graph has tensors there."""
    devices = {t.device.type for n in module.graph.nodes for t in list_fakes(n)}
    return "cuda" if "cuda" in devices else "cpu"


def _refuse_nothing(node: Node) -> str | None:
    return None


def _refuse_random(node: Node) -> str | None:
    random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return "it draws random numbers, which the option fallback_random leaves to PyTorch" if random else None


def _refuse_fallbacks(found: Sequence[tuple[Node, str]]) -> None:
    if found:
        lines = dict.fromkeys(f"{find_location(n)}: {name_op(n.target)}: {reason}" for n, reason in found)
        raise UnsupportedOpError(
            f"{len(found)} ops would run in PyTorch", location=find_location(found[0][0]),
            received="\n    " + "\n    ".join(lines), suggestion="allow it with options={'fallback': True}",
        )  # fmt: skip


def _find_only_piece(outer: GraphModule) -> Callable[..., Any] | None:
    """The only piece of a graph that does nothing but choose its arguments and its results; None for other graphs."""
    params = [n for n in outer.graph.nodes if n.op == "placeholder"]
    calls = [n for n in outer.graph.nodes if n.op == "call_module"]
    if len(calls) != 1 or any(a not in params for a in calls[0].args):
        return None
    items = [n for n in outer.graph.nodes if n.op == "call_function"]
    results = next(n for n in outer.graph.nodes if n.op == "output").args[0]
    if any(n.target is not operator.getitem or n.args[0] is not calls[0] for n in items):
        return None
    if any(r not in items for r in results):
        return None
    run = cast(Piece, outer.get_submodule(calls[0].target)).run
    given, taken = [params.index(a) for a in calls[0].args], [r.args[1] for r in results]
    if given == list(range(len(params))) and taken == list(range(len(items))):
        return run

    def choose(*inputs: Any) -> list[Any]:
        found = run(*[inputs[i] for i in given])
        return [found[k] for k in taken]

    return choose


# A piece: a graph that is compiled, once for each combination of sizes.


class Piece(torch.nn.Module):
    """A part of a graph as compiled programs; PyTorch runs it if it cannot be compiled, and `left` says why."""

    def __init__(
        self, module: GraphModule, options: BackendOptions, overwritten: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self.options = options
        self.graph_module = module
        self.overwritten = overwritten  # results that may take the memory of an input
        self.left: list[tuple[Node, str]] = []
        self.fakes = [get_fake(n) for n in module.graph.nodes if n.op == "placeholder"]
        tensors = [f for f in self.fakes if isinstance(f, torch.Tensor)]
        output = next(n for n in module.graph.nodes if n.op == "output")
        self.outputs = [get_fake(n) if isinstance(n, Node) else n for n in output.args[0]]
        interprets = options.debug or options.level is not None
        target = options.target or ("interp" if interprets else choose_target(tensors))
        self.program_options = ProgramOptions(target, options.level, options.debug)
        self._programs: OrderedDict[Any, RunOnTensors] = OrderedDict()
        # A program of symbolic sizes: the shapes that it takes, and what it takes to hold of their sizes.
        self._symbolic: tuple[list[Any], SizeGuards, RunOnTensors] | None = None
        self._lock = threading.Lock()
        # What each input must be: a size that is known, and an element type; None where it is a number.
        self._expected = [
            (f.shape if _is_static(f) else None, f.dtype) if isinstance(f, torch.Tensor) else (None, None)
            for f in self.fakes
        ]
        self._static = len(tensors) == len(self.fakes) and all(_is_static(t) for t in tensors)
        in_place = self._static and reads_in_place(self.program_options) and not _multiplies(module)
        found = [find_layout(f) for f in tensors]
        self.layouts = found if in_place else [layout.drop_gaps() for layout in found]
        self.run: Callable[..., Any] = self._run_for_sizes
        self._compile_first()

    def forward(self, *values: Any) -> Any:
        """The results for tensors and numbers, some of which are results of ops that PyTorch runs.

        Raises:
            ShapeError: an op gave another size than it said when the graph was captured.
            DTypeError: it gave another element type.
        """
        for place, (given, (shape, dtype)) in enumerate(zip(values, self._expected, strict=True)):
            if dtype is not None and (given.dtype != dtype or shape not in (None, given.shape)):
                raise self._describe_surprise(place, given)
        return self.run(*values)

    def _describe_surprise(self, place: int, given: torch.Tensor) -> TesseraError:
        node = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"][place]
        fake = get_fake(node)
        kind = ShapeError if given.dtype == fake.dtype else DTypeError
        return kind(
            f"{node.name}, which PyTorch computed, is not what its op said of it", location=find_location(node),
            expected=f"{fake.dtype}{list(fake.shape)}", received=f"{given.dtype}{list(given.shape)}",
            suggestion="mend the op's fake implementation (torch.library.register_fake)",
        )  # fmt: skip

    def _compile_first(self) -> None:
        """Compile for the sizes of the trace, which tells whether the piece can be compiled."""
        values = [_hint_of(f) for f in self.fakes]
        try:
            program = self._compile_static_or_symbolic(values)
        except Exception as error:
            if not self.options.fallback:
                raise
            reason = error.message if isinstance(error, TesseraError) else f"{type(error).__name__}: {error}"
            nodes = [n for n in self.graph_module.graph.nodes if n.op == "call_function"]
            self.left = [(n, f"its program cannot be compiled: {reason}") for n in nodes]
            self.run = self.graph_module
            return
        if self._static:
            self.run = lambda *values: program(values)
        else:
            self._programs[self._make_key(values)] = program

    def _compile_static_or_symbolic(self, values: Sequence[Any]) -> RunOnTensors:
        if not self._static:
            try:
                return self._compile_symbolic()
            except Exception as error:  # a row, or the compiler, needs to know a size
                log.info("a program for each combination of sizes: %s", error)
        return self._compile(values)

    def _run_for_sizes(self, *values: Any) -> Any:
        key = self._make_key(values)
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._find_symbolic(values) or self._compile(
                    list(map(_describe, values))
                )
                if len(self._programs) > MAX_PROGRAMS:
                    self._programs.popitem(last=False)
            else:
                self._programs.move_to_end(key)
        return program([v for v in values if isinstance(v, torch.Tensor)])

    @staticmethod
    def _make_key(values: Sequence[Any]) -> Any:
        return tuple(tuple(v.shape) if hasattr(v, "shape") else v for v in values)

    def _find_symbolic(self, values: Sequence[Any]) -> RunOnTensors | None:
        """The program of symbolic sizes, if there is one and it holds for these sizes."""
        if self._symbolic is None:
            return None
        patterns, guards, program = self._symbolic
        sizes: dict[str, Any] = {}
        found = [tuple(v.shape) if isinstance(v, torch.Tensor) else (v,) for v in values]
        fits = bind_shapes(list(zip(patterns, found, strict=True)), sizes) is None
        return program if fits and 0 not in sizes.values() and holds_for(guards, sizes) else None

    def _compile_symbolic(self) -> RunOnTensors:
        """Compile one program for all sizes, and keep what it takes to hold of them.

        Raises:
            TesseraError: a row or the compiler needs to know a size.
        """
        symbolic = [_symbolise(f) for f in self.fakes]
        patterns = [v.shape if isinstance(v, TensorType) else (v,) for v in symbolic]
        known = [tuple(map(hint, f.shape)) if isinstance(f, torch.Tensor) else (hint(f),) for f in self.fakes]
        _check_bound(self.fakes, patterns, known)
        with trace_symbols(patterns, tuple(known)) as noted:
            program = self._compile(symbolic)
        self._symbolic = (patterns, frozenset(noted), program)
        return program

    def _compile(self, values: Sequence[Any]) -> RunOnTensors:
        """The program for types and numbers. Tensors with gaps that it cannot read where they lie have another one."""
        gaps = {i: layout for i, layout in enumerate(self.layouts) if layout.enclosing is not None}
        program = self._compile_for_layouts(values, self.layouts)
        run, loose = program.run, program.loose
        if not gaps:
            return run
        make_dense = cache(lambda: self._compile_for_layouts(values, [g.drop_gaps() for g in self.layouts]).run)

        def choose(tensors: Sequence[torch.Tensor]) -> list[Any]:
            held = all(holds_enclosing(tensors[i], layout, POINTER_ALIGN, i in loose) for i, layout in gaps.items())
            return run(tensors) if held else make_dense()(tensors)

        return choose

    def _compile_for_layouts(self, values: Sequence[Any], layouts: Sequence[InputLayout]) -> TensorProgram:
        """The program, which computes slices where they lie, or in other memory if it reads other elements of them."""
        try:
            return self._compile_for_parts(values, layouts, apart=False)
        except SliceInUseError:
            return self._compile_for_parts(values, layouts, apart=True)

    def _compile_for_parts(self, values: Sequence[Any], layouts: Sequence[InputLayout], apart: bool) -> TensorProgram:
        parts = {r: t for r, t in self._list_targets().items() if layouts[t].may_be_written}
        start = time.perf_counter()
        traced, places = self._trace(values, layouts, parts, apart)
        in_place = frozenset(i for i, layout in enumerate(layouts) if layout.enclosing is not None)
        whole = {
            r: t
            for r, t in self._list_targets().items()
            if InputLayout((), find_axis_order(self.outputs[r])) == self.layouts[t]
        }  # both lie in the same order of axes
        overwritten = {places.index(r): t for r, t in {**whole, **parts}.items() if r in places}
        numbers = [places.index(r) for r in parts if r in places]
        program = compile_in_place(traced, self.program_options, overwritten, in_place, numbers)
        _count(programs=1, seconds=time.perf_counter() - start)
        views = [None if i in in_place else layout.make_view() for i, layout in enumerate(layouts)]
        orders = [None if i in parts else find_axis_order(self.outputs[i]) for i in places]
        return replace(program, run=_arrange(program.run, views, orders, places, len(self.outputs)))

    def _list_targets(self) -> dict[int, int]:
        """The results that may take the memory of a tensor, by number."""
        tensors = [i for i, f in enumerate(self.fakes) if isinstance(f, torch.Tensor)]
        return {r: tensors.index(i) for r, i in self.overwritten.items() if i in tensors}

    def _trace(
        self, values: Sequence[Any], layouts: Sequence[InputLayout], parts: Mapping[int, int], apart: bool
    ) -> tuple[TracedFunction, list[int]]:
        """The Graph function for types and numbers, and which of the piece's results it gives: the others are None.

        Tensors that lie in memory in another order of axes are taken and given in that order. Results that are `parts`
        of what is taken for a tensor are given as an update of that.
        """
        convert_piece = convert(self.graph_module, checked=False)
        places: list[int] = []

        def piece(*tensors: Tensor) -> list[Tensor]:
            given = iter([layout.restore(t, type) for layout, t, type in zip(layouts, tensors, types, strict=True)])
            outs = convert_piece(*(next(given) if isinstance(v, TensorType) else v for v in values))
            places[:] = [i for i, out in enumerate(outs) if out is not None]
            for i in places:
                _check_result(outs[i], self.outputs[i])
            found = {i: layouts[t].update(tensors[t], outs[i], apart) for i, t in parts.items() if i in places}
            orders = {i: order for i in places if (order := find_axis_order(self.outputs[i])) is not None}
            found = {i: permute(outs[i], axes=order) for i, order in orders.items()} | found
            return [found.get(i, outs[i]) for i in places]

        types = [v for v in values if isinstance(v, TensorType)]
        taken = [layout.find_type(type) for layout, type in zip(layouts, types, strict=True)]
        return Jit(piece).trace(*taken), places


def _check_bound(fakes: Sequence[Any], patterns: Sequence[Any], known: Sequence[Any]) -> None:
    """Refuse numbers that the tensors' shapes do not tell: a program gets tensors alone.

    Raises:
        UnknownSizeError: it names one of them.
    """
    sizes: dict[str, Any] = {}
    tensors = [i for i, f in enumerate(fakes) if isinstance(f, torch.Tensor)]
    bind_shapes([(patterns[i], known[i]) for i in tensors], sizes)
    names = {str(s) for f in fakes for s in _list_symbols(f)}
    if free := sorted(names - sizes.keys()):
        raise UnknownSizeError(f"{free[0]} is a number, and no size of a tensor")


def _list_symbols(fake: Any) -> Iterator[Any]:
    """The symbols of a fake tensor's sizes, or of a symbolic number."""
    for n in fake.shape if isinstance(fake, torch.Tensor) else (fake,):
        if isinstance(n, torch.SymInt):
            yield from n.node.expr.free_symbols


def _check_result(found: Tensor, fake: torch.Tensor) -> None:
    """Refuse a result of another element type or rank than PyTorch's; sizes may be symbolic."""
    if (found.dtype, found.ndim) != (find_dtype(fake.dtype), fake.ndim):
        raise UnsupportedOpError(
            "a result has another type than PyTorch's",
            expected=f"{fake.dtype}, rank {fake.ndim}",
            received=str(found.type),
        )


def _is_static(fake: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in fake.shape)


def _hint_of(fake: Any) -> Any:
    """A fake tensor as its type, and a symbolic number as the number of the trace."""
    return describe_fake(fake) if isinstance(fake, torch.Tensor) else hint(fake)


def _symbolise(fake: Any) -> Any:
    """A fake tensor as its type, with a name for each symbol of its sizes; a symbolic number as a size."""
    if isinstance(fake, torch.Tensor):
        return TensorType(tuple(map(to_size, fake.shape)), find_dtype(fake.dtype))
    return to_size(fake) if isinstance(fake, torch.SymInt) else hint(fake)


def _describe(value: Any) -> Any:
    return describe_tensor(value) if isinstance(value, torch.Tensor) else value


def _multiplies(module: GraphModule) -> bool:
    """Whether a graph has products (ops whose flops PyTorch counts): tensor maps load operands without gaps best."""
    return any(getattr(n.target, "overloadpacket", None) in flop_registry for n in module.graph.nodes)


def _arrange(
    run: RunOnTensors,
    views: Sequence[Callable[[torch.Tensor], torch.Tensor] | None],
    result_orders: Sequence[tuple[int, ...] | None],
    places: Sequence[int],
    count: int,
) -> RunOnTensors:
    """A program with its tensors in the axis orders of its callers, and None for results that it does not give."""
    if not any(views) and not any(result_orders) and len(places) == count:
        return run
    inverses = [None if order is None else invert_order(order) for order in result_orders]

    def arranged(tensors: Sequence[torch.Tensor]) -> list[Any]:
        given = [t if view is None else view(t) for t, view in zip(tensors, views, strict=True)]
        results: list[Any] = [None] * count
        for place, out, inverse in zip(places, run(given), inverses, strict=True):
            results[place] = out if inverse is None else out.permute(inverse)
        return results

    return arranged
