"""Following a launch plan: runs of launches, and the loops and branches of the host around them.

A plan's steps are data that JSON can hold: `{"run": [first, last]}` for launches one after the other,
`{"call": number}` for an op that NumPy runs, `{"loop": number, "first": …, "step": …, "count": …, "body": steps}`,
`{"while": flag, "test": steps, "body": steps}` and `{"if": flag, "then": steps, "else": steps}`. A flag is the number
of a place that holds a bool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Steps = Sequence[Mapping[str, Any]]


class Engine(Protocol):
    """What runs launches."""

    def launch(self, first: int, last: int) -> None:
        """Run the launches from `first` to before `last`."""

    def holds(self, flag: int) -> bool:
        """Whether a flag is set."""

    def turn(self, loop: int, index: int) -> None:
        """A loop has come to an index."""


def follow(steps: Steps, engine: Engine) -> None:
    """Run steps in order."""
    for step in steps:
        _KINDS[next(k for k in step if k in _KINDS)](step, engine)


def _run(step: Mapping[str, Any], engine: Engine) -> None:
    engine.launch(*step["run"])


def _call(step: Mapping[str, Any], engine: Any) -> None:
    engine.call(step["call"])  # a generator without such calls refuses them when it emits


def _loop(step: Mapping[str, Any], engine: Engine) -> None:
    for number in range(step["count"]):
        engine.turn(step["loop"], step["first"] + number * step["step"])
        follow(step["body"], engine)


def _while(step: Mapping[str, Any], engine: Engine) -> None:
    follow(step["test"], engine)
    while engine.holds(step["while"]):
        follow(step["body"], engine)
        follow(step["test"], engine)


def _if(step: Mapping[str, Any], engine: Engine) -> None:
    follow(step["then" if engine.holds(step["if"]) else "else"], engine)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Engine], None]] = {
    "run": _run, "call": _call, "loop": _loop, "while": _while, "if": _if,
}  # fmt: skip
