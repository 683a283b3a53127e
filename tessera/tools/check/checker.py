"""Abstract interpretation of user code over types: `check` reports all shape and dtype errors with no op executed."""

from __future__ import annotations

import itertools
import operator
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from tessera.core import effects
from tessera.core.errors import (
    _PACKAGE_FOLDER,
    ArgumentError,
    Location,
    ProgramError,
    ShapeError,
    TesseraError,
    is_package_file,
    user_location,
)
from tessera.core.pytree import flatten, map_leaves
from tessera.core.shapes import bind_shapes, note_stated_constraints, use_known_sizes
from tessera.core.symbolic_dim import ABSTRACT_TRACE, Dim, Size, UnknownSizeError, has_inexact_division, symbol_names
from tessera.core.types import DType, RefType, TensorType, Type, as_dtype, scalar
from tessera.frontend.jit.tracing import Jit
from tessera.frontend.kernel.kernel_function import Kernel
from tessera.frontend.kernel.signature import KernelArguments
from tessera.interp.sanitizer.masked_loads import find_wide_masks
from tessera.interp.sanitizer.report import Finding
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.tools.check import instrumentation as names
from tessera.tools.check.diagnostics import TITLES, CheckReport, Diagnostic, DiagnosticCollector
from tessera.tools.check.instrumentation import (
    GuardedSite,
    InstrumentedCode,
    instrument_function,
    with_instrumented_code,
)
from tessera.tools.check.signatures import AnnotatedSignature, check_call, check_result, first_broken_requirement

# Poison value (LLVM LangRef): the result of an erroneous operation, propagated silently through every use.


class UndecidedError(Exception):
    """The program asks something that types alone cannot answer: checking stops at this function."""


class Poison:
    """A value of which nothing is known; every operation on it gives it again."""

    __array_priority__ = 1000
    __hash__ = object.__hash__
    inspections = 0  # how often `isinstance` has asked for the class of an unknown value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        Poison.inspections += 1
        return Poison

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that Python probes for
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **named: Any) -> Poison:
        return self

    def __getitem__(self, index: Any) -> Poison:
        return self

    def __iter__(self) -> Iterator[Poison]:
        return iter((self,))  # a loop over it is checked once

    def _refuse(self) -> Any:
        raise UndecidedError

    __bool__ = __len__ = __int__ = __float__ = __index__ = _refuse


def _propagate(self: Poison, *others: Any) -> Poison:
    return self


for _name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
    setattr(Poison, f"__{_name}__", _propagate)
    setattr(Poison, f"__r{_name}__", _propagate)
for _name in "lt le gt ge eq ne neg abs invert pos".split():
    setattr(Poison, f"__{_name}__", _propagate)

POISON = Poison()


def contains_poison(value: Any) -> bool:
    """Whether a value is unknown, or a container that holds one that is."""
    if isinstance(value, Poison):
        return True
    if isinstance(value, Mapping):
        return any(contains_poison(v) for v in value.values())
    return isinstance(value, (list, tuple)) and any(contains_poison(v) for v in value)


# Abstract interpretation of user code over types: `check` reports all shape and dtype errors with nothing executed.
#
# Each call and operator is guarded; after an error the walk goes on with a poison value.


# The walk of a check: user code runs over types, each call and operator guarded, each error kept.


