"""Execution of host plans: binding arguments, one walk over the steps of a plan, the check of a plan that was read from
a file, and the calls that NumPy runs."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tessera.ops  # noqa: F401
from tessera.codegen.artifact import (
    MAX_COUNT,
    FieldCheck,
    check_fields,
    has_fields,
    is_count,
    is_list,
    is_table,
    is_text,
)
from tessera.core.errors import (
    UNKNOWN,
    ArgumentError,
    ArtifactError,
    DTypeError,
    Location,
    ResourceError,
    ShapeError,
    TesseraError,
)
from tessera.core.hooks import agree_on_order, start_exchange
from tessera.core.kept_memory import make_array
from tessera.core.types import DTYPES, TensorType, as_dtype
from tessera.ir.rules import REGISTRY

DTYPE_NAMES = frozenset(d.name for d in DTYPES)

# Binding arguments: the arrays of a call, checked against the program's parameters.


class PlanParameter:
    """A parameter of the program: an input, an output or a scalar."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.name = data["name"]
        self.shape, self.dtype = tuple(data["shape"]), as_dtype(data["dtype"])
        self._numpy = self.dtype.numpy
        self.output, self.scalar = data["role"] == "output", data["role"] == "scalar"
        self.bytes = math.prod(self.shape) * self._numpy.itemsize

    def allocate(self, zeroed: bool = False) -> np.ndarray:
        """A new array; `zeroed` for one that a kernel reads before it writes, as atomics do."""
        made = make_array(self.shape, self._numpy, self.bytes)
        if zeroed:
            made.fill(0)
        return made

    def convert(self, value: Any) -> np.ndarray:
        """An argument as an array.

        Raises:
            ShapeError, DTypeError: the shape or the dtype is not the parameter's.
        """
        if value.__class__ is np.ndarray and value.shape == self.shape and value.dtype == self._numpy:
            return value
        is_number = self.scalar and not hasattr(value, "dtype")
        array = np.asarray(value, self.dtype.numpy) if is_number else np.asarray(value)
        if array.shape != self.shape:
            raise ShapeError(f"argument {self.name} has the wrong shape", expected=self.shape, received=array.shape)
        if array.dtype != self.dtype.numpy:
            raise DTypeError(f"argument {self.name} has the wrong dtype", expected=self.dtype, received=array.dtype)
        return array


class ArgumentBinder:
    """Binds the arrays of a call to the parameters of a plan."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.params = [PlanParameter(p) for p in plan["params"]]
        self.written, self.read = set(plan["written"]), set(plan["read"])
        self.inputs = [i for i, p in enumerate(self.params) if not p.output]
        self._written_inputs = [i for i in self.inputs if i in self.written]
        self._outputs = [i for i, p in enumerate(self.params) if p.output]
        self.reused = {result: argument for result, argument in plan.get("reused", ())}
        # A donated argument shares its memory with no other.
        self.aliasable = [i for i in self._written_inputs if i not in set(self.reused.values())]
        # Outputs that kernels read before they write them, as atomics do: their memory must hold zeros.
        self.zeroed = tuple(i for i in self._outputs if i in self.read)

    def bind(self, arrays: Sequence[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """For each parameter the user's array or a new one, and the contiguous array that kernels use.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays do not match the parameters.
        """
        if len(arrays) != len(self.inputs):
            raise ArgumentError("wrong number of arguments", expected=len(self.inputs), received=len(arrays))
        remaining = iter(arrays)
        users: list[Any] = [
            (p.allocate(zeroed=i in self.read) if i not in self.reused else None)
            if p.output
            else p.convert(next(remaining))
            for i, p in enumerate(self.params)
        ]
        all_plain = True
        for array in users:
            if array is not None:
                flags = array.flags
                all_plain = all_plain and flags.c_contiguous and flags.aligned
        for result, argument in self.reused.items():
            users[result] = users[argument]
        bound = users if all_plain else [make_contiguous(a) for a in users]
        if self.aliasable:
            bound = copy_aliased_arguments(bound, self.aliasable, self.inputs)
        return users, bound

    def finish(self, users: list[np.ndarray], bound: list[np.ndarray]) -> list[np.ndarray]:
        """Copy results back to arrays that were bound by copy; the outputs."""
        for i in self._written_inputs:
            if bound[i] is not users[i]:
                users[i][...] = bound[i]
        return [users[self.reused.get(i, i)] for i in self._outputs]


def make_contiguous(array: np.ndarray) -> np.ndarray:
    """The array itself if it is aligned and row-major contiguous, else a copy that is."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.array(array, order="C")


