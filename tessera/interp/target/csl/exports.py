"""The part of a PE that the host and the libraries see: its exported symbols, its variables by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.program import Mover
from tessera.interp.target.csl.values import Global, Value

if TYPE_CHECKING:
    from tessera.interp.target.csl.program import Program

_GLOBAL = re.compile(r"[RG](\d+)_?$")


class Function(NamedTuple):
    """An exported function on a PE."""

    name: str
    run: Callable[..., Any]
    params: tuple[t.Type, ...]


class Exports:
    """The symbols of one PE; each look at memory first does what waits to be done to it."""

    program: Program
    space: dict[str, Any]

    if TYPE_CHECKING:

        def settle(self) -> None: ...

    def exported(self, name: str) -> Any:
        """An exported symbol as it is now: a `Pointer`, or a `Function`."""
        self.settle()
        o = self.program.exports[name]
        move = Mover(self, [], self.space)
        move.arrays = [self.space[f"G{g.number}"] for g in self.program.unit.globals]
        if isinstance(o.type, t.Fn):
            return Function(name, move(o.const), tuple(p for p in o.type.params if p is not None))
        return move(o.const) if o.known else self._variable(o.code)

    def _variable(self, code: str) -> Any:
        match = _GLOBAL.match(code)
        assert match is not None
        found = self.program.unit.globals[int(match.group(1))]
        return self.space[f"G{found.number}"][0] if found.addressed else self.space[f"v{found.number}"]

    def memory(self, thing: Any) -> np.ndarray[Any, Any]:
        """The array of a global, given as a `Global` or the `Value` of a library's variable."""
        found = thing.data if isinstance(thing, Value) else thing
        assert isinstance(found, Global)
        self.settle()
        return self.space[f"G{found.number}"]

    def variable(self, name: str) -> np.ndarray[Any, Any]:
        """The array of a global of the top-level file by its name; raises KeyError where there is none."""
        self.settle()
        for g in self.program.unit.globals:
            if g.name == name:
                loose = f"v{g.number}"
                return np.array([self.space[loose]]) if loose in self.space else self.space[f"G{g.number}"]
        raise KeyError(name)
