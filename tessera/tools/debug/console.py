"""Debugger console: the prompt, its scripts, and the commands. A command that resumes the run returns a goal."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, TesseraError
from tessera.core.pytree import flatten
from tessera.tools.debug import breakpoints, formatting, provenance
from tessera.tools.debug.breakpoints import Goal
from tessera.tools.debug.history import HistoryStep, named_values, variables_at
from tessera.tools.debug.provenance import trace_back
from tessera.tools.debug.stepper import Stepper

# The debugger's prompt: commands from a script, then from the terminal, and what they answer.


PROMPT = "(tessera) "


class DebuggerQuit(Exception):
    """The user has left the debugger; the run ends."""

    def __str__(self) -> str:
        return "the debugger was left with `quit`"


def split_script(script: str) -> list[str]:
    """The commands of a script: one a line or between semicolons, without comments.

    >>> split_script("break 12; continue  # there\\nprint x")
    ['break 12', 'continue', 'print x']
    """
    lines = (line.partition("#")[0] for line in script.splitlines())
    return [c.strip() for line in lines for c in line.split(";") if c.strip()]


class Console:
    """One debugging session: a stepper, where its commands come from, and where answers go.

    Without a script, commands come from standard input. With a script, they come only from the script. After the last
    command the program continues to its end.
    """

    def __init__(self, script: Sequence[str] | None = None, write: Callable[[str], Any] | None = None) -> None:
        self.script = None if script is None else list(script)
        self.write = write or (lambda text: print(text, flush=True))
        self.stepper = Stepper(self._stopped)
        self.frame = 0  # how many frames up the view is
        self._again = ""

    @property
    def step(self) -> HistoryStep:
        """The current step."""
        assert self.stepper.step is not None
        return self.stepper.step

    @property
    def line(self) -> HistoryStep:
        """The current line of the selected frame."""
        calls = self.step.calls or (self.step,)
        return calls[max(0, len(calls) - 1 - self.frame)]

    def evaluate(self, text: str) -> Any:
        """Evaluate an expression over the variables of the selected frame.

        Raises:
            ArgumentError: there is none.
        """
        if not text:
            raise ArgumentError("an expression is missing", expected="a variable, or Python over variables: x.max()")
        return self.stepper.evaluate(text, self.step, self.stepper.instance, self.line)

    def _stopped(self, reason: str) -> Goal | None:
        self.frame = 0
        if reason:
            self.write(reason)
        self.where()
        while True:
            command = self._read()
            if command is None:
                self.stepper.detached = True
                return None
            goal = self._answer(command)
            if goal is not None or self.stepper.detached:
                return goal

    def where(self) -> None:
        """Show the current position."""
        if self.stepper.over and self.step is self.stepper.history.steps[-1]:
            return
        self.write(formatting.format_position(self.step, self.stepper.instance, self.line))
        inside = not self.frame and not self.step.starts and not formatting.is_debug_mark(self.step.node)
        self.write(
            formatting.format_op_in_line(self.step.node) if inside else formatting.format_source(self.line.node.loc)
        )

    def _answer(self, command: str) -> Goal | None:

        name, _, rest = command.partition(" ")
        try:
            return find_command(name)(self, rest.strip())
        except DebuggerQuit:
            raise
        except TesseraError as error:
            self.write(str(error))
        except Exception as error:  # the user's expression may raise anything
            self.write(f"{type(error).__name__}: {error}")
            if isinstance(error, NameError):
                self.write(f"  expected: {', '.join(n for n, _, _ in named_values(self.line))}")
        return None

    def _read(self) -> str | None:
        """The next command; None when there are no more."""
        if self.script is not None:
            if not self.script:
                return None
            command = self.script.pop(0)
            self.write(PROMPT + command)
            return command
        try:
            typed = self._typed()
        except EOFError:
            return None
        self._again = typed or self._again
        return self._again or "help"

    def _typed(self) -> str:
        """Read a line from the terminal; an interrupt asks again."""
        _enable_line_editing()
        while True:
            try:
                return input(PROMPT).strip()
            except KeyboardInterrupt:
                self.write("")


@cache
def _enable_line_editing() -> None:
    """Enable line editing and history, where readline exists."""
    with suppress(ImportError):
        import_module("readline")


def normalise_commands(commands: str | Sequence[str] | None) -> list[str] | None:
    """Commands as they are given to a session: a script, or a list of them; None for those of the terminal.

    Raises:
        ArgumentError: there is no such command.
    """

    if commands is None:
        return None
    return validate_script(split_script(commands) if isinstance(commands, str) else list(commands))


Command = Callable[[Console, str], Goal | None]
COMMANDS: dict[str, Command] = {}
HELP: list[tuple[str, str]] = []
_MAX_LISTED = 16  # instances that `all` shows


def command(names: str, usage: str, text: str) -> Callable[[Command], Command]:
    """Register a command: its names, usage and help."""

    def add(function: Command) -> Command:
        known = function if usage else _refuse_arguments(names.split()[0], function)
        COMMANDS.update(dict.fromkeys(names.split(), known))
        HELP.append((f"{names.replace(' ', ', ')}{' ' if usage else ''}{usage}", text))
        return function

    return add


def _refuse_arguments(name: str, function: Command) -> Command:
    """A command that takes nothing: an argument is an error, and not left unread."""

    def run(console: Console, rest: str) -> Goal | None:
        if rest:
            raise ArgumentError(f"`{name}` takes nothing", received=rest,
                                suggestion="`op N` runs N ops" if name in ("step", "next") else None)  # fmt: skip
        return function(console, rest)

    return run


def _parse_count(text: str) -> int:
    """The number of a command, 1 where there is none.

    Raises:
        ArgumentError: it is no whole number from 1 on.
    """
    if text and not (text.isdecimal() and int(text)):
        raise ArgumentError("this is no number of ops", expected="a whole number from 1 on", received=text)
    return int(text or 1)


def find_command(name: str) -> Command:
    """Find a command by name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise ArgumentError(
            f"there is no command `{name}`", expected=", ".join(usage.split(",")[0].split()[0] for usage, _ in HELP),
            suggestion=f"did you mean `{near[0]}`?" if near else "help",
        )  # fmt: skip
    return COMMANDS[name]


