"""The accesses of a node that touches memory: which elements each instance reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.interp.checked import machine as watched
from tessera.interp.checked.access import Access, clipped
from tessera.interp.checked.shadow import ATOMIC, READ, WRITE
from tessera.interp.machine import Machine
from tessera.ir.core import Node
from tessera.op import Rules
from tessera.ops import tile
from tessera.types import RefType

Made = tuple[Access, str, int]  # an access, its kind, and the operand that names its memory
rules = Rules("accesses")


@dataclass(frozen=True)
class Touch:
    """One access of a node, without what is masked off or clipped, its kind, and the type of the memory."""

    access: Access
    kind: str
    ref: RefType


def touches(machine: Machine, node: Node, args: Sequence[Any]) -> list[Touch]:
    """What a node touches, for all instances that run it; nothing if it touches no memory."""
    rule: Callable[..., list[Made]] | None = rules.get(node.op)
    found = rule(machine, node, list(args)) if rule is not None else []
    return [Touch(clipped(access), kind, _ref(node, operand)) for access, kind, operand in found]


def _ref(node: Node, operand: int) -> RefType:
    type = node.args[operand].type
    assert isinstance(type, RefType)
    return type


@rules(tile.load)
def _(machine, node, args):
    return [(watched._at(machine, node, *watched._place(machine, node, args, node.attrs["shape"], 1)), READ, 0)]


@rules(tile.store)
def _(machine, node, args):
    return [(watched._at(machine, node, *watched._place(machine, node, args, node.args[1].type.shape, 2)), WRITE, 0)]


@rules(tile.gather)
def _(machine, node, args):
    return [(watched._points(machine, node, args, 1), READ, 0)]


@rules(tile.scatter)
def _(machine, node, args):
    return [(watched._points(machine, node, args, 2), WRITE, 0)]


@rules(tile.atomic)
def _(machine, node, args):
    return [(watched._points(machine, node, args, 2), ATOMIC, 0)]


@rules(tile.compare_exchange)
def _(machine, node, args):
    return [(watched._points(machine, node, args, 3), ATOMIC, 0)]


@rules(tile.async_copy)
def _(machine, node, args):
    source, target = watched._sides(machine, node, args)
    clip = node.attrs["edge"] == "clip"
    read = Access.of(node, source, watched._active(machine, len(source.block)), clip)
    write = Access.of(node, target, watched._active(machine, len(target.block)), False)
    return [(read, READ, 1), (write, WRITE, 0)]
