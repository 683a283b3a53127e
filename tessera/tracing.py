"""@jit: a Python function over tensors becomes a Graph function, once for each kind of arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.closures import closure_key, definition_of, hints_of
from tessera.device import INTERP, default_device, generator_of
from tessera.errors import ArgumentError, DTypeError, ShapeError, TesseraError, here
from tessera.ir.builder import CURRENT, Builder
from tessera.ir.core import Function, Value
from tessera.marks import LINES, marked, pausing, stoppable, unmarked
from tessera.numerics.context import NUMERICS, suspended
from tessera.ops.arguments import check_function
from tessera.ops.basic import full
from tessera.ops.control import called
from tessera.pytree import Tree, flatten, paths
from tessera.shapes import Size, bind_all
from tessera.shapes.constraints import known_sizes, requirements
from tessera.tensor import TAPE, Tensor, like
from tessera.traced import Call, Traced, static_names
from tessera.types import TensorType, as_dtype


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
        static_argnums: Sequence[int] = (),
        static_argnames: Sequence[str] = (),
        target: str | None = None,
        device: str | None = None,
    ) -> None:
        check_function(function, "jit")
        functools.update_wrapper(self, function)
        self.function = function
        self.target = target or device
        self.signature = inspect.signature(function)
        self.static = static_names(list(self.signature.parameters), static_argnames, static_argnums)
        self.annotations = hints_of(function)
        self.location = definition_of(function)
        self._cache: dict[Hashable, Any] = {}
        # Calls by the types of positional tensors alone, which need no look at the signature.
        self._known: dict[Hashable, tuple[Traced, Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if CURRENT.get() is not None:  # inside another trace: part of it
            return self.function(*args, **named)
        from tessera.driver import executable  # the driver sits above the front ends

        if LINES.get() and generator_of(self.target or default_device()) == INTERP:
            return self.stepped(*args, **named)
        key = None if named else self._kinds(args)
        if key in self._known:
            return _finish(*self._known[key], [x.data if x.__class__ is Tensor else x for x in args])
        call = self.bind(args, named)
        traced, run = self._compiled(call, executable)
        if traced.pauses:  # nobody steps through it yet
            stoppable(traced.pauses[0], self.target or default_device())
            return self.stepped(*args, **named)
        if key is not None and not traced.owners and len(call.leaves) == len(args):
            self._known[key] = traced, run
        return self._run(call, traced, run)

    def stepped(self, *args: Any, **named: Any) -> Any:
        """A call in the Graph interpreter, traced with a mark before each line, so that a debugger can stop there."""
        from tessera.driver import executable

        call = self.bind(args, named)
        key = ("lines", call.key(), *self._surroundings())
        if key not in self._cache:
            self._cache[key] = self._trace(call, lines=True)
        traced = self._cache[key]
        return self._run(call, traced, executable(traced.function, INTERP))

    def _run(self, call: Call, traced: Traced, run: Callable[..., Any]) -> Any:
        arrays = run([*(_array(leaf) for leaf in call.leaves), *traced.captures])
        results = [_result(a, v) for a, v in zip(arrays, traced.function.results, strict=True)]
        if traced.owners or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in call.leaves):
            _remember(traced, call.leaves, results)
        return traced.results.build(iter(results))

    def _kinds(self, args: tuple[Any, ...]) -> Hashable:
        """What a call with these arguments depends on, if all are tensors and arrays; else None."""
        kinds: list[Any] = []
        for x in args:
            if x.__class__ is Tensor and not x.requires_grad and x.data.__class__ is np.ndarray:
                kinds.append(x.type)
            elif x.__class__ is np.ndarray:
                kinds.append((x.shape, x.dtype))
            else:
                return None
        return (tuple(kinds), *self._surroundings())

    def _surroundings(self) -> tuple[Hashable, ...]:
        """What a trace depends on beside its arguments: the target, the numeric context, closed-over values."""
        numerics = NUMERICS.get()
        closed = closure_key(self.function) if getattr(self.function, "__closure__", None) else ()
        return self.target or default_device(), numerics.key() if numerics is not None else None, closed

    def _compiled(self, call: Call, executable: Callable[..., Any]) -> Any:
        key = (call.key(), *self._surroundings())
        if key not in self._cache:
            traced = self._trace(call)
            with suspended(None):  # the types say already what the context asked for
                self._cache[key] = (traced, executable(traced.function, self.target or default_device()))
        return self._cache[key]

    def trace(self, *args: Any, **named: Any) -> Traced:
        """The Graph function for these arguments: arrays, tensors or types (with symbolic sizes, if you like)."""
        return self._trace(self.bind(args, named))

    def bind(self, args: tuple, named: dict[str, Any]) -> Call:
        """A call's arguments, checked against the annotations and taken apart."""
        try:
            bound = self.signature.bind(*args, **named)
        except TypeError as error:
            raise ArgumentError(
                f"{self.function.__name__}: {error}",
                location=here(),
                expected=f"{self.function.__name__}{self.signature}",
            ) from None
        given = set(bound.arguments)
        bound.apply_defaults()
        leaves: list[tuple[str, Any]] = []
        tree: dict[str, Tree] = {}
        for name, value in bound.arguments.items():
            # A number that only the function's own line gives is the same in each call: `axis=-1` may decide a shape.
            static = name in self.static or (name not in given and isinstance(value, (int, float)))
            found, tree[name] = ([(name, _Static(value))], Tree()) if static else flatten(value, name)
            leaves += found
        try:
            return self._sorted(leaves, Tree(dict, tuple(tree), tuple(tree.values())))
        except TesseraError as error:
            raise error.at(here()) from None

    def _sorted(self, leaves: list[tuple[str, Any]], tree: Tree) -> Call:
        names: list[str] = []
        types: list[TensorType] = []
        traced, static = [], []
        for name, value in leaves:
            type = None if isinstance(value, _Static) else _leaf_type(value)
            if type is None:
                static.append((name, value.value if isinstance(value, _Static) else value))
                continue
            names.append(name)
            types.append(_annotated(name, type, self.annotations.get(name)))
            traced.append(value)
        self._fit(names, types)
        return Call(tuple(names), tuple(types), tuple(traced), tuple(static), tree)

    def _fit(self, names: Sequence[str], types: Sequence[TensorType]) -> dict[str, Size]:
        """The sizes of the names in the annotations; an error where shapes or requirements do not fit them."""
        sizes: dict[str, Size] = {}
        wanted = [(n, t, w) for n, t in zip(names, types, strict=True) if (w := self._type_of(n)) is not None]
        if misfit := bind_all([(w.shape, t.shape) for _, t, w in wanted], sizes):
            name, type, want = wanted[misfit.number]
            raise ShapeError(f"argument {name}: {misfit.problem}", expected=str(want), received=str(type))
        for requirement in requirements(self):
            requirement.check(sizes)
        return sizes

    def _type_of(self, name: str) -> TensorType | None:
        want = self.annotations.get(name)
        return want if isinstance(want, TensorType) else None

    def _trace(self, call: Call, lines: bool = False) -> Traced:
        builder = Builder()
        params = tuple(Value(t, n) for n, t in zip(call.names, call.types, strict=True))
        values = {p.hint: Tensor(p) for p in params} | dict(call.static)
        with builder.active(), known_sizes(self._fit(call.names, call.types)):
            arguments = call.tree.build(iter([values[n] for n in paths(call.tree)]))
            with pausing() as pauses, marked(builder) if lines else nullcontext():
                outcome = self._call(arguments)
            leaves, results = flatten(outcome, empty=True)
            tensors = [_as_result(leaf) for _, leaf in leaves]
            outputs = [t.data if t.is_traced else builder.capture(t.data) for t in tensors]
        name = self.function.__name__
        name = name if name.isidentifier() else "traced"  # a lambda's name is none
        function = Function(name, builder.block(params, outputs), loc=self.location)
        captures = tuple(a for a, _ in builder.captures.values())
        owners = tuple((i, builder.owners[id(a)]) for i, a in enumerate(captures) if id(a) in builder.owners)
        return Traced(function, captures, results, owners, tuple(pauses))

    def _call(self, arguments: dict[str, Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        return self.function(*bound.args, **bound.kwargs)


@dataclass(frozen=True)
class _Static:
    """An argument passed by value whatever it is."""

    value: Any


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Trace a function over tensors and run it as a compiled program.

    Options: `static_argnums`, `static_argnames` (passed by value, one trace for each), `target` or `device`
    ("interp", "cpu", "cuda:0", "wse", "csl:4x4", ...). Python numbers are traced as scalars, but for defaults that a
    call leaves as they are; strings, bools and None are static.

    Raises:
        TraceError: Python control flow depends on the value of a traced tensor.
    """
    if function is None:
        return functools.partial(jit, **options)
    return Jit(function, **options)


def _finish(traced: Traced, run: Callable[..., Any], arrays: list[Any]) -> Any:
    """A call with operands that are known to fit."""
    if traced.captures:
        arrays += traced.captures
    out = run(arrays)
    if traced.results.kind is None:
        return _result(out[0], traced.function.results[0])
    return traced.results.build(iter([_result(a, v) for a, v in zip(out, traced.function.results, strict=True)]))


def _remember(traced: Traced, leaves: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Note how the results of a call were made, for `backward`."""
    closed: list[Any] = list(traced.captures)
    for place, tensor in traced.owners:
        closed[place] = tensor
    operands = [x if isinstance(x, Tensor) else Tensor(_array(x)) for x in (*leaves, *closed)]
    TAPE[0](called, operands, {}, results, (unmarked(traced.function.body),))


def _leaf_type(value: Any) -> TensorType | None:
    """The type of a traced leaf; None for a static one."""
    if isinstance(value, TensorType):
        return value
    if isinstance(value, Tensor):
        return value.type
    if isinstance(value, (np.ndarray, np.generic)):
        return TensorType(value.shape, as_dtype(value.dtype))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return TensorType((), as_dtype(type(value)))
    return TensorType(tuple(value.shape), as_dtype(np.asarray(value).dtype)) if hasattr(value, "__array__") else None


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return value.numpy()
    array = np.asarray(value)
    return array.astype(as_dtype(type(value)).numpy) if isinstance(value, (int, float)) else array


def _annotated(name: str, type: TensorType, want: Any) -> TensorType:
    """The leaf's type with the policy its annotation gives; an error where the element types differ."""
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


def _as_result(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return full(shape=(), value=value, dtype=as_dtype(type(value)))
    if isinstance(value, (np.ndarray, np.generic)):
        return Tensor(value)
    raise ArgumentError(
        f"a jit function returned a {type(value).__name__}",
        location=here(),
        expected="tensors, numbers, or lists, tuples and dicts of them",
    )


def _result(array: np.ndarray, value: Value) -> Tensor:
    type = value.type
    assert isinstance(type, TensorType)
    return like(array, type if type.shape == array.shape else type.with_shape(array.shape))
