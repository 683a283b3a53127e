"""Runtime verification of numerics: `@ts.verify.numerics(stable=True, bounded=[-100, 100])`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.errors import ArgumentError, ExecutionError, Location, NonFiniteError, OutOfBoundsError, user_location
from tessera.core.types import as_dtype
from tessera.frontend.jit.tracing import Jit
from tessera.frontend.kernel.kernel_function import Kernel
from tessera.interp import host
from tessera.interp.bound import describe_non_finite
from tessera.interp.tile import op_rules
from tessera.interp.tile.interpreter import choose_chunk_shape, find_written_params, wrap_argument
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory, expand_block_axes
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Function, Node
from tessera.runtime.program import PreparedProgram, prepare


@dataclass(frozen=True)
class NumericsRule:
    """What values may be: with `stable` no NaN and no infinity of finite operands; finite ones from `low` to `high`."""

    stable: bool
    low: float
    high: float

    def check(self, what: str, value: Any, place: Location, fresh: bool = True) -> None:
        """Refuse an array of floats that breaks this rule; infinities count where they are `fresh`.

        Raises:
            NonFiniteError, ExecutionError: it does; the error names `what`, the first element and the place.
        """
        if not isinstance(value, np.ndarray) or value.dtype.kind in "biu" or not as_dtype(value.dtype).is_float:
            return
        held = value.astype(np.float64)
        wrong = (np.isnan(held) | (np.isinf(held) & fresh)) & self.stable
        if wrong.any():
            first = [int(i) for i in np.argwhere(wrong)[0]]
            raise NonFiniteError(
                f"{what} gives {held[wrong][0]}", location=place, expected="finite numbers",
                received=f"{describe_non_finite(np.where(wrong, held, 0.0))}, the first at {first}",
            )  # fmt: skip
        outside = np.isfinite(held) & ((held < self.low) | (held > self.high))
        if outside.any():
            found = f"{held[outside][0]:g} ({int(outside.sum())} of {held.size} elements are outside)"
            raise ExecutionError(
                f"{what} leaves its bounds", location=place, expected=f"{self.low:g} to {self.high:g}", received=found
            )

    def node(self, node: Node, args: Sequence[Any], results: Sequence[Any], live: Any = None) -> None:
        """Check what a node gives; ops with regions have had their inner ones checked."""
        if node.regions:
            return
        known = all(np.isfinite(a).all() for a in args if isinstance(a, np.ndarray) and a.dtype.kind not in "biu")
        fresh = known and bool(args) and not any(isinstance(a, InstanceMemory) for a in args)
        for value in results:
            if isinstance(value, np.ndarray) and live is not None:
                value = np.where(expand_block_axes(live, value.ndim - live.ndim), value, np.zeros((), value.dtype))
            self.check(node.op.name, value, node.loc, fresh)


class VerifiedEntry:
    """A kernel or jit function whose calls are checked by a rule first; see `numerics`."""

    def __init__(self, entry: Kernel | Jit, rule: NumericsRule, grid: Any = None, group: int | None = None) -> None:
        functools.update_wrapper(self, entry)
        self.entry, self.rule, self.grid, self.group = entry, rule, grid, group

    def __getitem__(self, item: Any) -> VerifiedEntry:
        launch = self.entry[item]  # type: ignore[index]
        return VerifiedEntry(self.entry, self.rule, launch.grid, launch.group)

    def __call__(self, *args: Any, **named: Any) -> Any:
        program, call = self._prepared(args, named)
        target = self.entry.target if isinstance(self.entry, Jit) else self.entry.options.target
        if find_generator_name(target or default_device()) == INTERP:
            _interpret_checked(program, self.rule)
            return call(*args, **named)
        found = call(*args, **named)
        written = [program.arrays[i] for i in program.written]
        listed = found if isinstance(found, tuple) else () if found is None else (found,)
        try:
            for number, array in enumerate([*map(np.asarray, listed), *written]):
                self.rule.check(f"output {number} of {program.name}", array, user_location())
        except NonFiniteError as error:
            error.suggestion = None if written else _describe_origin(program, self.rule)
            raise
        return found

    def _prepared(self, args: tuple, named: dict[str, Any]) -> tuple[PreparedProgram, Callable[..., Any]]:
        if isinstance(self.entry, Jit):
            return prepare(self.entry, self.entry.signature.bind(*args, **named).arguments), self.entry
        grid, group = self.entry.plan(self.entry.bind(args, named), self.grid, self.group)
        names = dict(zip(self.entry.parameters.signature.parameters, args, strict=False)) | named
        return prepare(self.entry, names, grid=grid, group=group), self.entry[grid, group]


def _describe_origin(program: PreparedProgram, rule: NumericsRule) -> str | None:
    """The op that breaks the rule where the interpreter runs the program, if one does, and its line."""
    try:
        _interpret_checked(program, rule)
    except NonFiniteError as error:
        return f"in the interpreter {error.message} at {error.location}"
    return None


def numerics(*, stable: bool = True, bounded: Sequence[float] | None = None) -> Callable[[Any], VerifiedEntry]:
    """Check the numbers of a kernel or jit function at every call.

    In the interpreter each op's floats are checked on copies of the arrays, before the call itself: the error
    names the first op that breaks the rule and its line, and nothing has been written. On a target the outputs are
    checked after the call. `stable` forbids NaN, and infinities that an op makes of finite operands (one that is
    written down, such as a mask's, is no fault until it is in an output). `bounded=[low, high]` holds for finite
    values, those loaded included.

    Raises:
        ArgumentError: what is decorated is neither, or the bounds are no pair in order.
        NonFiniteError, ExecutionError: at a call, by the rule.

    >>> import tessera as ts
    >>> @numerics(bounded=[-100, 100])
    ... @ts.jit
    ... def scaled(x):
    ...     return ts.exp(x) * 2.0
    >>> scaled(np.zeros(2, np.float32))
    Tensor([2., 2.], f32)
    """
    low, high = (-np.inf, np.inf) if bounded is None else _parse_bounds(bounded)

    def decorated(entry: Any) -> VerifiedEntry:
        if not isinstance(entry, (Kernel, Jit)):
            raise ArgumentError(
                "verify.numerics goes around a kernel or a jit function",
                location=user_location(),
                received=repr(entry),
                suggestion="write @ts.verify.numerics(...) above @ts.kernel or @ts.jit",
            )
        return VerifiedEntry(entry, NumericsRule(stable, low, high))

    return decorated


def _parse_bounds(bounded: Sequence[float]) -> tuple[float, float]:
    listed = [float(b) for b in bounded]
    if len(listed) != 2 or not listed[0] <= listed[1]:
        raise ArgumentError(f"bounded={bounded!r} is no range", location=user_location(), expected="[low, high]")
    return listed[0], listed[1]


def _interpret_checked(program: PreparedProgram, rule: NumericsRule) -> None:
    """Run a program in the interpreter on copies of its arrays, every op and output checked."""
    arrays = [np.array(a, order="C") for a in program.arrays]
    if program.top == "graph":
        function = program.levels["graph"].main

        def mean(node: Node, args: list[Any], walk: Any) -> Any:
            results = node.op.execute(node.types, node.result_types, node.attrs, args)
            rule.node(node, args, results)
            return results

        results = [np.asarray(r) for r in evaluate_block(function.body, arrays, mean)]
    else:
        module = program.levels["tile"]
        function = module.functions[1]
        results = host.run(
            module.main, arrays, lambda n, args: _interpret_launch(function, n.attrs["grid"], args, rule)
        )
    for number, array in enumerate([*results, *(arrays[i] for i in program.written)]):
        rule.check(f"output {number} of {program.name}", array, function.loc)


def _interpret_launch(function: Function, grid: tuple[int, ...], args: Sequence[Any], rule: NumericsRule) -> None:
    """One launch, as the Tile interpreter makes it, with each op's results checked."""
    group = int(function.attrs.get("group", 1))
    box, written = choose_chunk_shape(function, grid, group), find_written_params(function, args)
    for first in itertools.product(*(range(0, n, b) for n, b in zip(grid, box, strict=True))):
        size = tuple(min(b, n - f) for b, n, f in zip(box, grid, first, strict=True))
        machine = TileMachine.of(grid, first, size, group, False)
        pairs = enumerate(zip(function.params, args, strict=True))
        inputs = [wrap_argument(p, a, machine, i in written) for i, (p, a) in pairs]
        try:
            with np.errstate(all="ignore"):
                evaluate_block(function.body, inputs, _checking_meaning(machine, rule))
        except OutOfBoundsError as error:
            raise machine.named(error) from None


def _checking_meaning(machine: TileMachine, rule: NumericsRule) -> Any:
    plain = op_rules.make_evaluator(machine)

    def mean(node: Node, args: list[Any], walk: Any) -> Any:
        results = plain(node, args, walk)
        rule.node(node, args, results, machine.active)
        return results

    return mean
