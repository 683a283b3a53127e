"""A program of an element under construction: its arrays, which values share over time, and its statements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.codegen.csl.channels import Channel
from tessera.codegen.csl.descriptors import (
    LONGEST_STRIDE,
    block_size,
    descriptor,
    fitting,
    mover,
    onward,
    replace_axes,
)  # fmt: skip
from tessera.codegen.csl.parts import FIRST, MOST, Part
from tessera.codegen.csl.views import SPELLING, Buffer, View, merged, row_major, spelled
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node, Value
from tessera.types import TensorType

# What the memory of an element holds, and what of it arrays may fill: code and the stack need the rest.
MEMORY, ROOM = 48 * 1024, 40 * 1024


@dataclass
class Element:
    """The text of one program, which every element of the mesh runs, and where its values lie."""

    grid: tuple[int, int]
    wide: bool = False  # whether it is of a WSE-3, whose operations take more elements a cycle
    fuses: bool = True  # whether chains of pointwise ops become one loop
    sparing: bool = False  # whether room is worth more than cycles
    relays: bool = True  # whether elements in turn tell all along an axis through the last; else neighbours hand on
    buffers: list[Buffer] = field(default_factory=list)
    values: dict[Value, View] = field(default_factory=dict)
    symbols: dict[Value, Buffer] = field(default_factory=dict)  # what the host copies in and out
    exported: dict[Value, str] = field(default_factory=dict)  # and by which names
    functions: dict[str, str] = field(default_factory=dict)  # helpers, by name
    faults: list[dict[str, Any]] = field(default_factory=list)  # what may go wrong, for the host
    constants: dict[str, str] = field(default_factory=dict)  # names of descriptors, by their texts
    channels: dict[str, Channel] = field(default_factory=dict)  # on which it talks, by name
    spare: list[Buffer] = field(default_factory=list)
    holders: dict[Buffer, int] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)
    programs: tuple[tuple[str, int], ...] = ()  # of a kernel: the place along each axis of its launch, and the size
    counting: str = "i32"  # the type of numbers that count places: of 64 bits where a kernel may count further
    indexing: bool = False  # whether an expression counts places, for which 32 bits do
    later: dict[Value, Node] = field(default_factory=dict)  # what is computed inside the loop of what needs it
    params: frozenset[Value] = frozenset()  # of the region that is emitted
    dying: frozenset[Value] = frozenset()  # what its present node uses last
    parts: list[Part] = field(default_factory=lambda: [Part(FIRST)])  # the functions, of which the last is written
    awaited: Part | None = None  # the next, where something is on its way
    gates: dict[str, Part] = field(default_factory=dict)  # tasks that end operations, by name
    pinned: list[View] = field(default_factory=list)  # from where something is on its way
    turns: dict[Value, View] = field(default_factory=dict)  # where what a loop's pass begins to receive is to lie
    variables: list[str] = field(default_factory=list)  # that outlive a function
    depth: int = 1
    comment: str = ""  # the source line named last

    def declare(self, ref: Value, shape: Sequence[int]) -> Buffer:
        """An array for a tensor that the host copies."""
        buffer = Buffer(self.export(ref), SPELLING[ref.type.dtype], max(block_size(shape), 1))
        self.buffers.append(buffer)
        self.symbols[ref] = buffer
        return buffer

    def export(self, ref: Value) -> str:
        """The name under which the host knows a tensor."""
        name = f"host_{ref.hint}"
        self.exported[ref] = name if name not in self.exported.values() else f"{name}_{next(self.names)}"
        return self.exported[ref]

    def hand_over(self, ref: Value, view: View) -> bool:
        """Let the host copy a tensor from where a value lies, if that is an array of its own."""
        buffer = view.buffer
        if buffer is None or buffer in self.symbols.values() or not view.contiguous or buffer.size != max(view.size, 1):
            return False
        self.export(ref)
        self.symbols[ref] = buffer  # its room is never given to another value
        return True

    def channel(self, channel: Channel) -> str:
        """The name of a channel, which the program then has."""
        self.channels.setdefault(channel.name, channel)
        return channel.name

    def fresh(self, type: TensorType) -> View:
        """Room for a value: an array that nothing needs any more, or a new one."""
        shape, kind = tuple(map(int, type.shape)), spelled(type)
        return self.room(shape, kind)

    def room(self, shape: tuple[int, ...], kind: str) -> View:
        """Room for elements of a type."""
        size = max(block_size(shape), 1)
        fitting = [b for b in self.spare if b.type == kind and b.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda b: b.size)
            self.spare.remove(buffer)
        else:
            buffer = Buffer(f"t{next(self.names)}", kind, size)
            self.buffers.append(buffer)
        return View(kind, shape, buffer, 0, row_major(shape))

    def hold(self, value: Value, view: View) -> None:
        """Say where a value lies."""
        self.values[value] = view
        if view.buffer is not None:
            self.holders[view.buffer] = self.holders.get(view.buffer, 0) + 1

    def drop(self, value: Value) -> None:
        """A value is needed no more."""
        view = self.values.pop(value, None)
        if view is not None and view.buffer is not None:
            self.holders[view.buffer] -= 1
            if not self.holders[view.buffer] and view.buffer not in self.symbols.values():
                self.spare.append(view.buffer)

    def successor(self, value: Value, x: View, kind: str = "") -> View:
        """Room for what replaces a value that lies as `x`, holding the same: its own where nothing else needs that."""
        # A parameter's room is also that of the result of its loop.
        holders = 2 if value in self.params else 1
        kind = kind or x.type
        own = x.buffer is not None and x.contiguous and x.type == kind and x.buffer not in self.symbols.values()
        if own and value in self.dying and self.holders.get(x.buffer) == holders:  # type: ignore[arg-type]
            return x
        out = self.room(x.shape, kind)
        self.copy(out, x)
        return out

    def pin(self, view: View) -> None:
        """Keep room for as long as something is on its way from there."""
        if view.buffer is not None:
            self.holders[view.buffer] = self.holders.get(view.buffer, 0) + 1
            self.pinned.append(view)

    def unpin(self) -> None:
        """Nothing is on its way any more."""
        for view in self.pinned:
            assert view.buffer is not None
            self.holders[view.buffer] -= 1
            if view.buffer not in self.symbols.values():
                self.release(view)
        self.pinned.clear()

    def release(self, view: View) -> None:
        """Room that no value holds is free again."""
        if view.buffer is not None and not self.holders.get(view.buffer):
            self.spare.append(view.buffer)

    def counted(self, name: str) -> str:
        """A loop's variable as a number that counts places."""
        return name if self.counting == "i32" else f"@as({self.counting}, {name})"

    def described(self, view: View, shape: tuple[int, ...]) -> str | None:
        """The name of a view's descriptor (or the value of a literal); None where there is none."""
        text = descriptor(replace(view, onward=""), shape)
        if text is None or view.literal:
            return text
        name = self.constant(text, f"{view.buffer.name}_at")  # type: ignore[union-attr]
        if not view.onward:
            return name
        moved = f"{name}_{next(self.names)}"
        self.say(f"const {moved} = @increment_dsd_offset({name}, {view.onward}, {view.type});")
        return moved

    def constant(self, text: str, stem: str) -> str:
        """The name of a constant of the program, one for each text: descriptors that are known cost nothing to make."""
        return self.constants.setdefault(text, f"{stem}{len(self.constants)}")

    def awaiting(self) -> Part:
        """What goes on when the operations under way are done."""
        if self.awaited is None:
            self.awaited = Part(f"after{len(self.parts)}")
        return self.awaited

    def gate(self, along: str) -> str:
        """The name of a task that waits for two things, and then lets what is awaited go on."""
        task = self.awaiting()
        return self.task(f"{task.name}_{along}", [f"@{task.called()}({task.name}_id);"], MOST)

    def task(self, name: str, statements: Sequence[str], awaits: int = 1) -> str:
        """The name of a task of some statements, which the program then has."""
        self.gates.setdefault(name, Part(name, [f"  {text}" for text in statements], awaits))
        return name

    def pause(self) -> None:
        """End the function here; a task goes on when what is on its way has come."""
        assert self.awaited is not None and self.depth == 1
        self.parts.append(self.awaited)
        self.awaited, self.comment = None, ""

    def say(self, text: str) -> None:
        """Add a statement."""
        self.parts[-1].lines.append("  " * self.depth + text)

    @contextmanager
    def inner(self, head: str) -> Iterator[None]:
        """Add a block of statements."""
        self.say(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.say("}")

    def loop(self, views: Sequence[View], statement: Callable[[list[str]], str]) -> None:
        """A statement for every element; it is given each view's element as an expression."""
        if not block_size(views[0].shape):
            return
        shape, level = merged(views)
        names = [f"at{next(self.names)}" for _ in shape]  # i8 would be a type
        for name, size in zip(names, shape, strict=True):
            self.say(f"for (@range(i16, {size})) |{name}| {{")
            self.depth += 1
        for line in statement([v.at(names) for v in level]).split("\n"):
            self.say(line)
        for _ in shape:
            self.depth -= 1
            self.say("}")

    def operation(self, builtin: str, views: Sequence[View]) -> bool:
        """One operation on whole blocks, the destination first; False where descriptors cannot say it."""
        shape, level = merged(views)
        found = [self.described(v, shape) for v in level]
        if None in found:
            return False
        if block_size(shape):
            self.say(f"{builtin}({', '.join(map(str, found))});")
        return True

    def copy(self, target: View, source: View) -> None:
        """Copy a block."""
        if target == source:
            return
        source = fitting(target, source)
        move = mover(target, source)
        if move and target.type == source.type and self.operation(move, [target, source]):
            return
        self.loop([target, source], lambda e: f"{e[0]} = {e[1]};")

    def move(self, target: View, source: View, to: str, start: str) -> None:
        """Copy a block to `to` elements on, from `start` elements on; both are texts, which only a run knows."""
        shape, (into, out) = merged([target, fitting(target, source)])
        inner = (shape or (1,))[-1]
        rows = [replace_axes(v, (inner,), (*v.strides[-1:], 1)[:1]) for v in (into, out)]
        found = [v.literal or (self.described(v, (inner,)) if self._in_line(v) else None) for v in rows]
        outer = [f"at{next(self.names)}" for _ in shape[:-1]]
        for name, size in zip(outer, shape[:-1], strict=True):
            self.say(f"for (@range(i16, {size})) |{name}| {{")
            self.depth += 1
        steps = [self._steps(first, v, outer) for first, v in ((to, into), (start, out))]
        builtin = mover(target, source)
        if None in found or builtin is None:
            self.loop(rows, lambda t: f"{onward(t[0], steps[0])} = {onward(t[1], steps[1])};")
        elif block_size(target.shape):
            self.say(f"{builtin}({self._onward(into, found[0], steps[0])}, "
                     f"{self._onward(out, found[1], steps[1])});")  # fmt: skip
        for _ in outer:
            self.depth -= 1
            self.say("}")

    def _steps(self, first: str, view: View, names: Sequence[str]) -> str:
        """How far on an element of outer axes is, as a text."""
        strides = () if view.literal else view.strides
        counted = [f"@as({self.counting}, {n})" if first else n for n in names]
        terms = [f"{n} * {s}" for n, s in zip(counted, strides, strict=False) if s]
        return " + ".join([first, *terms] if first else terms)

    def _in_line(self, view: View) -> bool:
        return not view.strides or abs(view.strides[0]) <= LONGEST_STRIDE

    def _onward(self, view: View, text: str | None, steps: str) -> str:
        """A descriptor some elements on."""
        if view.literal or not steps:
            return str(text)
        return f"@increment_dsd_offset({text}, @as(i16, {steps}), {view.type})"

    def plain(self, view: View) -> View:
        """A view whose elements lie one after another: itself, or a copy."""
        if view.contiguous:
            return view
        made = self.room(view.shape, view.type)
        self.copy(made, view)
        return made


def unsupported(node: Node, why: str) -> UnsupportedOpError:
    """The error for what cannot be emitted."""
    return UnsupportedOpError(
        f"{node.op.name} cannot be emitted for csl: {why}", location=node.loc,
        suggestion="run this on another target, or in the interpreter",
    )  # fmt: skip
