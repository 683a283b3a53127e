"""The functions of a program: the first, and tasks that go on when what is on its way has come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

FIRST = "compute"
# How many things a task can wait for: one activates it, the other takes its block away.
MOST = 2
# Identifiers of local tasks that both machines have, and the host's copies do not use. WSE-2 takes words of a color as
# a call of the task of that number.
IDENTIFIERS = (*range(8, 21), *range(24, 27))


@dataclass
class Part:
    """A function of the program; one that `awaits` two things is blocked until the second has come."""

    name: str
    lines: list[str] = field(default_factory=list)
    awaits: int = 0

    def called(self) -> str:
        """What lets the task go on: the first of the things it waits for activates it, the second unblocks it."""
        self.awaits += 1
        assert self.awaits <= MOST
        return "activate" if self.awaits == 1 else "unblock"

    def done(self) -> str:
        """What an asynchronous operation says that the task waits for."""
        return f".{{ .async = true, .{self.called()} = {self.name}_id }}"

    def text(self) -> str:
        """The function."""
        head = f"fn {self.name}() void" if self.name == FIRST else f"task {self.name}() void"
        block = [f"  @block({self.name}_id);"] if self.awaits == MOST else []
        return "\n".join([f"{head} {{", *block, *self.lines, "}", ""])

    def binding(self) -> list[str]:
        """What binds it as a task, when the program begins."""
        block = [f"  @block({self.name}_id);"] if self.awaits == MOST else []
        return [f"  @bind_local_task({self.name}, {self.name}_id);", *block]


def numbered(tasks: Sequence[Part], colors: Collection[int]) -> dict[str, int]:
    """The identifiers of tasks, by name; none is a color of the program. Some lack one where there are too few."""
    free = (number for number in IDENTIFIERS if number not in colors)
    return {part.name: number for part, number in zip(tasks, free, strict=False)}


def identifiers(numbers: Mapping[str, int]) -> str:
    """What names the identifiers of tasks."""
    return "".join(f"const {n}_id: local_task_id = @get_local_task_id({number});\n" for n, number in numbers.items())