def copy_aliased_arguments(arrays: list[np.ndarray], written: Sequence[int], given: Sequence[int]) -> list[np.ndarray]:
    """The arrays, with a copy of each read-only one that shares memory with a written one; `given` are the caller's.

    Raises:
        ArgumentError: two written arrays share memory.
    """
    bound = arrays
    for i in written:
        for j in given:
            if i == j or not np.may_share_memory(arrays[i], arrays[j]):
                continue
            if j in written:
                raise ArgumentError(
                    f"arguments {i} and {j} are both written and share memory", suggestion="pass a copy of one of them"
                )
            bound = [*bound[:j], arrays[j].copy(), *bound[j + 1 :]]
    return bound


# Executing a plan: one walk over its steps for every target, which supplies an engine.

PlanSteps = Sequence[Mapping[str, Any]]


@dataclass
class PlanEngine(ABC):
    """What a target does for a plan's steps; `loop_indices` holds the current index of each loop."""

    loop_indices: dict[int, int] = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def launch(self, first: int, last: int) -> None:
        """Run the launches from `first` to before `last`."""

    @abstractmethod
    def holds(self, flag: int) -> bool:
        """Whether a flag is true."""

    @abstractmethod
    def call(self, number: int) -> None:
        """Run an op on the host."""

    def start(self, first: int, last: int) -> None:
        """Start the collectives from `first` to before `last`; one that cannot be started runs to its end."""
        for number in range(first, last):
            self.call(number)

    def wait(self, number: int) -> None:  # noqa: B027  # nothing to wait for where `start` runs calls to their end
        """Wait for a collective that was started."""

    def set_loop_index(self, loop: int, index: int) -> None:
        """Set the index of a loop before each of its iterations."""
        self.loop_indices[loop] = index

    def find_offset(self, argument: Mapping[str, Any]) -> int:
        """The byte offset of an argument in its parameter or in the workspace, at the current loop indices."""
        offset, moves = argument.get("offset", 0), argument.get("moves")
        return offset + sum(self.loop_indices[loop] * count for loop, count in moves) if moves else offset


@dataclass
class ArrayPlanEngine(PlanEngine):
    """An engine on NumPy arrays: those bound to the parameters, and the workspace."""

    plan: Mapping[str, Any]
    arrays: list[Any]
    workspace: np.ndarray
    pending: dict[int, Callable[[], None]] = field(default_factory=dict, kw_only=True)

    def holds(self, flag: int) -> bool:
        """Whether a flag is true."""
        return bool(self._view_bytes(self.plan["flags"][flag])[0])

    def call(self, number: int) -> None:
        """Run an op on the host."""
        run_host_call(*self._find_call(number))

    def start(self, first: int, last: int) -> None:
        """Start collectives."""
        for number in range(first, last):
            self.pending[number] = start_host_call(*self._find_call(number))

    def wait(self, number: int) -> None:
        """Wait for a collective that was started."""
        self.pending.pop(number)()

    def _find_call(self, number: int) -> tuple[Mapping[str, Any], list[np.ndarray]]:
        call = self.plan["calls"][number]
        return call, [view_as_array(self._view_bytes(a), a) for a in call["args"]]

    def argument(self, argument: Mapping[str, Any]) -> Any:
        """The value bound to a parameter, or the bytes of a slice of a parameter or of the workspace."""
        if "value" in argument:
            return argument["value"]
        whole = self.workspace if "param" not in argument else self.arrays[argument["param"]]
        if "param" in argument and "moves" not in argument:
            return whole
        start = self.find_offset(argument)
        return whole.reshape(-1).view(np.uint8)[start : start + argument["bytes"]]

    def _view_bytes(self, argument: Mapping[str, Any]) -> np.ndarray:
        return np.ravel(self.argument(argument)).view(np.uint8)


