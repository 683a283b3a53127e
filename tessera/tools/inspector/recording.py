"""Recording: what every op of a run computed, at the Graph and the Tile level, with error bounds and NaN origins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import RefType, TensorType
from tessera.interp import bound
from tessera.interp import graph as graph_interpreter
from tessera.interp.observers import OBSERVERS, ObservedLaunch
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.verify import verify
from tessera.ops.tensor import basic

MOST_ELEMENTS = 1 << 26  # that the results of a recorded run may have together
SHOWN_ELEMENTS = 8  # of a value
_READS, _WRITES = ("tile.load", "tile.gather"), ("tile.store", "tile.scatter")


class RecordingStopped(Exception):
    """The run has more elements than the limit."""


@dataclass
class RecordedValue:
    """What a value held: of all program instances and of every run of its op; `first` are elements of the first run.

    `bound` is the largest error bound of an element. `origin` is what the value's NaN or infinity comes from: the value
    of an operand, or a text where it starts here.
    """

    runs: int = 0
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    count: int = 0
    nans: int = 0
    infinities: int = 0
    first: list[Any] = field(default_factory=list)
    bound: float | None = None
    origin: Value | str | None = None

    def add(self, array: np.ndarray) -> None:
        """Count the elements of one run."""
        self.runs += 1
        numbers = array.astype(np.float64) if array.dtype.kind != "c" else np.abs(array)
        finite = np.isfinite(numbers)
        self.nans += int(np.isnan(numbers).sum())
        self.infinities += int(np.isinf(numbers).sum())
        if not self.first:
            self.first = [_to_plain(x) for x in array.reshape(-1)[:SHOWN_ELEMENTS]]
        held = numbers[finite]
        if held.size:
            self.low, self.high = min(self.low, float(held.min())), max(self.high, float(held.max()))
            self.total += float(held.sum())
            self.count += held.size


def _to_plain(x: Any) -> Any:
    """An element as JSON has it: numbers, and the names of those that JSON has not."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    if isinstance(x, (np.integer, int)):
        return int(x) if abs(int(x)) < 1 << 53 else str(int(x))  # a number of JavaScript is a float
    number = float(x)
    return float(f"{number:.7g}") if np.isfinite(number) else str(number)


