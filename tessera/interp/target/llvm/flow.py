"""Terminators: which lanes go where, and the order in which blocks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.frame import Edge, Frame, Leave, Part
from tessera.interp.target.llvm.syntax import Function, Instruction

Build = Callable[[Instruction, tuple[int, ...], list[Edge]], Leave]


def _branch(i: Instruction, args: tuple[int, ...], edges: list[Edge]) -> Leave:
    if not args:
        always: list[tuple[Edge, Part]] = [(edges[0], None)]
        return lambda f: always
    (condition,), (yes, no) = args, edges

    def leave(f: Frame) -> list[tuple[Edge, Part]]:
        value = f.w[condition]
        if value.all():
            return [(yes, None)]
        if not value.any():
            return [(no, None)]
        return [(yes, np.flatnonzero(value)), (no, np.flatnonzero(~value))]

    return leave


def _switch(i: Instruction, args: tuple[int, ...], edges: list[Edge]) -> Leave:
    value, *cases = args

    def leave(f: Frame) -> list[tuple[Edge, Part]]:
        number = f.w[value]
        out: list[tuple[Edge, Part]] = []
        left = np.ones(len(number), bool)
        for case, edge in zip(cases, edges[1:], strict=True):
            chosen = left & (number == f.w[case][0])
            if chosen.all():
                return [(edge, None)]
            if chosen.any():
                out.append((edge, np.flatnonzero(chosen)))
                left &= ~chosen
        if left.all():
            return [(edges[0], None)]
        return [*out, (edges[0], np.flatnonzero(left))] if left.any() else out

    return leave


def _return(i: Instruction, args: tuple[int, ...], edges: list[Edge]) -> Leave:
    def leave(f: Frame) -> list[tuple[Edge, Part]]:
        f.finish(f.w[args[0]] if args else None)
        return []

    return leave


def _unreachable(i: Instruction, args: tuple[int, ...], edges: list[Edge]) -> Leave:
    def leave(f: Frame) -> list[tuple[Edge, Part]]:
        raise Fault("reached 'unreachable'")

    return leave


TABLE: dict[str, Build] = {
    "br": _branch,
    "switch": _switch,
    "ret": _return,
    "unreachable": _unreachable,
}

_Graph = dict[str, tuple[str, ...]]


def block_order(function: Function) -> list[str]:
    """The reachable blocks such that a loop is whole: what follows it comes after all of it.

    Lanes that leave a loop early then wait behind it for the others.
    """
    graph = {block.label: block.body[-1].labels for block in function.blocks}
    entry = function.blocks[0].label
    return _order([entry], set(_postorder([entry], graph, set(graph))), graph)


def _order(starts: list[str], inside: set[str], graph: _Graph) -> list[str]:
    """Components in topological order, each with its head first and then its own components."""
    backward: dict[str, list[str]] = {label: [] for label in inside}
    for label in inside:
        for successor in set(graph[label]) & inside:
            backward[successor].append(label)
    out, left = [], set(inside)
    for head in reversed(_postorder(starts, graph, inside)):
        if head not in left:
            continue
        component = set(_postorder([head], backward, left))
        left -= component
        out.append(head)
        if rest := component - {head}:
            out += _order([s for s in graph[head] if s in rest], rest, graph)
    return out


def _postorder(starts: list[str], graph: dict, inside: set[str]) -> list[str]:
    """Depth first, without recursion: a function may have thousands of blocks in a row."""
    seen: set[str] = set()
    out: list[str] = []
    stack: list[tuple[str, Iterable[str]]] = [("", iter(starts))]
    while stack:
        label, successors = stack[-1]
        for successor in successors:
            if successor in inside and successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(graph[successor])))
                break
        else:
            stack.pop()
            out.append(label)
    return out[:-1]
