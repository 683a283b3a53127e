"""Task trace: symbolic values, guards, effects, and vectorised memory steps of a recorded task (cf. trace-based
execution with guards, Bala 2000).

The steps run for many PEs at once: rows of numbers with one column for each PE.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from tessera.interp.target.csl.pe.dsd_operations import execute_operation
from tessera.interp.target.csl.pe.dsd_table import DsdOp
from tessera.interp.target.csl.pe.product_loops import ProductLoop
from tessera.interp.target.csl.sema.values import Dsr

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.task_recorder import TaskRecorder


# Symbolic values of a recording: of scalar variables, and of memory.


MAX_EXPRESSION_LENGTH = 120  # the length of an expression from which its value becomes a guard
MAX_SAFE_INTEGER = 1 << 62  # larger integers do not fit the int64 arrays


class UnrecordableTask(Exception):
    """The task cannot be recorded: its control flow depends on memory, or it has an effect that only the PE can
    execute.
    """


class ScalarSymbol:
    """An integer that depends only on scalar variables: known when the task starts.

    A branch on a symbol adds a guard: the record holds for PEs with the same value. `text` is the Python expression.
    """

    __array_ufunc__ = None

    def __init__(self, recorder: TaskRecorder, text: str) -> None:
        self.recorder, self.text = recorder, text

    def __bool__(self) -> bool:
        return bool(self.recorder.add_guard(self.text))

    def __index__(self) -> int:
        return int(self.recorder.add_guard(self.text))

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))


class VectorSymbol:
    """A number that depends on memory: computed for all PEs at once, when it is needed.

    `number` is its index among the values of the record.
    """

    __array_ufunc__ = None

    def __init__(self, recorder: TaskRecorder, number: int, whole: bool) -> None:
        self.recorder, self.number, self.whole = recorder, number, whole

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnrecordableTask("control depends on memory")

    __bool__ = __index__ = __int__ = __float__ = __hash__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __abs__ = _refuse
    __eq__ = __ne__ = _refuse  # type: ignore[assignment]


def _apply_operator(name: str, a: Any, b: Any, sign: str) -> Any:
    """An operation with at least one symbolic operand."""
    if isinstance(a, VectorSymbol) or isinstance(b, VectorSymbol):
        symbol = a if isinstance(a, VectorSymbol) else b
        return symbol.recorder.calculate(getattr(operator, name), a, b)
    symbol = a if isinstance(a, ScalarSymbol) else b
    if not all(isinstance(x, (ScalarSymbol, int)) for x in (a, b)):
        raise UnrecordableTask("an operation on a variable and a non-number")
    text = f"({_expression_text(a)} {sign} {_expression_text(b)})"
    result = ScalarSymbol(symbol.recorder, text)
    return result if len(text) < MAX_EXPRESSION_LENGTH else int(result)


def _expression_text(value: Any) -> str:
    return value.text if isinstance(value, ScalarSymbol) else f"({value!r})"


def _make_operator_pair(name: str, sign: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    return lambda a, b: _apply_operator(name, a, b, sign), lambda a, b: _apply_operator(name, b, a, sign)


_ARITHMETIC_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "floordiv": "//", "mod": "%", "truediv": "/",
}  # fmt: skip
_COMPARISON_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _list_operators() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """The operators of both kinds of symbols."""
    for name, sign in _ARITHMETIC_SIGNS.items():
        ahead, behind = _make_operator_pair(name, sign)
        for kind in (ScalarSymbol, VectorSymbol):
            yield kind, name.rstrip("_"), ahead
            yield kind, f"r{name.rstrip('_')}", behind
    for name, sign in _COMPARISON_SIGNS.items():
        yield ScalarSymbol, name, _make_operator_pair(name, sign)[0]
    yield VectorSymbol, "neg", lambda a: a.recorder.calculate(operator.neg, a)
    yield VectorSymbol, "invert", lambda a: a.recorder.calculate(operator.invert, a)
    yield ScalarSymbol, "neg", lambda a: _apply_operator("sub", 0, a, "-")
    yield ScalarSymbol, "invert", lambda a: _apply_operator("xor", a, -1, "^")


for _kind, _name, _method in _list_operators():
    setattr(_kind, f"__{_name}__", _method)


class SymbolicMemory:
    """A global variable's memory in a recording: reads return `VectorSymbol` values, writes become steps."""

    def __init__(self, recorder: TaskRecorder, number: int, dtype: np.dtype[Any], count: int) -> None:
        self.recorder, self.number, self.dtype, self.count = recorder, number, dtype, count
        self.itemsize = dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> VectorSymbol:
        return self.recorder.load(self, self._inside(index))

    item = __getitem__

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.store(self, self._inside(index), value)

    def view(self, dtype: Any) -> SymbolicMemory:
        """The same memory as cells of another type."""
        dtype = np.dtype(dtype)
        return SymbolicMemory(self.recorder, self.number, dtype, self.count * self.itemsize // dtype.itemsize)

    def _inside(self, index: Any) -> int:
        if (
            not isinstance(index, (int, ScalarSymbol))
            or self.dtype.kind not in "iufbV"
            or not 0 <= int(index) < self.count
        ):
            raise UnrecordableTask("a memory access that must run on the PE")
        return int(index)


# Memory steps: executed for many PEs at once, on rows of numbers with one column per PE.


MemoryKey = tuple[int, Any]  # a global variable's number, and the type of its cells


class ValueIndex(NamedTuple):
    """The index of a number among the values of a record."""

    number: int


class LockstepFrame:
    """The numbers of some PEs: `arrays` are cells by PEs, `inputs` and `values` are rows."""

    def __init__(self, arrays: dict[MemoryKey, np.ndarray[Any, Any]], inputs: list[Any], count: int) -> None:
        self.arrays, self.inputs = arrays, inputs
        self.values: list[Any] = [None] * count

    def resolve(self, value: Any) -> Any:
        """The numbers of a `ValueIndex`; other operands unchanged."""
        return self.values[value[0]] if type(value) is ValueIndex else value


@dataclass
class MemorySteps:
    """Memory steps in order: functions with their operands after the frame."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    memory: set[MemoryKey] = field(default_factory=set)  # the accessed memory
    written: set[int] = field(default_factory=set)  # the written variables
    count: int = 0  # the number of values
    floats: list[bytes] = field(default_factory=list)  # the float operands, which keys compare bitwise

    @property
    def key(self) -> Any:
        """A key that is equal for equal steps."""
        return tuple(self.steps), tuple(self.floats)

    def run(self, frame: LockstepFrame) -> None:
        """Execute the steps."""
        with np.errstate(all="ignore"):
            for function, *args in self.steps:
                function(frame, *args)


def load_input(f: LockstepFrame, place: int, position: int) -> None:
    """Load an input of each PE."""
    f.values[place] = f.inputs[position]


def load_cell(f: LockstepFrame, place: int, key: MemoryKey, index: int) -> None:
    """Load a cell; integers have 64 bits."""
    row = f.arrays[key][index : index + 1]
    f.values[place] = row.astype(np.int64) if key[1].kind in "iub" else row.copy()


def store_cell(f: LockstepFrame, key: MemoryKey, index: int, value: Any) -> None:
    """Store into a cell."""
    f.arrays[key][index] = f.resolve(value)


def compute_value(f: LockstepFrame, place: int, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Compute a number."""
    f.values[place] = function(*[f.resolve(a) for a in given])


def run_dsd_operation(f: LockstepFrame, op: DsdOp, given: tuple[Any, ...]) -> None:
    """Execute a DSD operation on memory."""
    execute_operation(
        op, tuple([f.resolve(o) if not hasattr(o, "array") else o._replace(array=f.arrays[o.array]) for o in given])
    )


def run_product_loop(f: LockstepFrame, loop: ProductLoop, keys: tuple[MemoryKey, ...]) -> None:
    """Execute a loop of products on the memory of its operands."""
    loop.run(*[f.arrays[key] for key in keys])


# Task records.


SCALAR_VARIABLE = re.compile(r"v\d+$")  # the names of scalar variables in generated code


@dataclass
class RecordedEffect:
    """A call on the PE, `cycles` after the previous one ended; `line` is the line of the generated Python."""

    cycles: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    line: int


@dataclass
class TaskRecord:
    """The effects of a task where its guards hold."""

    guards: list[tuple[str, Any]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)  # expressions of the inputs of memory steps
    effects: list[RecordedEffect] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)  # the final scalar variables
    work: MemorySteps = field(default_factory=MemorySteps)
    cycles: int = 0  # after the last effect
    operations: int = 0  # the memory steps, and the iterations of those that are loops