class ValueRecorder:
    """An observer that records the results of every op of the Graph and Tile functions of a module."""

    stops = True  # Graph functions are observed too

    def __init__(self, module: Module) -> None:
        self.module = module
        self.values: dict[Value, RecordedValue] = {}
        self.elements = 0
        self._own: dict[Node, Node] = {}
        self._stored: dict[int, tuple[Value, str]] = {}  # the last value stored into a memory that was not finite
        self._names: dict[str, Function] = {f.name: f for f in module.functions}

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins: its nodes may be those of a specialised copy."""
        own = self._names.get(started.function.name)
        ran = list(started.function.body.walk())
        mine = list(own.body.walk()) if own is not None else []
        if [n.op for n in ran] == [n.op for n in mine]:
            self._own.update(zip(ran, mine, strict=True))
        else:  # rewritten before it ran: what is unchanged is recorded
            self._own.update({n: n for n in mine})

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Nodes as they are, recorded."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            results = inner(node, args, walk)
            if node in self._own:
                self._record(machine, self._own[node], args, results)
            return results

        return mean

    def _record(self, machine: TileMachine, node: Node, args: Sequence[Any], results: Sequence[Any]) -> None:
        if node.op.name in _WRITES:
            self._note_store(node, args)
        for value, held in zip(node.results, results, strict=True):
            if isinstance(value.type, RefType) or isinstance(held, InstanceMemory):
                continue
            array = _as_array(machine, held)
            if array is None or array.dtype == object:
                continue
            self._spend(array.size)
            self.values.setdefault(value, RecordedValue()).add(array)
            self._find_origin(node, value, args, array)

    def _spend(self, elements: int) -> None:
        self.elements += elements
        if self.elements > MOST_ELEMENTS:
            raise RecordingStopped

    def _note_store(self, node: Node, args: Sequence[Any]) -> None:
        stored = self.values.get(node.args[1])
        if stored is not None and stored.nans + stored.infinities:
            self._stored[_identify(args[0])] = (node.args[1], str(node.loc))

    def _find_origin(self, node: Node, value: Value, args: Sequence[Any], array: np.ndarray) -> None:
        """Where the NaN or infinity of a result comes from: an operand, a store, or this op."""
        mine = self.values[value]
        if mine.origin is not None or not _is_float(value) or np.isfinite(array.astype(np.float64)).all():
            return
        if node.op.name in _READS:
            stored = self._stored.get(_identify(args[0]))
            name = args[0].name if isinstance(args[0], InstanceMemory) else "memory"
            mine.origin = stored[0] if stored else f"it came in with {name}"
            return
        if node.op is basic.full:
            mine.origin = "a constant of the program"
            return
        wanted = bool(mine.nans)
        for each, held in zip(node.args, args, strict=True):
            before = self.values.get(each)
            if before is not None and (before.nans or (before.infinities and (wanted or before.origin))):
                mine.origin = each
                return
            if before is None and _holds_non_finite(held):
                mine.origin = f"it came in with {each.hint or 'an argument'}"
                return
        mine.origin = f"{node.op.name} makes it of finite operands" if not node.regions else "its region makes it"


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_float


def _as_array(machine: TileMachine, held: Any) -> np.ndarray | None:
    if isinstance(held, AffineScalar):
        return held.array(machine.count)
    return held if isinstance(held, np.ndarray) else np.asarray(held) if np.isscalar(held) else None


def _identify(held: Any) -> int:
    """The memory that a view is of."""
    array = held.array if isinstance(held, InstanceMemory) else held
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    return id(array)


def _holds_non_finite(held: Any) -> bool:
    array = np.asarray(held) if isinstance(held, (np.ndarray, np.generic, float)) else None
    return array is not None and array.dtype != object and not np.isfinite(array.astype(np.float64)).all()


@dataclass
class LevelRecording:
    """What was recorded of a level: its values, and why it is not complete ("" if it is)."""

    values: Mapping[Value, RecordedValue]
    note: str = ""


def record_level(module: Module, arrays: Sequence[Any]) -> LevelRecording:
    """Run a Graph or Tile module on copies of its inputs and record every value; an error ends the recording."""
    verify(module)
    recorder, note = ValueRecorder(module), ""
    given = [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]
    token = OBSERVERS.set((recorder,))
    try:
        if module.level == "graph":
            _record_inputs(recorder, module.main, given)
            graph_interpreter.run(module.main, given)
        else:
            tile_interpreter.run(module, given)
    except RecordingStopped:
        note = f"values are those of the first {MOST_ELEMENTS:,} elements: the run has more"
    except TesseraError as error:
        note = f"the run ended with {type(error).__name__}: {error.message}"
    finally:
        OBSERVERS.reset(token)
    if module.level == "graph" and not note:
        note = record_bounds(recorder.values, module.main, given)
    return LevelRecording(recorder.values, note)


def _record_inputs(recorder: ValueRecorder, function: Function, arrays: Sequence[Any]) -> None:
    for value, held in zip(function.params, arrays, strict=True):
        array = np.asarray(held)
        mine = recorder.values[value] = RecordedValue()
        mine.add(array)
        if mine.nans or mine.infinities:
            mine.origin = f"it came in with {value.hint or 'an argument'}"


def record_bounds(values: Mapping[Value, RecordedValue], function: Function, arrays: Sequence[Any]) -> str:
    """Add the error bound of each value of a Graph function; what prevented it is returned, or ""."""
    env: dict[Value, Any] = dict(zip(function.params, arrays, strict=True))
    missing: list[str] = []
    for node in function.body.nodes:
        used = tuple(dict.fromkeys([*node.args, *(v for r in node.regions for v in r.free)]))
        if any(v not in env for v in used):
            continue
        alone = Function("op", Block(used, (node,), node.results), loc=node.loc)
        try:
            found = bound.run(alone, [env[v] for v in used])
        except TesseraError:
            missing.append(node.op.name)
            continue
        env.update(zip(node.results, found, strict=True))
        for value, each in zip(node.results, found, strict=True):
            if value in values:
                values[value].bound = _largest_radius(each)
    names = ", ".join(sorted(set(missing)))
    return f"values that depend on {names} have no error bound" if missing else ""


def _largest_radius(found: IntervalArray) -> float:
    radius = np.asarray(found.radius, np.float64)
    return float(radius.max(initial=0.0)) if not np.isnan(radius).any() else np.inf
