"""The debugger's commands: each a function of the console and the rest of the line; one that goes on gives a goal."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.debug import replay, show, stops
from tessera.debug.console import Console, Quit
from tessera.debug.origin import trace_back
from tessera.debug.stops import Goal
from tessera.debug.values import names_of, variables
from tessera.errors import ArgumentError
from tessera.pytree import flatten

Command = Callable[[Console, str], Goal | None]
TABLE: dict[str, Command] = {}
HELP: list[tuple[str, str]] = []
_MOST = 16  # instances shown by `all`


def command(names: str, usage: str, text: str) -> Callable[[Command], Command]:
    """Give a command its names, how it is typed, and what it does."""

    def add(function: Command) -> Command:
        TABLE.update(dict.fromkeys(names.split(), function))
        HELP.append((f"{names.replace(' ', ', ')}{' ' if usage else ''}{usage}", text))
        return function

    return add


def find(name: str) -> Command:
    """The command of this name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, 1)
        raise ArgumentError(
            f"there is no command `{name}`", expected=", ".join(usage.split(",")[0].split()[0] for usage, _ in HELP),
            suggestion=f"did you mean `{near[0]}`?" if near else "help",
        )  # fmt: skip
    return TABLE[name]


def known(script: Sequence[str]) -> list[str]:
    """A script all of whose commands there are: one that asks for another is refused before anything runs.

    Raises:
        ArgumentError: there is no such command.
    """
    for line in script:
        if line:
            find(line.split()[0])
    return list(script)


@command("help h ?", "", "this list")
def _(console: Console, rest: str) -> None:
    width = max(len(usage) for usage, _ in HELP)
    for usage, text in HELP:
        console.write(f"  {usage:<{width}}  {text}")


@command("step s", "", "go to the next line, into functions that it calls")
def _(console: Console, rest: str) -> Goal:
    return stops.next_line(console.step)


@command("next n", "", "go to the next line of this function")
def _(console: Console, rest: str) -> Goal:
    return stops.over(console.step)


@command("op o", "[N]", "run one op, or N")
def _(console: Console, rest: str) -> Goal:
    return stops.ops(console.step, int(rest or 1))


@command("return r", "", "run until this function has returned")
def _(console: Console, rest: str) -> Goal:
    return stops.out(console.step)


@command("continue c", "", "run to the next breakpoint, watched change or error")
def _(console: Console, rest: str) -> Goal:
    return stops.never(console.step)


BACKWARDS = {"line": stops.next_line, "next": stops.over, "return": stops.out, "continue": stops.never}


@command("back", "[line | next | return | continue | op N]", "the same, backwards")
def _(console: Console, rest: str) -> None:
    kind, _, count = rest.partition(" ")
    if kind == "op":
        goal = stops.ops(console.step, int(count or 1))
    elif (kind or "line") in BACKWARDS:
        goal = BACKWARDS[kind or "line"](console.step)
    else:
        raise ArgumentError(f"back `{kind}`", expected=f"{', '.join(BACKWARDS)} or op")
    reason = console.stepper.back(goal)
    first = console.stepper.first()
    if reason is None and first is not None:
        console.stepper.step = first
        console.write("this is where the recording begins")
    elif reason:
        console.write(reason)
    console.frame = 0
    console.where()


@command("break b", "[[FILE:]LINE [for PROGRAM [tile TILE]] [if CONDITION]]", "stop at a line; without one, list them")
def _(console: Console, rest: str) -> None:
    points = console.stepper.breakpoints
    if rest:
        points.append(stops.parse(1 + max((p.number for p in points), default=0), rest))
    for each in points[-1:] if rest else points:
        console.write(str(each))


@command("delete d", "N", "take breakpoint N away")
def _(console: Console, rest: str) -> None:
    points = console.stepper.breakpoints
    if rest not in [str(p.number) for p in points]:
        raise ArgumentError(
            f"there is no breakpoint {rest}", expected=", ".join(str(p.number) for p in points) or "none are set"
        )
    points[:] = [p for p in points if str(p.number) != rest]


@command("watch w", "EXPRESSION", "stop when its value has changed")
def _(console: Console, rest: str) -> None:
    found = stops.Watched(rest)
    found.changed(console.evaluate(rest))
    console.stepper.watches.append(found)
    console.write(f"watching {rest} = {found.last}")


@command("print p", "EXPRESSION", "a value as this program sees it, with statistics, and the mask it was loaded under")
def _(console: Console, rest: str) -> None:
    held = console.evaluate(rest)
    for name, leaf in flatten(held, rest)[0]:
        console.write(f"{name} = {show.value(leaf)}")
    found = next((seen for name, _, seen in names_of(console.line) if name == rest), None)
    mask = None if found is None else replay.mask_of(console.stepper.history, console.step, found)
    if mask:
        console.write(mask)


@command("stats", "EXPRESSION", "statistics of a value")
def _(console: Console, rest: str) -> None:
    console.write(show.stats(np.asarray(console.evaluate(rest))))