def validate_script(script: Sequence[str]) -> list[str]:
    """Check that every command of a script exists, before anything runs.

    Raises:
        ArgumentError: there is no such command.
    """
    for line in script:
        if line:
            find_command(line.split()[0])
    return list(script)


@command("help h ?", "", "this list")
def _(console: Console, rest: str) -> None:
    width = max(len(usage) for usage, _ in HELP)
    for usage, text in HELP:
        console.write(f"  {usage:<{width}}  {text}")


@command("step s", "", "go to the next line, into functions that it calls")
def _(console: Console, rest: str) -> Goal:
    return breakpoints.until_next_line(console.step)


@command("next n", "", "go to the next line of this function")
def _(console: Console, rest: str) -> Goal:
    return breakpoints.until_next_line_here(console.step)


@command("op o", "[N]", "run one op, or N")
def _(console: Console, rest: str) -> Goal:
    return breakpoints.until_ops_run(console.step, _parse_count(rest))


@command("return r", "", "run until this function has returned")
def _(console: Console, rest: str) -> Goal:
    return breakpoints.until_return(console.step)


@command("continue c", "", "run to the next breakpoint, watched change or error")
def _(console: Console, rest: str) -> Goal:
    return breakpoints.until_stopped(console.step)


REVERSE_GOALS = {
    "line": breakpoints.until_next_line,
    "next": breakpoints.until_next_line_here,
    "return": breakpoints.until_return,
    "continue": breakpoints.until_stopped,
}


@command("back", "[line | next | return | continue | op N]", "the same, backwards")
def _(console: Console, rest: str) -> None:
    kind, _, count = rest.partition(" ")
    if kind == "op":
        goal = breakpoints.until_ops_run(console.step, _parse_count(count))
    elif (kind or "line") in REVERSE_GOALS:
        goal = REVERSE_GOALS[kind or "line"](console.step)
    else:
        raise ArgumentError(f"back `{kind}`", expected=f"{', '.join(REVERSE_GOALS)} or op")
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
        points.append(breakpoints.parse_breakpoint(1 + max((p.number for p in points), default=0), rest))
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
    found = breakpoints.Watchpoint(rest)
    found.changed(console.evaluate(rest))
    console.stepper.watches.append(found)
    console.write(f"watching {rest} = {found.last}")


@command("print p", "EXPRESSION", "a value as this program sees it, with statistics, and the mask it was loaded under")
def _(console: Console, rest: str) -> None:
    held = console.evaluate(rest)
    for name, leaf in flatten(held, rest)[0]:
        console.write(f"{name} = {formatting.format_value(leaf)}")
    found = next((seen for name, _, seen in named_values(console.line) if name == rest), None)
    mask = None if found is None else provenance.describe_load_mask(console.stepper.history, console.step, found)
    if mask:
        console.write(mask)


