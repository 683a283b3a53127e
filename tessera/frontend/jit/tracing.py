"""Tracing (@jit): turns a Python function over tensors into a Graph function, cached by types and captured values."""

from __future__ import annotations

import functools
import inspect
import sys
import time
import typing
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.errors import (
    ArgumentError,
    DTypeError,
    Location,
    ShapeError,
    TesseraError,
    hide_internal_frames,
    hides_frames_of,
    user_location,
)
from tessera.core.hooks import compile_graph, compile_tuned_graph, record_on_tape, takes_symbolic_sizes
from tessera.core.pytree import TreeDef, call_and_collect, call_and_warn, flatten, in_scope, leaf_paths, store_updates
from tessera.core.shapes import (
    bind_shapes,
    find_size_constraints,
    find_stated_values,
    note_stated_constraints,
    use_known_sizes,
    use_size_constraints,
)
from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType, as_dtype, int64
from tessera.frontend.jit.call_keys import make_closure_key, make_static_key, walk_call
from tessera.frontend.jit.donation import Donation
from tessera.frontend.jit.dynamic_shapes import (
    CallHistory,
    Shapes,
    SizeRules,
    SizeVariant,
    SymbolicProgram,
    check_tuning,
    find_compile_log,
    has_symbols,
    make_patterns,
    name_axes,
    trace_symbols,
)
from tessera.frontend.jit.line_marks import (
    LINE_MARKS_ENABLED,
    REQUESTED_BREAKPOINTS,
    check_breakpoint_support,
    mark_lines,
    strip_marks,
)
from tessera.frontend.jit.repeated_calls import OTHER, KnownCall, RepeatedCall, make_repeated_call, wrap_result
from tessera.ir.array_interchange import is_on_device, shorten_repr
from tessera.ir.builder import (
    CURRENT_BUILDER,
    CURRENT_NUMERICS,
    CURRENT_RANK_NUMBER,
    Builder,
    override_numerics,
    separate_regions,
)
from tessera.ir.core import Attrs, Function, Node, Value
from tessera.ir.tensor import Tensor, WeakTensor, as_tensor, get_elements
from tessera.lower.lowering_plan import make_extension_key, make_program_attributes
from tessera.ops.dialects.control_flow import called
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.basic import full
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.random import RANDOM_STATE_NAMES, TRACED_RANDOM_STATE, RandomState, RandomUse

if TYPE_CHECKING:
    from tessera.frontend.kernel.autotuning import Tuned

TRACE_DEVICE: ContextVar[str | None] = ContextVar("trace device", default=None)  # for which a program is being traced

# Traced functions: what a Python function says of itself, and what a trace of it gives.


def read_annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Read a function's annotations, evaluated where possible."""
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, TypeError, AttributeError):  # an annotation for another tool, not about tensors
        return dict(getattr(function, "__annotations__", {}))


