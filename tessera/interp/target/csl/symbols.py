"""Values that stand for those of many PEs while a task is recorded: from their variables, and from their memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from tessera.interp.target.csl.recorder import Recorder

LONGEST = 120  # characters of an expression, after which its value is looked at
LARGEST = 1 << 62  # integers beyond do not fit the arrays that hold them


class Unrecordable(Exception):
    """The task does something that is not recorded: its control depends on memory, or it leaves the PE."""


class Early:
    """An integer that depends on a PE's scalar variables only: known when the task begins.

    To branch on it is to look at it: the recorder notes what was seen, and the record holds for the PEs that see the
    same. `text` is the expression, in Python.
    """

    __array_ufunc__ = None

    def __init__(self, recorder: Recorder, text: str) -> None:
        self.recorder, self.text = recorder, text

    def __bool__(self) -> bool:
        return bool(self.recorder.seen(self.text))

    def __index__(self) -> int:
        return int(self.recorder.seen(self.text))

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))


class Late:
    """A number out of memory, or one that depends on such: worked out for all PEs at once, when it is needed.

    `number` is its place among the values of the record.
    """

    __array_ufunc__ = None

    def __init__(self, recorder: Recorder, number: int, whole: bool) -> None:
        self.recorder, self.number, self.whole = recorder, number, whole

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unrecordable("control depends on memory")

    __bool__ = __index__ = __int__ = __float__ = __hash__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __abs__ = _refuse
    __eq__ = __ne__ = _refuse  # type: ignore[assignment]


def _apply(name: str, a: Any, b: Any, sign: str) -> Any:
    """An operation of which one side at least is a symbol."""
    if isinstance(a, Late) or isinstance(b, Late):
        symbol = a if isinstance(a, Late) else b
        return symbol.recorder.calculate(getattr(operator, name), a, b)
    symbol = a if isinstance(a, Early) else b
    if not all(isinstance(x, (Early, int)) for x in (a, b)):
        raise Unrecordable("a variable meets a value of another kind")
    text = f"({_text(a)} {sign} {_text(b)})"
    found = Early(symbol.recorder, text)
    return found if len(text) < LONGEST else int(found)


def _text(value: Any) -> str:
    return value.text if isinstance(value, Early) else f"({value!r})"


def _both(name: str, sign: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    return lambda a, b: _apply(name, a, b, sign), lambda a, b: _apply(name, b, a, sign)


_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "floordiv": "//", "mod": "%", "truediv": "/",
}  # fmt: skip
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _methods() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """The operators of both kinds of symbols."""
    for name, sign in _SIGNS.items():
        ahead, behind = _both(name, sign)
        for kind in (Early, Late):
            yield kind, name.rstrip("_"), ahead
            yield kind, f"r{name.rstrip('_')}", behind
    for name, sign in _COMPARED.items():
        yield Early, name, _both(name, sign)[0]
    yield Late, "neg", lambda a: a.recorder.calculate(operator.neg, a)
    yield Late, "invert", lambda a: a.recorder.calculate(operator.invert, a)
    yield Early, "neg", lambda a: _apply("sub", 0, a, "-")
    yield Early, "invert", lambda a: _apply("xor", a, -1, "^")


for _kind, _name, _method in _methods():
    setattr(_kind, f"__{_name}__", _method)


class Cells:
    """A global variable's memory while a task is recorded: reads give `Late` values, writes become steps."""

    def __init__(self, recorder: Recorder, number: int, dtype: np.dtype[Any], count: int) -> None:
        self.recorder, self.number, self.dtype, self.count = recorder, number, dtype, count
        self.itemsize = dtype.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Late:
        return self.recorder.load(self, self._inside(index))

    item = __getitem__

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.store(self, self._inside(index), value)

    def view(self, dtype: Any) -> Cells:
        """The same memory as cells of another type."""
        dtype = np.dtype(dtype)
        return Cells(self.recorder, self.number, dtype, self.count * self.itemsize // dtype.itemsize)

    def _inside(self, index: Any) -> int:
        if not isinstance(index, (int, Early)) or self.dtype.kind not in "iufbV" or not 0 <= int(index) < self.count:
            raise Unrecordable("an access that the PE has to make itself")
        return int(index)