def find_steps(plan: Mapping[str, Any]) -> PlanSteps:
    """The steps of a plan; without control flow they are one run of all launches."""
    return plan.get("steps") or [{"run": [0, len(plan["launches"])]}]


def list_steps(steps: PlanSteps) -> Iterator[Mapping[str, Any]]:
    """Every step, and those inside of loops and branches."""
    for step in steps:
        yield step
        for name in ("test", "body", "then", "else"):
            yield from list_steps(step.get(name, ()))


def find_overlapped_launches(steps: PlanSteps) -> set[int]:
    """The launches that run beside a collective: between its start and its wait."""
    found: set[int] = set()
    started: set[int] = set()
    for step in steps:
        started = (started | set(range(*step.get("start", (0, 0))))) - {step.get("wait", -1)}
        for name in ("test", "body", "then", "else"):
            found |= find_overlapped_launches(step.get(name, ()))
        if started:
            found.update(n for inner in list_steps([step]) for n in range(*inner.get("run", (0, 0))))
    return found


def execute_plan(steps: PlanSteps, engine: PlanEngine) -> None:
    """Execute steps in order."""
    for step in steps:
        _EXECUTORS[next(k for k in step if k in _EXECUTORS)](step, engine)


def _execute_launches(step: Mapping[str, Any], engine: PlanEngine) -> None:
    engine.launch(*step["run"])


def _execute_call(step: Mapping[str, Any], engine: PlanEngine) -> None:
    engine.call(step["call"])


def _execute_start(step: Mapping[str, Any], engine: PlanEngine) -> None:
    engine.start(*step["start"])


def _execute_wait(step: Mapping[str, Any], engine: PlanEngine) -> None:
    engine.wait(step["wait"])


def _execute_agreement(step: Mapping[str, Any], engine: PlanEngine) -> None:
    agree_on_order(step["agree"])


def _execute_loop(step: Mapping[str, Any], engine: PlanEngine) -> None:
    for iteration in range(step["count"]):
        engine.set_loop_index(step["loop"], step["first"] + iteration * step["step"])
        execute_plan(step["body"], engine)


def _execute_while(step: Mapping[str, Any], engine: PlanEngine) -> None:
    execute_plan(step["test"], engine)
    while engine.holds(step["while"]):
        execute_plan(step["body"], engine)
        execute_plan(step["test"], engine)


def _execute_if(step: Mapping[str, Any], engine: PlanEngine) -> None:
    execute_plan(step["then" if engine.holds(step["if"]) else "else"], engine)


_EXECUTORS: Mapping[str, Callable[[Mapping[str, Any], PlanEngine], None]] = {
    "run": _execute_launches, "call": _execute_call, "loop": _execute_loop, "while": _execute_while, "if": _execute_if,
    "start": _execute_start, "wait": _execute_wait, "agree": _execute_agreement,
}  # fmt: skip


# Checking a plan that was read from a file: the sizes, indices and offsets that memory accesses rely on.


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_COUNT


def _is_pair(value: Any) -> bool:
    return is_list(is_count)(value) and len(value) == 2


def _is_order(value: Any) -> bool:
    """Whether a value is a list of groups, and a digest."""
    pair = isinstance(value, list) and len(value) == 2
    return pair and is_list(is_list(is_count))(value[0]) and is_text(value[1])