def locate_definition(function: Callable[..., Any]) -> Location:
    """Locate the definition of a function."""
    code = getattr(function, "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else Location()


@dataclass(frozen=True)
class TracedFunction:
    """A Graph function, the arrays it closed over (its last parameters), and the shape of what it returns.

    A function that draws from the default generator has two more parameters at the end, the generator's state.
    """

    function: Function
    captures: tuple[np.ndarray, ...]
    results: TreeDef
    # Captured tensors that require gradients, by their index among the captures.
    owners: tuple[tuple[int, Tensor], ...] = ()
    # Its breakpoints (`ts.debug.break_here`).
    breakpoints: tuple[Location, ...] = ()
    # Its draws from the default generator, if it makes any.
    random: RandomUse | None = None
    # The buffers of modules among its arguments, by path, whose new values are its last results.
    updates: tuple[str, ...] = ()
    # What it requires of its symbolic sizes.
    rules: SizeRules = field(default_factory=SizeRules)
    # How its schedule was found, if it was tuned.
    tuned: Tuned | None = None

    def hidden_arguments(self) -> tuple[np.ndarray, ...]:
        """The arrays after the arguments of one call; the numbers that this call draws count as drawn."""
        return self.captures if self.random is None else (*self.captures, *self.random.reserve())

    def example_arguments(self) -> tuple[np.ndarray, ...]:
        """The arrays after the arguments of a call that leaves the default generator as it is."""
        return self.captures if self.random is None else (*self.captures, *self.random.peek())


def _call_without_updates(function: Callable[..., Any], *given: Any) -> tuple[Any, dict[str, Any]]:
    return call_and_warn(function, *given), {}


def _name_argument(path: str, names: Sequence[str]) -> str:
    """A path that begins with the number of an argument, with its name instead."""
    number, dot, rest = path.partition(".")
    return f"{names[int(number)]}{dot}{rest}"


@dataclass(frozen=True)
class BoundCall:
    """A call's flattened arguments: traced leaves with their types, everything else by value."""

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    leaves: tuple[Any, ...]
    static: tuple[tuple[str, Any], ...]
    tree: TreeDef

    @property
    def numbers(self) -> frozenset[str]:
        """The leaves that are Python numbers."""
        return frozenset(n for n, x in zip(self.names, self.leaves, strict=True) if x.__class__ in (int, float))

    def key(self) -> Hashable:
        """The cache key of a trace."""
        return self.names, self.types, self.numbers, self.tree, *((k, make_static_key(v)) for k, v in self.static)


def resolve_static_names(names: Sequence[str], by_name: Any, by_place: Any) -> set[str]:
    """Resolve the static parameters, by name or number; one or several.

    >>> sorted(resolve_static_names(["x", "axis"], (), (1,)))
    ['axis']

    Raises:
        ArgumentError: there is no such parameter.
    """
    by_name = (by_name,) if isinstance(by_name, str) else by_name
    by_place = (by_place,) if isinstance(by_place, int) else by_place
    wrong = [n for n in by_name if n not in names] + [i for i in by_place if not -len(names) <= i < len(names)]
    if wrong:
        raise ArgumentError(
            f"there is no static parameter {wrong[0]}",
            location=user_location(),
            expected=", ".join(names) or "none",
        )
    return {*by_name, *(names[i] for i in by_place)}


class Jit:
    """A traced function: call it with arrays, or ask for its IR with `trace`.

    >>> @jit
    ... def double(x: Tensor["N"]):
    ...     return x * 2.0
    >>> double(np.float32([1, 2]))
    Tensor([2., 4.], f32)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
        target: str | None = None,
        device: str | None = None,
        dynamic: bool | None = None,
        donate: Sequence[str] | str = (),
        tune: bool = False,
    ) -> None:
        check_function(function, "jit")
        check_tuning(tune, dynamic)
        functools.update_wrapper(self, function)
        self.function = function
        # A partial function has the name of its function, another object that can be called that of its type.
        named = getattr(function, "func", function)
        self.name = getattr(named, "__name__", type(named).__name__)
        self.target = target or device
        self.dynamic = dynamic
        self.tune = tune
        self.signature = inspect.signature(function)
        names = list(self.signature.parameters)
        self.static = frozenset(resolve_static_names(names, static_argnames, static_argnums))
        self.donation = Donation(self.function, names, (donate,) if isinstance(donate, str) else donate, self.static)
        self._static_places = frozenset(i for i, name in enumerate(names) if name in self.static)
        kinds = {p.kind for p in self.signature.parameters.values()}
        self._is_variadic = bool(kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD})
        self.annotations = read_annotations(function)
        self.location = locate_definition(function)
        self._check_annotations()
        # The compiler passes and the fusion that this function asks for, besides those of the context of a call.
        self.passes: tuple[str, ...] = ()
        self.fusion: dict[str, Any] | None = None
        self._cache: dict[Hashable, Any] = {}
        self._histories: dict[Hashable, CallHistory] = {}
        # Fast path: calls by the types of their arguments, without the signature.
        self._known: dict[Hashable, KnownCall] = {}
        self._last: tuple[Any, KnownCall | None] = (None, None)
        self._repeated: RepeatedCall | None = None

    def _check_annotations(self) -> None:
        for name, value in self.annotations.items():
            if isinstance(value, bool):  # sizes compared while Python evaluated the annotation
                raise ArgumentError(
                    f"the annotation of {name} is {value}: a comparison of sizes is not a type",
                    location=self.location, expected="a type, as in Tensor[\"B\", \"D\"]", received=str(value),
                    suggestion='put the constraint above the function: @ts.require("D % 8 == 0")',
                )  # fmt: skip

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A method in a class: its object is the first argument."""
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:  # as `hides_internal_frames` does, without a call of its own
            if self._repeated is not None and not named and (found := self._repeated(args)) is not OTHER:
                return found
            if CURRENT_BUILDER.get() is not None or LINE_MARKS_ENABLED.get():
                return self._call_any(args, named)
            kinds, leaves = walk_call(args, named, self._static_places, self.static)
            key = None if kinds is None else (kinds, *self._ambient_key())
            if key is not None and (known := self._find_known(key)) is not None:
                return self._run_known(known, leaves, args, named)
            leaves.clear()  # nothing here holds what is donated
            return self._call_any(args, named, key)
        except Exception as error:
            if hides_frames_of(error):
                hide_internal_frames(error)
            if sys.version_info < (3, 11):  # there a bare `raise` restores the whole traceback
                raise error
            raise

    def _call_any(self, args: tuple[Any, ...], named: dict[str, Any], key: Hashable = None) -> Any:
        """A call that is not known: bound, compiled where its types are new, and then known by its key."""
        if CURRENT_BUILDER.get() is not None:  # inside another trace: inline
            return self.function(*args, **named)
        if LINE_MARKS_ENABLED.get() and find_generator_name(self.target or default_device()) == INTERP:
            return self.stepped(*args, **named)
        call = self.bind(args, named)
        traced, run = self._compiled(call, compile_graph)
        if traced.breakpoints:  # no debugger session yet
            check_breakpoint_support(traced.breakpoints[0], self.target or default_device())
            return self.stepped(*args, **named)
        if key is not None and not traced.owners and (order := self._find_order(call, args, named)) is not None:
            self._known[key] = KnownCall(traced, run, order, self.donation.find_places(call.names))
        return self._run(call, traced, run, args, named)

    def stepped(self, *args: Any, **named: Any) -> Any:
        """Call the function in the Graph interpreter, traced with a mark before each line, for the debugger."""
        call = self.bind(args, named)
        key = ("lines", call.key(), *self._ambient_key())
        if key not in self._cache:
            self._cache[key] = self._trace(call, lines=True, keep_updates=True)
        traced = self._cache[key]
        return self._run(call, traced, compile_graph(traced.function, INTERP), args, named)

    def _find_known(self, key: tuple[Any, ...]) -> KnownCall | None:
        """The call with a key; what comes twice with the same objects as types becomes the repeated call."""
        last, known = self._last
        if key != last:  # the same types as in the last call are the same objects: no hash is needed
            known = self._known.get(key)
        if known is None:
            return None
        if known.comes_again(key[0]) and not self._static_places:
            self._repeated = make_repeated_call(known, key[0], self.function, self.target, self._repeated)
        self._last = key, known
        return known

    def _run_known(self, known: KnownCall, leaves: list[Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a call whose arguments are known to match."""
        traced = known.traced
        arrays = leaves
        if known.order:
            arrays = [leaves[i] for i in known.order]
            leaves.clear()  # nothing here holds what is donated
        if traced.captures or traced.random is not None:
            arrays += traced.hidden_arguments()
        if known.donated:
            self.donation.give(arrays, known.donated, args, named)
        results = known.wrap(known.run(arrays))
        if traced.results.kind is None and not traced.updates:
            return results[0]
        if traced.updates:
            self._store_updates(traced, results, args, named)
        return traced.results.build(iter(results))

    def _store_updates(self, traced: TracedFunction, results: list[Tensor], args: Any, named: Any) -> None:
        """Put new buffers, the last results, into the modules that were passed."""
        new = results[len(results) - len(traced.updates) :]
        given = self.signature.bind(*args, **named).arguments
        store_updates(given, dict(zip(traced.updates, new, strict=True)))

    def _find_order(self, call: BoundCall, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, ...] | None:
        """For each parameter its place among the leaves of a call as they were written; () for the same order.

        None where there is none: a parameter has a default that is traced, or its name is not known.
        """
        if not named:
            pairs = list(self.signature.bind(*args).arguments.items())
        elif self._is_variadic:
            return None
        else:
            pairs = [*zip(self.signature.parameters, args, strict=False), *named.items()]
        written = [path for name, x in pairs for path, _ in flatten(x, name)[0]]
        known = set(call.names)
        places = {path: i for i, path in enumerate([p for p in written if p in known])}
        if places.keys() != known:
            return None
        order = tuple(places[n] for n in call.names)
        return () if order == tuple(range(len(order))) else order

    def _run(self, call: BoundCall, traced: TracedFunction, run: Callable[..., Any], args: Any, named: Any) -> Any:
        hidden = traced.hidden_arguments()
        operands = [*(to_operand(leaf) for leaf in call.leaves), *hidden]
        if places := self.donation.find_places(call.names):
            self.donation.give(operands, places, args, named)
        arrays = run(operands)
        results = [wrap_result(a, v.type) for a, v in zip(arrays, traced.function.results, strict=True)]
        if traced.owners or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in call.leaves):
            _record_call_on_tape(traced, call.leaves, hidden, results)
        if traced.updates:
            self._store_updates(traced, results, args, named)
        return traced.results.build(iter(results))

    def _ambient_key(self) -> tuple[Hashable, ...]:
        """Make the key of a trace's context: target, numeric context, captured values, rank, compiler passes."""
        numerics = CURRENT_NUMERICS.get()
        closed = make_closure_key(self.function) if getattr(self.function, "__closure__", None) else ()
        rank = CURRENT_RANK_NUMBER.get()
        numbers = numerics.key() if numerics is not None else None
        return self.target or default_device(), numbers, closed, rank, make_extension_key()

    def _compiled(self, call: BoundCall, executable: Callable[..., Any]) -> Any:
        key = (call.key(), *self._ambient_key())
        if key not in self._cache:
            self._cache[key] = self._find_symbolic(call, executable) or self._compile(call, executable)
        return self._cache[key]

    def _compile(self, call: BoundCall, executable: Callable[..., Any]) -> tuple[TracedFunction, Any]:
        start = time.perf_counter()
        traced = self._trace(call, keep_updates=True)
        with override_numerics(None):  # the types already hold the numeric context
            first = len(traced.function.params) - len(traced.captures) - (0 if traced.random is None else 2)
            constants = range(first, first + len(traced.captures))
            donated = self.donation.find_places(call.names)
            device = self.target or default_device()
            if self.tune:
                arrays = [*(to_operand(leaf) for leaf in call.leaves), *traced.example_arguments()]
                run, tuned = compile_tuned_graph(traced.function, device, arrays, constants, donated)
                compiled = replace(traced, tuned=tuned), run
            else:
                compiled = traced, executable(traced.function, device, constants, donated)
        find_compile_log().info(
            "compiled %s(%s) for %s in %.0f ms", self.name, ", ".join(map(str, call.types)),
            device, 1e3 * (time.perf_counter() - start),
        )  # fmt: skip
        return compiled

    def _find_symbolic(self, call: BoundCall, executable: Callable[..., Any]) -> tuple[TracedFunction, Any] | None:
        """A program of symbolic sizes for this call; None where it gets a program for its own sizes."""
        device = self.target or default_device()
        if self.dynamic is False or self.tune or not call.types or not takes_symbolic_sizes(device, bool(self.dynamic)):
            return None
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in call.leaves):
            return None  # the tape differentiates what was called, of known sizes
        kinds = tuple((len(t.shape), t.dtype, t.policy) for t in call.types)
        family = (call.names, kinds, replace(call, types=()).key(), *self._ambient_key())
        history = self._histories.setdefault(family, CallHistory())
        shapes = tuple(t.shape for t in call.types)
        found = history.find(shapes)
        if found is None and (self.dynamic or history.wants_symbols(shapes)):
            found = self._compile_symbolic(call, shapes, history, executable)
        if found is None:
            history.shapes.append(shapes)
            return None
        return found.traced, found.run

    def _compile_symbolic(
        self, call: BoundCall, shapes: Shapes, history: CallHistory, executable: Callable[..., Any]
    ) -> SymbolicProgram | None:
        """Compile a program for the sizes of all calls so far; None where the function needs to know a size."""
        annotated = [self._type_of(n) for n in call.names]
        patterns = make_patterns([*history.shapes, shapes], annotated, bool(self.dynamic))
        if not has_symbols(patterns):
            return None
        types = tuple(t.with_shape(tuple(p)) for t, p in zip(call.types, patterns, strict=True))
        try:
            with trace_symbols(patterns, shapes) as noted, use_size_constraints(find_size_constraints(self)):
                with note_stated_constraints() as stated:
                    exact = tuple(t.evaluate({}) for t in types)  # quotients that the constraints make whole
                    traced, run = self._compile(replace(call, types=exact), executable)
                rules = SizeRules.of(stated, self._bind_sizes(call.names, types))
        except Exception as error:  # also the user's own code, which may not take symbolic sizes
            if self.dynamic:
                raise
            find_compile_log().info("%s needs the sizes of its arguments: %s", self.name, error)
            history.gave_up = True
            return None
        found = SymbolicProgram(patterns, frozenset(noted), traced, run, rules)
        if traced.owners or traced.breakpoints:
            history.gave_up = True
            return None
        history.programs.append(found)
        return found if found.fits(shapes) else None  # it serves other sizes: a guard does not hold for these

    def tuning(self, *args: Any, **named: Any) -> Tuned:
        """How the schedule for these arguments was found: the choice, its time, and every schedule that was tried.

        Tunes now, if no call has done it.

        Raises:
            ArgumentError: the function is not tuned.
        """
        if not self.tune:
            raise ArgumentError(f"{self.name} is not tuned", location=user_location(), suggestion="ts.jit(tune=True)")
        traced, _ = self._compiled(self.bind(args, named), compile_graph)
        return traced.tuned  # type: ignore[no-any-return]

    def trace(self, *args: Any, **named: Any) -> TracedFunction:
        """Trace the Graph function for these arguments: arrays, tensors or types (with symbolic sizes, if wanted)."""
        return self._trace(self.bind(args, named))

    def trace_dynamic(
        self, args: tuple, named: dict[str, Any], dynamic: Any, variant: SizeVariant | None = None
    ) -> TracedFunction:
        """Trace the Graph function with symbolic sizes; `dynamic` names them (`name_axes`).

        The function's attribute "constraints" lists what is required of the sizes: its own constraints, and the guards
        of its Python code, whose comparisons are decided by the sizes of the arguments or by those of a `variant`.
        """
        call = self.bind(args, named)
        shapes = tuple(t.shape for t in call.types)
        patterns = name_axes(call.names, shapes, [self._type_of(n) for n in call.names], dynamic)
        patterns, own = (variant.fix(patterns), variant.constraints) if variant else (patterns, ())
        types = tuple(t.with_shape(tuple(p)) for t, p in zip(call.types, patterns, strict=True))
        sizes = self._bind_sizes(call.names, types)
        known = SizeRules.of((*find_size_constraints(self), *own), sizes | find_stated_values(own))
        example = variant.sizes if variant else None
        with trace_symbols(patterns, shapes, example) as noted, note_stated_constraints() as stated:
            with use_size_constraints(known.constraints):
                traced = self._trace(replace(call, types=tuple(t.evaluate({}) for t in types)))  # exact quotients
        rules = known.add_constraints(SizeRules.of(stated, sizes)).add_guards(noted)
        function = replace(traced.function, attrs=Attrs({**traced.function.attrs, "constraints": rules.texts}))
        return replace(traced, function=function, rules=rules)

    def bind(self, args: tuple, named: dict[str, Any]) -> BoundCall:
        """Bind a call's arguments: check them against the annotations and flatten them."""
        try:
            bound = self.signature.bind(*args, **named)
        except TypeError as error:
            raise ArgumentError(
                f"{self.name}: {error}", location=user_location(), expected=f"{self.name}{self.signature}"
            ) from None
        given = set(bound.arguments)
        bound.apply_defaults()
        leaves: list[tuple[str, Any]] = []
        tree: dict[str, TreeDef] = {}
        for name, value in bound.arguments.items():
            # A default that the call leaves is static: `axis=-1` may decide a shape.
            static = name in self.static or (name not in given and isinstance(value, (int, float)))
            found, tree[name] = ([(name, _StaticArgument(value))], TreeDef()) if static else flatten(value, name)
            if tree[name].kind in (list, tuple) and self._type_of(name) is not None:
                raise DTypeError(
                    f"argument {name} is not a tensor", location=user_location(), expected=str(self._type_of(name)),
                    received=f"{type(value).__name__} {shorten_repr(value)}", suggestion=f"ts.tensor({name})",
                )  # fmt: skip
            leaves += found
        try:
            return self._classify_leaves(leaves, TreeDef(dict, tuple(tree), tuple(tree.values())))
        except TesseraError as error:
            raise error.at(user_location()) from None

    def _classify_leaves(self, leaves: list[tuple[str, Any]], tree: TreeDef) -> BoundCall:
        names: list[str] = []
        types: list[TensorType] = []
        traced, static = [], []
        for name, value in leaves:
            if value.__class__ not in _HOST_KINDS and is_on_device(value):
                value = Tensor(value)
            type = None if isinstance(value, _StaticArgument) else leaf_type(value)
            if type is None:
                static.append((name, value.value if isinstance(value, _StaticArgument) else value))
                continue
            names.append(name)
            types.append(_apply_annotation(name, type, self.annotations.get(name)))
            traced.append(value)
        self._bind_sizes(names, types)
        return BoundCall(tuple(names), tuple(types), tuple(traced), tuple(static), tree)

    def _bind_sizes(self, names: Sequence[str], types: Sequence[TensorType]) -> dict[str, Size]:
        """Bind the size names of the annotations; an error where shapes or requirements do not match."""
        sizes: dict[str, Size] = {}
        wanted = [(n, t, w) for n, t in zip(names, types, strict=True) if (w := self._type_of(n)) is not None]
        if misfit := bind_shapes([(w.shape, t.shape) for _, t, w in wanted], sizes):
            name, type, want = wanted[misfit.number]
            raise ShapeError(f"argument {name}: {misfit.problem}", expected=str(want), received=str(type))
        for requirement in find_size_constraints(self):
            requirement.check(sizes)
        return sizes

    def _type_of(self, name: str) -> TensorType | None:
        want = self.annotations.get(name)
        return want if isinstance(want, TensorType) else None

    def _trace(self, call: BoundCall, lines: bool = False, keep_updates: bool = False) -> TracedFunction:
        # In a copy of the context: what a trace sets in it ends with the trace.
        return copy_context().run(self._record, call, lines, keep_updates)

    def _record(self, call: BoundCall, lines: bool, keep_updates: bool) -> TracedFunction:
        builder = Builder()
        params = tuple(Value(t, n) for n, t in zip(call.names, call.types, strict=True))
        values = {p.hint: (WeakTensor if p.hint in call.numbers else Tensor)(p) for p in params} | dict(call.static)
        seed, first = (Value(TensorType((), int64), name) for name in RANDOM_STATE_NAMES)
        random, breakpoints = RandomState(Tensor(seed), Tensor(first)), list[Location]()
        TRACE_DEVICE.set(self.target or default_device())
        TRACED_RANDOM_STATE.set(random)
        REQUESTED_BREAKPOINTS.set(breakpoints)
        with builder.active(), use_known_sizes(self._bind_sizes(call.names, call.types)):
            arguments = call.tree.build(iter([values[n] for n in leaf_paths(call.tree)]))
            with mark_lines(builder) if lines else nullcontext():
                traced = {n: x for n, x in arguments.items() if n not in self.static}
                run = call_and_collect if keep_updates else _call_without_updates
                outcome, updates = run(lambda *_: self._call(arguments), *traced.values())
            leaves, results = flatten(outcome, empty=True)
            tensors = [to_result_tensor(leaf) for _, leaf in leaves]
            tensors = self._fit_results(tensors, results, call)
            outputs = [
                t.data if t.is_traced else builder.capture(get_elements(t)) for t in (*tensors, *updates.values())
            ]
        paths = tuple(_name_argument(path, list(traced)) for path in updates)
        # "lambda" is a keyword, which a generator of Python could not emit.
        name = self.name if self.name.isidentifier() else "lambda_"
        body = builder.block(params, outputs)
        if random.drawn:
            body = replace(body, params=(*body.params, seed, first))
        attributes = Attrs(make_program_attributes(self.passes, self.fusion))
        function = separate_regions(Function(name, body, attributes, self.location))
        captures = tuple(a for a, _ in builder.captures.values())
        owners = tuple((i, builder.owners[id(a)]) for i, a in enumerate(captures) if id(a) in builder.owners)
        use = random.summarise() if random.drawn or random.reseeded else None
        return TracedFunction(function, captures, results, owners, tuple(breakpoints), use, paths)

    def _fit_results(self, tensors: list[Tensor], results: TreeDef, call: BoundCall) -> list[Tensor]:
        """Check what the function returns against its return annotation.

        Raises:
            ShapeError, DTypeError: a result has another shape or element type.
        """
        sizes: dict[str, Size] = self._bind_sizes(call.names, call.types)
        fitted: dict[int, Tensor] = {}
        for want, result in pair_results(self.annotations.get("return"), results.build(iter(tensors))):
            misfit = bind_shapes([(want.shape, result.type.shape)], sizes)
            if misfit is not None:
                raise self._misfit_error(ShapeError, misfit.problem, want, result)
            found = fitted[id(result)] = fit_product(result, want)
            if found.dtype != want.dtype:
                raise self._misfit_error(DTypeError, "another element type", want, result)
        return [fitted.get(id(t), t) for t in tensors]

    def _misfit_error(self, kind: type[TesseraError], problem: str, want: TensorType, result: Tensor) -> TesseraError:
        node = _find_producer(result)
        return kind(
            f"{self.name} does not return what it says: {problem}",
            location=node.loc if node else self.location, expected=str(want), received=str(result.type),
            suggestion="change the result, or the return annotation",
        )  # fmt: skip

    def _call(self, arguments: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        with in_scope(arguments):
            return self.function(*bound.args, **bound.kwargs)


def _find_producer(result: Tensor) -> Node | None:
    builder = CURRENT_BUILDER.get()
    return builder.producers.get(result.data) if builder and isinstance(result.data, Value) else None


def fit_product(result: Tensor, want: TensorType) -> Tensor:
    """A matrix product declared as its accumulator's type: the sums are not rounded to the storage type before.

    Any other result is returned as it is.
    """
    node = _find_producer(result)
    if (
        node is None
        or node.op is not dot
        or result.dtype == want.dtype
        or getattr(node.args[0].type, "accumulate", None) != want.dtype
    ):
        return result
    return dot(*(Tensor(operand) for operand in node.args), dtype=want.dtype)


def pair_results(annotation: Any, value: Any) -> Iterator[tuple[TensorType, Tensor]]:
    """Pair the tensor types of a return annotation with the returned tensors."""
    if isinstance(annotation, TensorType):
        if isinstance(value, Tensor):
            yield annotation, value
        return
    parts = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
    if isinstance(value, tuple) and len(parts) == len(value):
        for part, each in zip(parts, value, strict=True):
            yield from pair_results(part, each)


# Classes of arguments that are in host memory.
_HOST_KINDS = frozenset((Tensor, np.ndarray, bool, int, float, str, type(None)))


@dataclass(frozen=True)
class _StaticArgument:
    """An argument that is static whatever its type."""

    value: Any


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Trace a function over tensors and run it as a compiled program.

    Where a second size of an axis is seen, the function is compiled once more, for every size of it; `dynamic=True`
    does so at the first call (for the sizes that annotations name, or for every axis), `dynamic=False` never. On ptx,
    whose fastest kernels need the sizes, only `dynamic=True` does. Where the Python code needs a size as a number, the
    function is compiled for each of its values. The environment variable `TESSERA_LOG=compile` prints compilations.

    `donate=("cache",)` gives the tensors of these arguments up: results may take their memory, and to use one after the
    call is an error that names the call.

    `tune=True` measures schedules of the function at the first call with arguments of new types, on these arguments,
    and keeps the fastest in a file (`docs/tuning.md`); each combination of sizes is then a program of its own.

    Options: `static_argnums`, `static_argnames` (passed by value, one trace for each), `target` or `device`
    ("interp", "cpu", "cuda:0", "wse", "csl:4x4", ...). Python numbers are traced as scalars that take the element type
    of what they meet, but for defaults that a call leaves as they are; strings, bools and None are static.

    Raises:
        TraceError: Python control flow depends on the value of a traced tensor.
    """
    if function is None:
        return functools.partial(jit, **options)
    if hasattr(type(function), "__jit__"):  # a module: its tensors are arguments
        return function.__jit__(options)  # type: ignore[attr-defined]
    return Jit(function, **options)


def _record_call_on_tape(
    traced: TracedFunction, leaves: Sequence[Any], hidden: Sequence[np.ndarray], results: Sequence[Tensor]
) -> None:
    """Record a call on the tape, for `backward`."""
    closed: list[Any] = list(hidden)
    for place, tensor in traced.owners:
        closed[place] = tensor
    operands = [x if isinstance(x, Tensor) else Tensor(to_array(x)) for x in (*leaves, *closed)]
    record_on_tape(called, operands, {}, results, (strip_marks(traced.function.body),))


def leaf_type(value: Any) -> TensorType | None:
    """Return the type of a traced leaf; None for a static one."""
    if isinstance(value, TensorType):
        return value
    if isinstance(value, Tensor):
        return value.type
    if isinstance(value, (np.ndarray, np.generic)):
        return TensorType(value.shape, as_dtype(value.dtype))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return TensorType((), as_dtype(type(value)))
    return as_tensor(value).type if hasattr(value, "__array__") else None


def to_operand(value: Any) -> Any:
    """A leaf as a program takes it: the elements of a tensor where they lie, anything else as an array."""
    return get_elements(value) if isinstance(value, Tensor) else to_array(value)


def to_array(value: Any) -> np.ndarray:
    if isinstance(value, (int, float)):
        return np.asarray(value, as_dtype(type(value)).numpy)
    return value if isinstance(value, np.ndarray) else as_tensor(value).numpy()


def _apply_annotation(name: str, type: TensorType, want: Any) -> TensorType:
    """Apply the policy of an annotation to a leaf's type; an error where the element types differ."""
    if not isinstance(want, TensorType):
        return type
    if want.dtype != type.dtype:
        raise DTypeError(
            f"argument {name} has another element type",
            expected=str(want),
            received=str(type),
            suggestion=f"cast it: {name}.to(ts.{want.dtype})",
        )
    return TensorType(type.shape, type.dtype, want.policy or type.policy)


def to_result_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return full(shape=(), value=value, dtype=as_dtype(type(value)))
    if isinstance(value, (np.ndarray, np.generic)):
        return Tensor(value)
    raise ArgumentError(
        f"a jit function returned a {type(value).__name__}",
        location=user_location(),
        expected="tensors, numbers, or lists, tuples and dicts of them",
    )