@command("stats", "EXPRESSION", "statistics of a value")
def _(console: Console, rest: str) -> None:
    console.write(formatting.format_statistics(np.asarray(console.evaluate(rest))))


@command("bound", "NAME", "a variable with how far any legal evaluation may lie from it")
def _(console: Console, rest: str) -> None:
    console.write(f"{rest} = {formatting.format_bounded(provenance.show_bound(console, rest))}")


@command("trace_back", "NAME", "where a variable's NaN or infinity comes from")
def _(console: Console, rest: str) -> None:
    held = next((seen for name, _, seen in named_values(console.line) if name == rest), None)
    if held is None:
        raise ArgumentError(
            f"`{rest}` is no variable here" if rest else "a variable is missing",
            expected=", ".join(n for n, _, _ in named_values(console.line)),
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
        if len(values) < _MAX_LISTED:
            text = np.array2string(held, threshold=8, separator=", ")
            console.write(f"{formatting.format_instance(step, instance)}: {text}")
        values.append(held)
    if len(values) > _MAX_LISTED:
        console.write(f"and {len(values) - _MAX_LISTED} more")
    console.write(formatting.format_statistics(np.stack(values)))


@command("locals", "", "every variable of this function")
def _(console: Console, rest: str) -> None:
    found = variables_at(console.stepper.history, console.step, console.line, console.stepper.instance)
    for name, held in flatten(found)[0]:
        array = np.asarray(held)
        whole = not isinstance(held, (np.ndarray, np.generic)) or array.size <= 8
        text = (
            formatting.format_value(held)
            if not array.ndim
            else np.array2string(array, separator=", ")
            if whole
            else formatting.format_statistics(array)
        )
        console.write(f"{name} = {text}")


@command("info i", "", "the op that runs next: its operands, its mask, and which programs run it")
def _(console: Console, rest: str) -> None:
    step = console.step
    if not step.launch.is_graph:
        present = sum(1 for _ in step.instances())
        console.write(f"{present} of {int(np.prod(step.launch.grid)) * step.launch.group} instances are here")
    if formatting.is_debug_mark(step.node):
        console.write("a line is about to begin; `op` goes to its first op")
        return
    console.write(f"op {step.number}: {formatting.format_operation(step.node)}")
    place = step.place(console.stepper.instance)
    for number, (value, held) in enumerate(zip(step.node.args, step.args, strict=True)):
        if place is not None:
            console.write(
                f"operand {number}: "
                f"{formatting.format_value(provenance.operand_of_instance(console, value, held, place))}"
            )
    mask = formatting.format_mask(step)
    if mask:
        console.write(mask)


@command("list l", "", "the source around here")
def _(console: Console, rest: str) -> None:
    location = console.line.node.loc
    marks = frozenset(p.line for p in console.stepper.breakpoints)
    console.write(formatting.format_source(location, formatting.CONTEXT_LINES, marks))


@command("where bt", "", "the calls that led here, the innermost last")
def _(console: Console, rest: str) -> None:
    calls = console.step.calls
    for line in calls:
        here = ">" if line is console.line else " "
        function = line.node.attrs.get("function", line.launch.function.name)
        console.write(f"{here} {function} at {formatting.format_location(line.node.loc)}")
        console.write(formatting.format_source(line.node.loc))


@command("up u", "", "look at the caller")
def _(console: Console, rest: str) -> None:
    _move_frame(console, 1)


@command("down", "", "look at the function that was called")
def _(console: Console, rest: str) -> None:
    _move_frame(console, -1)


def _move_frame(console: Console, by: int) -> None:
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
    wanted = breakpoints.parse_integers(program) + (
        breakpoints.parse_integers(tile or "0") if started.group > 1 else ()
    )
    room = (*started.grid, started.group) if started.group > 1 else started.grid
    if len(wanted) != len(room) or any(i >= n for i, n in zip(wanted, room, strict=True)):
        raise ArgumentError(f"there is no program `{rest}`" if rest else "a program is missing",
                            expected=f"numbers below {room}, or any")  # fmt: skip
    console.stepper.focus = wanted
    if console.step.place(wanted) is not None:
        console.stepper.instance = wanted
        console.where()
    else:
        console.write(
            f"{formatting.format_instance(console.step, wanted)} is not here; `continue` or `next` goes to where it is"
        )


@command("quit q", "", "end the run")
def _(console: Console, rest: str) -> Any:
    raise DebuggerQuit()