def concretise(value: Any) -> Any:
    """A descriptor with guarded values in place of symbols; other values unchanged."""
    if not isinstance(value, tuple) or not any(isinstance(item, (ScalarSymbol, VectorSymbol, tuple)) for item in value):
        return value
    return map_items(
        value, lambda item: int(item) if isinstance(item, (ScalarSymbol, VectorSymbol)) else concretise(item)
    )


def contains_kind(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether a nested value contains an instance of some classes."""
    if isinstance(value, dict):
        return any(contains_kind(item, kinds) for item in value.values())
    return isinstance(value, kinds) or (isinstance(value, tuple) and any(contains_kind(item, kinds) for item in value))


def map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple (or descriptor) or dict with mapped items; other values unchanged."""
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    if not isinstance(value, tuple) or isinstance(value, Dsr):
        return value
    items = [change(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def fits_64_bits(function: Callable[..., Any], given: tuple[Any, ...]) -> bool:
    """Whether 64-bit arithmetic gives the same result as unbounded integers."""
    constants = [a for a in given if isinstance(a, int)]
    if any(abs(a) >= MAX_SAFE_INTEGER for a in constants):
        return False
    if function in (operator.lshift, operator.rshift):
        return isinstance(given[1], int) and 0 <= given[1] < 32
    if function in (operator.floordiv, operator.mod):
        return isinstance(given[1], int) and given[1] > 0
    return True