_PLAIN = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod", "Pow": "pow",
    "MatMult": "matmul", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor", "LShift": "lshift", "RShift": "rshift",
}  # fmt: skip
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {k: getattr(operator, v) for k, v in _PLAIN.items()}
OPERATORS |= {f"In{k}": getattr(operator, "i" + v.rstrip("_")) for k, v in _PLAIN.items()}
OPERATORS |= {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq}
OPERATORS |= {"NotEq": operator.ne, "Index": operator.getitem}
_LIBRARIES = tuple({sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")} | {_PACKAGE_FOLDER})
MAX_CALL_DEPTH = 40  # the depth of calls to follow; deeper recursion is undecided
MAX_TRIED_SIZES = 300  # sizes to try for "?"


@dataclass
class CheckedFrame:
    """A running user function: its guarded code, signature, sizes and current site."""

    function: FunctionType
    made: InstrumentedCode
    signature: AnnotatedSignature
    sizes: Mapping[str, Size]
    site: GuardedSite | None = field(default=None)


class AbstractInterpreter:
    """Runs functions over types and collects the errors."""

    def __init__(self, builder: Builder, findings: DiagnosticCollector) -> None:
        self.builder = builder
        self.findings = findings

    def enter(self, function: FunctionType, args: tuple, named: dict[str, Any], sizes: Mapping[str, Size]) -> Any:
        """Run a user's function; the result is UNKNOWN where an error ended it."""
        made = instrument_function(function)
        if made is None:
            return function(*args, **named)
        frame = CheckedFrame(function, made, AnnotatedSignature.of(function), sizes)
        with self._open(frame):
            try:
                return with_instrumented_code(function, made, self._guards(frame))(*args, **named)
            except TesseraError as error:
                return self._recover(error, frame, None, [])
            except AssertionError:
                self.findings.undecided(frame, "an assertion needs sizes that are not known")
                return POISON
            except UndecidedError:
                return POISON

    def places(self, function: FunctionType) -> Mapping[str, Location]:
        """The source locations of a function's parameters."""
        made = instrument_function(function)
        return made.parameters if made else {}

    @contextmanager
    def _open(self, frame: CheckedFrame) -> Iterator[None]:
        self.findings.frames.append(frame)
        token = ABSTRACT_TRACE.set(True)
        required = (constraint.substitute(frame.sizes) for constraint in frame.signature.required)
        try:
            with use_known_sizes(frame.sizes), note_stated_constraints(filter(None, required)):
                yield
        finally:
            ABSTRACT_TRACE.reset(token)
            self.findings.frames.pop()

    def _guards(self, frame: CheckedFrame) -> dict[str, Callable[..., Any]]:
        def call(index: int, function: Any, *args: Any, **named: Any) -> Any:
            frame.site = frame.made.sites[index]
            return self._call(frame, frame.site, function, args, named)

        def operate(index: int, kind: str, left: Any, right: Any) -> Any:
            frame.site = frame.made.sites[index]
            if isinstance(left, Poison) or isinstance(right, Poison):
                return POISON
            return self._guarded(frame, frame.site, OPERATORS[kind], (left, right), {})

        def leave(index: int, value: Any) -> Any:
            frame.site = frame.made.sites[index]
            misfit = check_result(frame.signature, frame.sizes, value)
            return self._explain_misfit(frame, misfit, [value], frame.function) if misfit else value

        def truth(index: int, value: Any) -> bool:
            frame.site = frame.made.sites[index]
            try:
                return bool(value)
            except TesseraError as error:
                self._recover(error, frame, frame.site, [value])
                raise UndecidedError from None

        return dict(zip(names.GUARDS, (call, operate, leave, _unpack, slice, truth), strict=True))

    def _call(self, frame: CheckedFrame, site: GuardedSite, function: Any, args: tuple, named: dict[str, Any]) -> Any:
        inner, first = unwrap_user_function(function)
        if inner is None or len(self.findings.frames) > MAX_CALL_DEPTH:
            return self._guarded(frame, site, function, args, named)
        args = (*first, *args)
        sizes: dict[str, Size] = {}
        misfit = check_call(AnnotatedSignature.of(inner), args, named, sizes)
        if misfit:
            return self._explain_misfit(frame, misfit, [*args, *named.values()], inner)
        return self.enter(inner, args, named, sizes)

    def _guarded(
        self, frame: CheckedFrame, site: GuardedSite, function: Any, args: tuple, named: dict[str, Any]
    ) -> Any:
        unknown = contains_poison([*args, named])
        if unknown and in_library(function):
            return POISON
        inspections = Poison.inspections
        try:
            return function(*args, **named)
        except Exception as error:
            # A library function may have met an unknown value inside its arguments, or in a function that it called.
            if unknown or (in_library(function) and Poison.inspections > inspections):
                return POISON
            if not isinstance(error, TesseraError):
                raise
            if isinstance(error, ShapeError) and self._undecided(frame, function, args, named):
                return POISON
            return self._recover(error, frame, site, [*_bound_receiver(function), *args, *named.values()])

    def _undecided(self, frame: CheckedFrame, function: Any, args: tuple, named: dict[str, Any]) -> bool:
        """Whether shapes that differ by name may agree by size."""
        values = [*_bound_receiver(function), *args, *named.values()]
        if has_inexact_division(_sizes(values)):
            self.findings.undecided(frame, "sizes are divided, and the remainder is not known")
            return True
        return self._fits_some(function, args, named)

    def _fits_some(self, function: Any, args: tuple, named: dict[str, Any]) -> bool:
        """Whether some sizes of "?" make the call valid: then it is not an error."""
        function, args = getattr(function, "__func__", function), (*_bound_receiver(function), *args)
        shapes = [t.shape for t in _tensors([*args, *named.values()])]
        holes = sorted(n for n in symbol_names(itertools.chain(*shapes)) if n.startswith("?"))
        others = {s for s in itertools.chain(*shapes) if not str(s).startswith("?")} | {1}
        others |= {Dim.of(h) for h in holes[:1]}
        if not holes or len(others) ** len(holes) > MAX_TRIED_SIZES:
            return bool(holes)
        trials = itertools.product(sorted(others, key=str), repeat=len(holes))
        return any(self._fits(function, args, named, dict(zip(holes, trial, strict=True))) for trial in trials)

    def _fits(self, function: Any, args: tuple, named: dict[str, Any], sizes: dict[str, Any]) -> bool:
        def sized(value: Any) -> Any:
            return Tensor(Value(value.type.evaluate(sizes))) if isinstance(value, Tensor) else value

        with self.builder.region():  # the recorded ops are dropped
            try:
                function(*map_leaves(sized, args), **map_leaves(sized, named))
            except TesseraError:
                return False
        return True

    def _recover(
        self, error: TesseraError, frame: CheckedFrame, site: GuardedSite | None, operands: list[Any]
    ) -> Poison:
        if isinstance(error, UnknownSizeError):
            self.findings.undecided(frame, error.message)
        else:
            self.findings.add(error, frame, site, operands, self.builder)
        return POISON

    def _explain_misfit(
        self, frame: CheckedFrame, error: TesseraError, operands: list[Any], callee: FunctionType
    ) -> Poison:
        """Explain a value that does not match the annotations of `callee`."""
        made = instrument_function(callee)
        code = callee.__code__
        place = made.location if made else Location(code.co_filename, code.co_firstlineno)
        self.findings.add(error, frame, frame.site, operands, self.builder, (place, callee.__name__))
        return POISON


def _unpack(value: Any, form: tuple | None) -> Any:
    """A value that a target of this form unpacks: unknown parts where it is unknown."""
    if form is None:
        return value
    if isinstance(value, Poison):
        return tuple(_unpack(value, part) for part in form)
    if any(form) and isinstance(value, (tuple, list)) and len(value) == len(form):
        return tuple(_unpack(each, part) for each, part in zip(value, form, strict=True))
    return value


def _bound_receiver(function: Any) -> tuple:
    owner = getattr(function, "__self__", None)
    return (owner,) if isinstance(owner, Tensor) else ()


def _sizes(values: list[Any]) -> list[Size]:
    """Collect every symbolic size in a call: of its tensors, and those passed as arguments."""
    found: list[Size] = [s for t in _tensors(values) for s in t.shape]
    map_leaves(lambda v: found.append(v) if isinstance(v, Dim) else None, values)
    return found


def _tensors(values: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda v: found.append(v) if isinstance(v, Tensor) else None, values)
    return found


def in_library(function: Any) -> bool:
    """Whether a callable is Tessera's, whose ops give unknown results for unknown operands."""
    code = getattr(function, "__code__", None)
    if code is not None:  # a wrapper of a user's function has that function's module
        return is_package_file(code.co_filename)
    module = getattr(function, "__module__", None) or type(function).__module__
    return isinstance(function, Op) or bool(_bound_receiver(function)) or str(module).startswith("tessera.")


def _is_effect_guard(callee: Any) -> bool:
    """Whether this is the wrapper of `pure` or `effects`, which changes no type."""
    return isinstance(callee, FunctionType) and callee.__code__.co_filename == effects.__file__


def unwrap_user_function(callee: Any) -> tuple[FunctionType | None, tuple]:
    """The user's Python function under a callable, and its leading arguments; None for a library function."""
    while isinstance(callee, Jit) or _is_effect_guard(callee):
        callee = callee.function if isinstance(callee, Jit) else callee.__wrapped__
    first: tuple = ()
    if isinstance(callee, MethodType):
        callee, first = callee.__func__, (callee.__self__,)
    elif not isinstance(callee, FunctionType) and isinstance(getattr(type(callee), "__call__", None), FunctionType):  # noqa: B004
        callee, first = type(callee).__call__, (callee,)
    if not isinstance(callee, FunctionType) or callee.__code__.co_filename.startswith(_LIBRARIES):
        return None, ()
    return callee, first


def check(function: Callable[..., Any], *types: Any, **named: Any) -> CheckReport:
    """All shape and dtype errors of a function, with no op executed.

    The function is traced over tensors of its annotations, with symbolic sizes, or of the `types` given: tensor
    types, containers of them, arrays (only their type counts), and anything else by value. After an error the result
    is unknown and takes no further part. Functions it calls are checked too. A parameter without a type is unknown.
    `"..."` is checked as one axis, and `"?"` only where no size at all would fit. A kernel is compiled for several
    sizes of the names in its annotations: what it reports is its first error, if it has one for all of them.

    Raises:
        ArgumentError: `function` is no Python function, or does not take these arguments.

    >>> def scale(x: Tensor["B", "D"], w: Tensor["E"]):
    ...     return x * w
    >>> check(scale).ok
    False
    """
    if isinstance(function, Kernel):
        return _check_kernel(function, types, named)
    target, first = unwrap_user_function(function)
    if target is None:
        raise ArgumentError(f"{function!r} is not a Python function to check", location=user_location())
    return _CheckRun(target).run((*first, *types), named)


# Sizes of the names in a kernel's annotations, by their order: an error that some of them do not have is none.
DIFFERENT_SIZES: tuple[Callable[[int], int], ...] = (lambda n: 64 << n, lambda n: 1024 >> n, lambda n: 16 * (n + 2))
EQUAL_SIZES: tuple[Callable[[int], int], ...] = (lambda n: 16, lambda n: 32, lambda n: 128)


def _check_kernel(kernel: Kernel, types: tuple, named: dict[str, Any]) -> CheckReport:
    """Compile a kernel for sizes until it has no error; else its error is the one that all different sizes have."""
    name = kernel.kernel_function.__name__
    try:
        given = {**kernel.parameters.signature.bind_partial(*types, **named).arguments}
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}", location=user_location()) from None
    annotated = [a for a in kernel.parameters.annotations.values() if isinstance(a, TensorType)]
    symbols = sorted(symbol_names(itertools.chain(*(a.shape for a in annotated))))
    errors: dict[str, TesseraError] = {}
    for choose in (*DIFFERENT_SIZES, *EQUAL_SIZES):
        sizes = {symbol: choose(n) for n, symbol in enumerate(symbols)}
        found, untyped = _kernel_arguments(kernel, given, sizes)
        if untyped:
            note = f"{name}: {untyped} has no type: the kernel is not checked"
            return CheckReport(name, (), (note,), typed=False)
        problem, lint = _compile_kernel(kernel, found)
        if problem is None:
            notes = [f"{name}: where {s}: {e.message}" for s, e in list(errors.items())[:1]]
            return CheckReport(name, (), (*notes, *(f"{name}: {f.location}: {f.message}" for f in lint)))
        errors[", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())] = problem
    first, *others = list(errors.values())[: len(DIFFERENT_SIZES)]
    if all(type(e) is type(first) and e.location == first.location for e in others):
        return CheckReport(name, (_describe_kernel_error(kernel, first),), ())
    where = next(iter(errors))
    return CheckReport(name, (), (f"{name}: not checked: no size tried suits it; where {where}: {first.message}",))


def _compile_kernel(kernel: Kernel, found: KernelArguments) -> tuple[TesseraError | None, tuple[Finding, ...]]:
    """The error of a kernel for some arguments, if there is one, and the masks in it that are too wide."""
    try:
        module = kernel.specialize(found.types, found.constants, (1, 1, 1), kernel.plan(found, None, None)[1])
    except TesseraError as error:
        return error, ()
    except Exception as error:  # of a function that the kernel calls while it is compiled
        return ProgramError(f"{type(error).__name__}: {error}"), ()
    return None, tuple(find_wide_masks(module.functions[1]))


def _kernel_arguments(
    kernel: Kernel, given: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[KernelArguments, str]:
    """The argument types and constants of a kernel for these sizes, and the first parameter without either."""
    defaults = {
        **(kernel.options.autotune_configs or ({},))[0],
        **kernel.schedule.constants(kernel.parameters.constants),
    }
    types: dict[str, Type] = {}
    constants: dict[str, Any] = {}
    for name, parameter in kernel.parameters.signature.parameters.items():
        value = given.get(name, kernel.parameters.annotations.get(name))
        value = value.type if isinstance(value, Tensor) else value
        if isinstance(value, np.ndarray):
            value = TensorType(value.shape, as_dtype(value.dtype))
        if isinstance(value, TensorType):
            concrete = value.evaluate(sizes)
            types[name] = RefType(concrete.shape, concrete.dtype, policy=concrete.policy)
        elif name not in kernel.parameters.constants and isinstance(value, DType):
            types[name] = scalar(value)
        elif name in given or name in defaults or parameter.default is not parameter.empty:
            constants[name] = given.get(name, defaults.get(name, parameter.default))
        else:
            return KernelArguments({}, (), {}, False), name
    return KernelArguments(types, (), constants, False), ""


def _describe_kernel_error(kernel: Kernel, error: TesseraError) -> Diagnostic:
    function = kernel.kernel_function
    expected, received = (None if v is None else str(v) for v in (error.expected, error.received))
    return Diagnostic(
        TITLES.get(type(error), type(error).__name__), function.__name__, error.location or _definition(function),
        error.message, expected, received, fixes=(error.suggestion,) if error.suggestion else (),
    )  # fmt: skip


class _CheckRun:
    """One check: its builder, its findings, and the arguments it makes from types."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.signature = AnnotatedSignature.of(function)
        self.builder = Builder()
        self.findings = DiagnosticCollector()
        self.checker = AbstractInterpreter(self.builder, self.findings)

    def run(self, types: tuple, named: dict[str, Any]) -> CheckReport:
        """Trace the function and report."""
        arguments = self._arguments(types, named)
        sizes = self._sizes(arguments.arguments)
        with self.builder.active():
            try:
                self.checker.enter(self.function, arguments.args, arguments.kwargs, sizes)
            except Exception as error:
                self._crash(error)
        values = list(arguments.arguments.values())
        typed = bool(_tensors(values)) or not contains_poison(values)
        return CheckReport(self.signature.name, (*self.extra, *self.findings.all), self.findings.notes, typed)

    def _arguments(self, types: tuple, named: dict[str, Any]) -> Any:
        try:
            bound = self.signature.python.bind_partial(*types, **named)
        except TypeError as error:
            raise ArgumentError(f"{self.signature.name}: {error}", location=user_location()) from None
        given = dict(bound.arguments)
        bound.apply_defaults()
        for name, parameter in self.signature.python.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in given and (name in self.signature.tensors or parameter.default is parameter.empty):
                bound.arguments[name] = self._from_annotation(name)
            else:
                bound.arguments[name] = self._from_value(name, bound.arguments[name])
        order = [n for n in self.signature.python.parameters if n in bound.arguments]
        bound.arguments = {n: bound.arguments[n] for n in order}  # type: ignore[assignment]
        return bound

    def _from_annotation(self, name: str) -> Any:
        want = self.signature.tensors.get(name)
        if want is None:
            self.findings.note(f"{self.signature.name}: {name} has no type: what follows from it is not checked")
            return POISON
        holes = {n: Dim.of(f"?{name}{n[1:]}") for n in _anonymous_type(want)}
        return self._parameter(name, want.evaluate(holes))  # type: ignore[arg-type]

    def _from_value(self, name: str, value: Any) -> Any:
        leaves, tree = flatten(value, name)
        return tree.build(iter([self._leaf(path, leaf) for path, leaf in leaves]))

    def _leaf(self, path: str, value: Any) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            value = value.type if isinstance(value, Tensor) else TensorType(value.shape, as_dtype(value.dtype))
        return self._parameter(path, value) if isinstance(value, TensorType) else value

    def _parameter(self, name: str, type: TensorType) -> Tensor:
        value = Value(type, name)
        self.findings.origins[value] = (name, self._place(name))
        return Tensor(value)

    def _place(self, name: str) -> Location:
        return self.checker.places(self.function).get(name.partition(".")[0], _definition(self.function))

    def _sizes(self, arguments: Mapping[str, Any]) -> dict[str, Size]:
        """The sizes of the names in the annotations; what the types given break is kept as an error."""
        sizes: dict[str, Size] = {}
        self.extra: tuple[Diagnostic, ...] = ()
        wanted = [
            (n, v.type, w) for n, w in self.signature.tensors.items() if isinstance(v := arguments.get(n), Tensor)
        ]
        misfit = bind_shapes([(w.shape, t.shape) for _, t, w in wanted], sizes)
        error = first_broken_requirement(self.signature.required, sizes)
        if misfit:
            name, type, want = wanted[misfit.number]
            error = ShapeError(f"argument {name}: {misfit.problem}", expected=str(want), received=str(type))
        if error:
            place = _definition(self.function)
            parts = (error.message, error.expected, error.received)
            self.extra = (Diagnostic("Shape mismatch", self.signature.name, place, *parts),)
        return sizes

    def _crash(self, error: Exception) -> None:
        """Record a Python exception, which ends the check."""
        file = self.function.__code__.co_filename
        steps = [s for s in traceback.extract_tb(error.__traceback__) if s.filename == file]
        last = steps[-1] if steps else None
        place = Location(file, last.lineno or 0) if last else _definition(self.function)
        title = type(error).__name__
        name = last.name if last else self.signature.name
        self.extra += (Diagnostic(title, name, place, str(error) or title),)


def _anonymous_type(type: TensorType) -> list[str]:
    return [str(s) for s in type.shape if str(s).startswith("?")]


def _definition(function: FunctionType) -> Location:
    return Location(function.__code__.co_filename, function.__code__.co_firstlineno)
