"""Loops and branches: what is carried has room of its own, into which each pass copies what it found."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.codegen.csl.blocks import emit, statements
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.views import SPELLING, View
from tessera.ir.core import Block, Node, Value
from tessera.ops import control


def _carry(element: Element, node: Node, carried: Sequence[View]) -> None:
    """Room for what a loop carries, with its first values; they are the loop's results."""
    given = node.args[len(node.args) - len(carried) :]
    for value, old, start in zip(node.results, given, carried, strict=True):
        twice = given.count(old) > 1  # each needs room of its own
        kind = SPELLING[value.type.dtype]
        place = _apart(element, start, kind) if twice else element.successor(old, start, kind)
        element.hold(value, place)


def _enter(element: Element, node: Node, params: Sequence[Value]) -> None:
    """A region sees what is carried as its parameters."""
    for param, value in zip(params, node.results, strict=True):
        element.hold(param, element.values[value])


def _leave(element: Element, node: Node, body: Block) -> None:
    """What a pass found is carried on; copies are made first where a result stands in another's place."""
    places = [element.values[value] for value in node.results]
    found = [element.values[result] for result in body.results]
    taken = {p.buffer for p in places}
    apart = [
        _apart(element, x, x.type) if x.buffer in taken and x != place else x
        for x, place in zip(found, places, strict=True)
    ]
    for place, view in zip(places, apart, strict=True):
        element.copy(place, view)
    for view, given in zip(apart, found, strict=True):
        if view is not given:
            element.release(view)
    _forget(element, body)


def _forget(element: Element, block: Block) -> None:
    """What a region's parameters and own results named is named no more."""
    own = {v for node in block.nodes for v in node.results}
    for value in {*block.params, *block.results} & {*own, *block.params}:
        element.drop(value)


def _apart(element: Element, view: View, kind: str) -> View:
    made = element.room(view.shape, kind)
    element.copy(made, view)
    return made


def _bound(view: View) -> str:
    text = view.at(())
    return text if text.lstrip("-").isdigit() else f"@as(i32, {text})"


@emit(control.for_)
def _(element, node, lower, upper, step, *carried):
    body = node.regions[0]
    turn = next(element.names)
    _carry(element, node, carried)
    element.hold(body.params[0], View("i32", (), literal=element.counted(f"turn{turn}")))
    name = f"turn{turn}"
    _enter(element, node, body.params[1:])
    with element.inner(f"for (@range(i32, {_bound(lower)}, {_bound(upper)}, {_bound(step)})) |{name}|"):
        statements(element, body)
        _leave(element, node, body)


@emit(control.while_)
def _(element, node, *carried):
    test, body = node.regions
    _carry(element, node, carried)
    with element.inner("while (true)"):
        _enter(element, node, test.params)
        statements(element, test)
        element.say(f"if ({element.values[test.results[0]].at(())} == 0) break;")
        _forget(element, test)
        _enter(element, node, body.params)
        statements(element, body)
        _leave(element, node, body)


@emit(control.if_)
def _(element, node, condition):
    places = [element.fresh(value.type) for value in node.results]
    for value, place in zip(node.results, places, strict=True):
        element.hold(value, place)
    heads = (f"if ({condition.at(())} != 0)", "else")
    for head, region in zip(heads, node.regions, strict=True):
        with element.inner(head):
            statements(element, region)
            for place, result in zip(places, region.results, strict=True):
                element.copy(place, element.values[result])
            _forget(element, region)