@command("bound", "NAME", "a variable with how far any legal evaluation may lie from it")
def _(console: Console, rest: str) -> None:
    console.write(f"{rest} = {show.bounded(replay.bound(console, rest))}")


@command("trace_back", "NAME", "where a variable's NaN or infinity comes from")
def _(console: Console, rest: str) -> None:
    held = next((seen for name, _, seen in names_of(console.line) if name == rest), None)
    if held is None:
        raise ArgumentError(
            f"`{rest}` is no variable here", expected=", ".join(n for n, _, _ in names_of(console.line))
        )
    if np.isfinite(np.asarray(console.evaluate(rest), np.float64)).all():
        console.write(f"{rest} is finite")
        return
    for line in trace_back(console.stepper.history, console.step, held, console.stepper.instance):
        console.write(line)


@command("fix_suggestion", "", "what to do about the error or finding at which the run has stopped")
def _(console: Console, rest: str) -> None:
    error = console.stepper.error
    console.write("no error has come" if error is None else error.suggestion or "nothing is known to help")


@command("all", "EXPRESSION", "a value in every program that is here")
def _(console: Console, rest: str) -> None:
    step, line = console.step, console.line
    values: list[np.ndarray] = []
    for instance in step.instances():
        held = np.asarray(console.stepper.evaluate(rest, step, instance, line))
        if len(values) < _MOST:
            text = np.array2string(held, threshold=8, separator=", ")
            console.write(f"{show.instance(step, instance)}: {text}")
        values.append(held)
    if len(values) > _MOST:
        console.write(f"and {len(values) - _MOST} more")
    console.write(show.stats(np.stack(values)))


@command("locals", "", "every variable of this function")
def _(console: Console, rest: str) -> None:
    found = variables(console.stepper.history, console.step, console.line, console.stepper.instance)
    for name, held in flatten(found)[0]:
        array = np.asarray(held)
        whole = not isinstance(held, (np.ndarray, np.generic)) or array.size <= 8
        text = (
            show.value(held)
            if not array.ndim
            else np.array2string(array, separator=", ")
            if whole
            else show.stats(array)
        )
        console.write(f"{name} = {text}")


@command("info i", "", "the op that runs next: its operands, its mask, and which programs run it")
def _(console: Console, rest: str) -> None:
    step = console.step
    if not step.launch.is_graph:
        present = sum(1 for _ in step.instances())
        console.write(f"{present} of {int(np.prod(step.launch.grid)) * step.launch.group} instances are here")
    if show.is_mark(step.node):
        console.write("a line is about to begin; `op` goes to its first op")
        return
    console.write(f"op {step.number}: {show.operation(step.node)}")
    place = step.place(console.stepper.instance)
    for number, (value, held) in enumerate(zip(step.node.args, step.args, strict=True)):
        if place is not None:
            console.write(f"operand {number}: {show.value(replay.seen(console, value, held, place))}")
    mask = show.mask(step)
    if mask:
        console.write(mask)


@command("list l", "", "the source around here")
def _(console: Console, rest: str) -> None:
    location = console.line.node.loc
    marks = frozenset(p.line for p in console.stepper.breakpoints)
    console.write(show.source(location, show.AROUND, marks))


@command("where bt", "", "the calls that led here, the innermost last")
def _(console: Console, rest: str) -> None:
    calls = console.step.calls
    for line in calls:
        here = ">" if line is console.line else " "
        function = line.node.attrs.get("function", line.launch.function.name)
        console.write(f"{here} {function} at {show.place(line.node.loc)}")
        console.write(show.source(line.node.loc))


@command("up u", "", "look at the caller")
def _(console: Console, rest: str) -> None:
    _look(console, 1)


@command("down", "", "look at the function that was called")
def _(console: Console, rest: str) -> None:
    _look(console, -1)


def _look(console: Console, by: int) -> None:
    wanted = console.frame + by
    if not 0 <= wanted < max(1, len(console.step.calls)):
        raise ArgumentError("there is no caller beyond this one" if by > 0 else "nothing was called from here")
    console.frame = wanted
    console.where()


@command("focus f", "PROGRAM [tile TILE] | any", "follow one program alone, or all again")
def _(console: Console, rest: str) -> None:
    if rest == "any":
        console.stepper.focus = None
        return
    program, _, tile = rest.partition("tile")
    started = console.step.launch
    if started.is_graph:
        raise ArgumentError("a Graph function has no programs to choose from", suggestion="focus, in a kernel")
    wanted = stops.numbers(program) + (stops.numbers(tile or "0") if started.group > 1 else ())
    room = (*started.grid, started.group) if started.group > 1 else started.grid
    if len(wanted) != len(room) or any(i >= n for i, n in zip(wanted, room, strict=True)):
        raise ArgumentError(f"there is no program `{rest}`", expected=f"numbers below {room}")
    console.stepper.focus = wanted
    if console.step.place(wanted) is not None:
        console.stepper.instance = wanted
        console.where()
    else:
        console.write(f"{show.instance(console.step, wanted)} is not here; `continue` or `next` goes to where it is")


@command("quit q", "", "end the run")
def _(console: Console, rest: str) -> Any:
    raise Quit()
