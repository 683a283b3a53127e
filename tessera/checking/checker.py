"""The walk of a check: user code runs over types, each call and operator guarded, each error kept."""

from __future__ import annotations

import itertools
import operator
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from tessera.checking import instrument as names
from tessera.checking.findings import Findings
from tessera.checking.instrument import Instrumented, Site, instrument, remade
from tessera.checking.signatures import Signature, misfit_of_call, misfit_of_result
from tessera.checking.unknown import UNKNOWN, Undecided, Unknown, holds_unknown
from tessera.errors import _PACKAGE, Location, ShapeError, TesseraError
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.op import Op
from tessera.pytree import map_leaves
from tessera.shapes import Dim, Size, UnknownSizeError, symbols
from tessera.shapes.constraints import known_sizes
from tessera.shapes.dim import TYPES_ALONE, divided
from tessera.tensor import Tensor
from tessera.tracing import Jit

_PLAIN = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod", "Pow": "pow",
    "MatMult": "matmul", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor", "LShift": "lshift", "RShift": "rshift",
}  # fmt: skip
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {k: getattr(operator, v) for k, v in _PLAIN.items()}
OPERATORS |= {f"In{k}": getattr(operator, "i" + v.rstrip("_")) for k, v in _PLAIN.items()}
OPERATORS |= {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq}
OPERATORS |= {"NotEq": operator.ne, "Index": operator.getitem}
_LIBRARIES = tuple({sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")} | {_PACKAGE})
DEEPEST = 40  # calls within calls that are followed; recursion beyond is not decided
MOST_SIZES = 300  # trials of sizes for "?"


@dataclass
class Frame:
    """A user's function under way: its guarded code, its signature, its sizes and the site it is at."""

    function: FunctionType
    made: Instrumented
    signature: Signature
    sizes: Mapping[str, Size]
    site: Site | None = field(default=None)


class Checker:
    """A check under way: it runs functions over types and collects what is wrong."""

    def __init__(self, builder: Builder, findings: Findings) -> None:
        self.builder = builder
        self.findings = findings

    def enter(self, function: FunctionType, args: tuple, named: dict[str, Any], sizes: Mapping[str, Size]) -> Any:
        """The result of a user's function; UNKNOWN where an error ended it."""
        made = instrument(function)
        if made is None:
            return function(*args, **named)
        frame = Frame(function, made, Signature.of(function), sizes)
        with self._open(frame):
            try:
                return remade(function, made, self._guards(frame))(*args, **named)
            except TesseraError as error:
                return self._recover(error, frame, None, [])
            except AssertionError:
                self.findings.undecided(frame, "an assertion needs sizes that are not known")
                return UNKNOWN
            except Undecided:
                return UNKNOWN

    def places(self, function: FunctionType) -> Mapping[str, Location]:
        """Where a function's parameters stand in its source."""
        made = instrument(function)
        return made.parameters if made else {}

    @contextmanager
    def _open(self, frame: Frame) -> Iterator[None]:
        self.findings.frames.append(frame)
        token = TYPES_ALONE.set(True)
        try:
            with known_sizes(frame.sizes):
                yield
        finally:
            TYPES_ALONE.reset(token)
            self.findings.frames.pop()

    def _guards(self, frame: Frame) -> dict[str, Callable[..., Any]]:
        def call(index: int, function: Any, *args: Any, **named: Any) -> Any:
            frame.site = frame.made.sites[index]
            return self._call(frame, frame.site, function, args, named)

        def operate(index: int, kind: str, left: Any, right: Any) -> Any:
            frame.site = frame.made.sites[index]
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return UNKNOWN
            return self._guarded(frame, frame.site, OPERATORS[kind], (left, right), {})

        def leave(index: int, value: Any) -> Any:
            frame.site = frame.made.sites[index]
            misfit = misfit_of_result(frame.signature, frame.sizes, value)
            return self._misfit(frame, misfit, [value], frame.function) if misfit else value

        def truth(index: int, value: Any) -> bool:
            frame.site = frame.made.sites[index]
            try:
                return bool(value)
            except TesseraError as error:
                self._recover(error, frame, frame.site, [value])
                raise Undecided from None

        return dict(zip(names.GUARDS, (call, operate, leave, _unpack, slice, truth), strict=True))

    def _call(self, frame: Frame, site: Site, function: Any, args: tuple, named: dict[str, Any]) -> Any:
        inner, first = user_function(function)
        if inner is None or len(self.findings.frames) > DEEPEST:
            return self._guarded(frame, site, function, args, named)
        args = (*first, *args)
        sizes: dict[str, Size] = {}
        misfit = misfit_of_call(Signature.of(inner), args, named, sizes)
        if misfit:
            return self._misfit(frame, misfit, [*args, *named.values()], inner)
        return self.enter(inner, args, named, sizes)

    def _guarded(self, frame: Frame, site: Site, function: Any, args: tuple, named: dict[str, Any]) -> Any:
        unknown = holds_unknown([*args, named])
        if unknown and in_library(function):
            return UNKNOWN
        try:
            return function(*args, **named)
        except TesseraError as error:
            if isinstance(error, ShapeError) and self._undecided(frame, function, args, named):
                return UNKNOWN
            return self._recover(error, frame, site, [*_receiver(function), *args, *named.values()])
        except Exception:
            if unknown:
                return UNKNOWN
            raise

    def _undecided(self, frame: Frame, function: Any, args: tuple, named: dict[str, Any]) -> bool:
        """Whether shapes that do not fit by name may fit by size."""
        values = [*_receiver(function), *args, *named.values()]
        if divided(_sizes(values)):
            self.findings.undecided(frame, "sizes are divided, and the remainder is not known")
            return True
        return self._fits_some(function, args, named)

    def _fits_some(self, function: Any, args: tuple, named: dict[str, Any]) -> bool:
        """Whether sizes of "?" exist with which the call fits: then it is no error."""
        function, args = getattr(function, "__func__", function), (*_receiver(function), *args)
        shapes = [t.shape for t in _tensors([*args, *named.values()])]
        holes = sorted(n for n in symbols(itertools.chain(*shapes)) if n.startswith("?"))
        others = {s for s in itertools.chain(*shapes) if not str(s).startswith("?")} | {1}
        others |= {Dim.of(h) for h in holes[:1]}
        if not holes or len(others) ** len(holes) > MOST_SIZES:
            return bool(holes)
        trials = itertools.product(sorted(others, key=str), repeat=len(holes))
        return any(self._fits(function, args, named, dict(zip(holes, trial, strict=True))) for trial in trials)

    def _fits(self, function: Any, args: tuple, named: dict[str, Any], sizes: dict[str, Any]) -> bool:
        def sized(value: Any) -> Any:
            return Tensor(Value(value.type.evaluate(sizes))) if isinstance(value, Tensor) else value

        with self.builder.region():  # what is recorded here is dropped
            try:
                function(*map_leaves(sized, args), **map_leaves(sized, named))
            except TesseraError:
                return False
        return True

    def _recover(self, error: TesseraError, frame: Frame, site: Site | None, operands: list[Any]) -> Unknown:
        if isinstance(error, UnknownSizeError):
            self.findings.undecided(frame, error.message)
        else:
            self.findings.add(error, frame, site, operands, self.builder)
        return UNKNOWN

    def _misfit(self, frame: Frame, error: TesseraError, operands: list[Any], callee: FunctionType) -> Unknown:
        """What came of a value that is not as the annotations of `callee` say."""
        made = instrument(callee)
        code = callee.__code__
        place = made.location if made else Location(code.co_filename, code.co_firstlineno)
        self.findings.add(error, frame, frame.site, operands, self.builder, (place, callee.__name__))
        return UNKNOWN


def _unpack(value: Any, count: int) -> Any:
    return (UNKNOWN,) * count if isinstance(value, Unknown) else value


def _receiver(function: Any) -> tuple:
    owner = getattr(function, "__self__", None)
    return (owner,) if isinstance(owner, Tensor) else ()


def _sizes(values: list[Any]) -> list[Size]:
    """Every symbolic size in a call: of its tensors, and those passed as such."""
    found: list[Size] = [s for t in _tensors(values) for s in t.shape]
    map_leaves(lambda v: found.append(v) if isinstance(v, Dim) else None, values)
    return found


def _tensors(values: list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(lambda v: found.append(v) if isinstance(v, Tensor) else None, values)
    return found


def in_library(function: Any) -> bool:
    """Whether a callable is Tessera's, whose ops give unknown results for unknown operands."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return isinstance(function, Op) or bool(_receiver(function)) or str(module).startswith("tessera.")


def user_function(callee: Any) -> tuple[FunctionType | None, tuple]:
    """The user's Python function behind a callable, and the arguments that come first; None for a library's."""
    callee = callee.function if isinstance(callee, Jit) else callee
    first: tuple = ()
    if isinstance(callee, MethodType):
        callee, first = callee.__func__, (callee.__self__,)
    elif not isinstance(callee, FunctionType) and isinstance(getattr(type(callee), "__call__", None), FunctionType):  # noqa: B004
        callee, first = type(callee).__call__, (callee,)
    if not isinstance(callee, FunctionType) or callee.__code__.co_filename.startswith(_LIBRARIES):
        return None, ()
    return callee, first