_is_argument = has_fields()
_PLAN_FIELDS: dict[str, FieldCheck] = {
    "params": is_list(has_fields(name=is_text, shape=is_list(is_count), dtype=is_text, role=is_text)),
    "workspace": is_count,
    "launches": is_list(has_fields(kernel=is_text, grid=is_list(is_count), args=is_list(_is_argument))),
    "scratch": is_table(is_count),
    "written": is_list(is_count),
    "read": is_list(is_count),
}
_OPTIONAL_PLAN_FIELDS: dict[str, FieldCheck] = {
    "steps": is_list(has_fields()),
    "flags": is_list(_is_argument),
    "calls": is_list(
        has_fields(
            op=lambda v: v in REGISTRY, operands=is_count, attrs=has_fields(),
            args=is_list(has_fields(shape=is_list(is_count), dtype=is_text)),
        )
    ),
    "meeting": is_list(is_text),
}  # fmt: skip
_STEP_FIELDS: dict[str, dict[str, FieldCheck]] = {
    "run": {"run": _is_pair},
    "call": {"call": is_count},
    "start": {"start": _is_pair},
    "wait": {"wait": is_count},
    "agree": {"agree": is_list(_is_order)},
    "loop": {"loop": is_count, "first": _is_whole, "step": _is_whole, "count": is_count, "body": is_list(has_fields())},
    "while": {"while": is_count, "test": is_list(has_fields()), "body": is_list(has_fields())},
    "if": {"if": is_count, "then": is_list(has_fields()), "else": is_list(has_fields())},
}


def check_plan(plan: Any, max_bytes: int, max_programs: int) -> None:
    """Check a plan of a loaded artifact: its fields, what its indices and offsets refer to, and what it asks for.

    Raises:
        ArtifactError: a field is missing, or refers to what does not exist.
        ResourceError: it asks for more than `max_bytes` of memory, or launches more than `max_programs` programs.
    """
    check_fields(plan if isinstance(plan, dict) else {}, _PLAN_FIELDS, "the plan")
    check_fields(plan, {k: check for k, check in _OPTIONAL_PLAN_FIELDS.items() if k in plan}, "the plan")
    _PlanChecker(plan).check()
    needed = plan["workspace"] + sum(_count_parameter_bytes(p) for p in plan["params"] if p["role"] == "output")
    programs = max((math.prod(e["grid"]) for e in plan["launches"]), default=0)
    for what, found, most in (
        ("bytes of memory", max([needed, *plan["scratch"].values()]), max_bytes),
        ("programs in a launch", programs, max_programs),
    ):
        if found > most:
            raise ResourceError(
                f"the artifact asks for {found:,} {what}", expected=f"at most {most:,}",
                suggestion="give tessera.load a larger limit if you trust the artifact",
            )  # fmt: skip


def _count_parameter_bytes(parameter: Mapping[str, Any]) -> int:
    return math.prod(parameter["shape"]) * as_dtype(parameter["dtype"]).numpy.itemsize


