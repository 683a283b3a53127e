"""The debugger's prompt: commands from a script, then from the terminal, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

from tessera.debug import show
from tessera.debug.history import Step
from tessera.debug.stepper import Stepper
from tessera.debug.stops import Goal
from tessera.debug.values import names_of
from tessera.errors import ArgumentError, TesseraError

PROMPT = "(tessera) "


class Quit(Exception):
    """The user has left the debugger; the run ends."""

    def __str__(self) -> str:
        return "the debugger was left with `quit`"


def split(script: str) -> list[str]:
    """The commands of a script: one a line or between semicolons, without comments.

    >>> split("break 12; continue  # there\\nprint x")
    ['break 12', 'continue', 'print x']
    """
    lines = (line.partition("#")[0] for line in script.splitlines())
    return [c.strip() for line in lines for c in line.split(";") if c.strip()]


class Console:
    """One debugging session: a stepper, where its commands come from, and where answers go.

    Without a script commands come from the terminal (or what stands in for it); with one they come from it alone.
    Where they end the program runs on by itself.
    """

    def __init__(self, script: Sequence[str] | None = None, write: Callable[[str], Any] | None = None) -> None:
        self.script = None if script is None else list(script)
        self.write = write or (lambda text: print(text, flush=True))
        self.stepper = Stepper(self._stopped)
        self.frame = 0  # how many callers up we look
        self._again = ""

    @property
    def step(self) -> Step:
        """Where the run stands."""
        assert self.stepper.step is not None
        return self.stepper.step

    @property
    def line(self) -> Step:
        """The line in force in the call that is looked at."""
        calls = self.step.calls or (self.step,)
        return calls[max(0, len(calls) - 1 - self.frame)]

    def evaluate(self, text: str) -> Any:
        """An expression over the variables of the call that is looked at.

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
        """Show where the run stands."""
        if self.stepper.over and self.step is self.stepper.history.steps[-1]:
            return
        self.write(show.position(self.step, self.stepper.instance, self.line))
        inside = not self.frame and not self.step.starts and not show.is_mark(self.step.node)
        self.write(show.inside(self.step.node) if inside else show.source(self.line.node.loc))

    def _answer(self, command: str) -> Goal | None:
        from tessera.debug.commands import find

        name, _, rest = command.partition(" ")
        try:
            return find(name)(self, rest.strip())
        except Quit:
            raise
        except TesseraError as error:
            self.write(str(error))
        except Exception as error:  # the user's expression may raise anything
            self.write(f"{type(error).__name__}: {error}")
            if isinstance(error, NameError):
                self.write(f"  expected: {', '.join(n for n, _, _ in names_of(self.line))}")
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
        """A line from the terminal; where the user breaks it off it is asked for again."""
        _edited()
        while True:
            try:
                return input(PROMPT).strip()
            except KeyboardInterrupt:
                self.write("")


@cache
def _edited() -> None:
    """Let lines be edited and called back, where Python can."""
    with suppress(ImportError):
        import_module("readline")


def commands_of(commands: str | Sequence[str] | None) -> list[str] | None:
    """Commands as they are given to a session: a script, or a list of them; None for those of the terminal.

    Raises:
        ArgumentError: there is no such command.
    """
    from tessera.debug.commands import known

    if commands is None:
        return None
    return known(split(commands) if isinstance(commands, str) else list(commands))