class _PlanChecker:
    """One walk over a plan that was read from a file; `extents` holds the least and greatest index of each loop."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan = plan
        self.extents: dict[int, tuple[int, int]] = {}

    def check(self) -> None:
        """Check every part of the plan; each refers to parts that were checked before it."""
        plan = self.plan
        for p in plan["params"]:
            self.expect(p["dtype"] in DTYPE_NAMES and p["role"] in ("input", "output", "scalar"), p)
        self.expect(all(i < len(plan["params"]) for i in (*plan["written"], *plan["read"])), plan["written"])
        try:
            self.check_steps(plan.get("steps", []))
        except RecursionError:
            self.expect(False, "steps that nest too deep")
        launches = plan["launches"]
        self.expect(all(e["kernel"] in plan["scratch"] for e in launches) or not plan["scratch"], plan["scratch"])
        for launch in launches:
            self.expect(len(launch["grid"]) == 3, launch)
            self.check_arguments(launch["args"])
        self.check_arguments(plan.get("flags", []))
        for call in plan.get("calls", []):
            self.expect(all(a["dtype"] in DTYPE_NAMES for a in call["args"]), call)
            self.check_arguments([{**a, "bytes": _count_parameter_bytes(a)} for a in call["args"]])

    def check_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Check steps: a kind that exists, its fields, and what they refer to."""
        started: set[int] = set()
        for step in steps:
            kind = next((k for k in step if k in _STEP_FIELDS), "")
            self.expect(kind != "", step)
            check_fields(step, _STEP_FIELDS[kind], "a step of the plan")
            first, last = step["run"] if kind == "run" else (0, 0)
            self.expect(first <= last <= len(self.plan["launches"]), step)
            self.expect(kind != "call" or step["call"] < len(self.plan.get("calls", [])), step)
            begun = range(*step["start"]) if kind == "start" else range(0)
            self.expect(begun.stop <= len(self.plan.get("calls", [])), step)
            self.expect(kind != "wait" or step["wait"] in started, step)
            started = (started | {*begun}) - {step.get("wait", -1)}
            self.expect(kind not in ("while", "if") or step[kind] < len(self.plan.get("flags", [])), step)
            if kind == "loop":
                ends = step["first"], step["first"] + max(step["count"] - 1, 0) * step["step"]
                self.extents[step["loop"]] = min(ends), max(ends)
            for name in ("body", "test", "then", "else"):
                self.check_steps(step.get(name, []))

    def check_arguments(self, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Check that every argument lies in a parameter or in the workspace, at each index of the loops."""
        for a in arguments:
            if set(a) == {"value"}:
                self.expect(is_count(a["value"]), a)
                continue
            moves = a.get("moves", [])
            self.expect(is_list(is_list(_is_whole))(moves) and all(len(m) == 2 for m in moves), a)
            self.expect(all(m[0] in self.extents for m in moves), a)
            self.expect(all(is_count(a[k]) for k in ("param", "offset", "bytes") if k in a), a)
            self.expect("param" in a or ("offset" in a and "bytes" in a), a)
            self.expect(a.get("param", -1) < len(self.plan["params"]), a)
            low, high = a.get("offset", 0), a.get("offset", 0) + a.get("bytes", 0)
            ends = [sorted(count * index for index in self.extents[loop]) for loop, count in moves]
            room = _count_parameter_bytes(self.plan["params"][a["param"]]) if "param" in a else self.plan["workspace"]
            self.expect(low + sum(e[0] for e in ends) >= 0 and high + sum(e[1] for e in ends) <= room, a)

    def expect(self, valid: bool, part: Any) -> None:
        """Raise where a part of the plan is not valid."""
        if not valid:
            raise ArtifactError(
                "the plan refers to what does not exist", received=repr(part)[:200],
                suggestion="build the artifact again",
            )  # fmt: skip


# Host calls: ops that no kernel computes; NumPy runs them on the memory of the program.


def view_memory(address: int, argument: Mapping[str, Any]) -> np.ndarray:
    """The bytes of an argument at an address."""
    count = math.prod(argument["shape"]) * as_dtype(argument["dtype"]).numpy.itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8) if count else np.empty(0, np.uint8)


def view_as_array(memory: np.ndarray, argument: Mapping[str, Any]) -> np.ndarray:
    """Bytes as an array of an argument's shape and dtype."""
    dtype = as_dtype(argument["dtype"]).numpy
    count = math.prod(argument["shape"]) * dtype.itemsize
    return memory[:count].view(dtype).reshape(argument["shape"])


def start_host_call(call: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Callable[[], None]:
    """Start a collective on the first array; what is returned waits for its result, and writes the second."""
    given, out = arrays
    attrs = {k: v for k, v in call["attrs"].items() if k != "site"}
    pending = start_exchange(call["op"].removeprefix("ts."), given, attrs, call["attrs"].get("site", ""))

    def finish() -> None:
        out[...] = pending.wait()

    return finish


def run_host_call(call: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
    """Run an op: the first arrays are its operands, the rest receive its results."""
    op, operands = REGISTRY[call["op"]], call["operands"]
    types = [TensorType(tuple(a["shape"]), as_dtype(a["dtype"])) for a in call["args"]]
    try:
        results = op.execute(tuple(types[:operands]), tuple(types[operands:]), call["attrs"], list(arrays[:operands]))
    except TesseraError as error:  # a singular matrix: the line of the program that asks for the op
        raise error.at(Location(*call["place"]) if isinstance(call.get("place"), list) else UNKNOWN) from None
    for target, result in zip(arrays[operands:], results, strict=True):
        target[...] = result
