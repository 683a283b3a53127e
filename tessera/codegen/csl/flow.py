"""Loops and branches: what is carried has room of its own, into which each pass copies what it found."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera.codegen.csl.blocks import emit, statements
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.parts import Part
from tessera.codegen.csl.views import SPELLING, View
from tessera.ir.core import Block, Node, Value
from tessera.ops import control, mesh


def carry(element: Element, node: Node, carried: Sequence[View], coming: Collection[int] = ()) -> None:
    """Room for what a loop carries, with its first values: the loop's results. What is `coming` has room of its own."""
    given = node.args[len(node.args) - len(carried) :]
    for number, (value, old, start) in enumerate(zip(node.results, given, carried, strict=True)):
        if number in coming:
            element.hold(value, start)
            continue
        twice = given.count(old) > 1  # each needs room of its own
        kind = SPELLING[value.type.dtype]
        place = _apart(element, start, kind) if twice else element.successor(old, start, kind)
        element.hold(value, place)


def _enter(element: Element, node: Node, params: Sequence[Value]) -> None:
    """A region sees what is carried as its parameters."""
    for param, value in zip(params, node.results, strict=True):
        element.hold(param, element.values[value])


def leave(element: Element, node: Node, body: Block, coming: Collection[int] = ()) -> None:
    """What a pass found is carried on; copies are made first where a result stands in another's place."""
    kept = [n for n in range(len(node.results)) if n not in coming]
    places = [element.values[node.results[n]] for n in kept]
    found = [element.values[body.results[n]] for n in kept]
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
    if element.awaited is not None and element.depth == 1 and any(n.op is mesh.arrived for n in body.nodes):
        streamed(element, node, [lower, upper, step], carried)
        return
    turn = next(element.names)
    carry(element, node, carried)
    element.hold(body.params[0], View("i32", (), literal=element.counted(f"turn{turn}")))
    name = f"turn{turn}"
    _enter(element, node, body.params[1:])
    with element.inner(f"for (@range(i32, {_bound(lower)}, {_bound(upper)}, {_bound(step)})) |{name}|"):
        statements(element, body)
        leave(element, node, body)


@emit(control.while_)
def _(element, node, *carried):
    test, body = node.regions
    carry(element, node, carried)
    with element.inner("while (true)"):
        _enter(element, node, test.params)
        statements(element, test)
        element.say(f"if ({element.values[test.results[0]].at(())} == 0) break;")
        _forget(element, test)
        _enter(element, node, body.params)
        statements(element, body)
        leave(element, node, body)


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


def streamed(element: Element, node: Node, bounds: Sequence[View], carried: Sequence[View]) -> None:
    """A loop whose passes take what has come and begin to receive what the next one takes: a task, which runs for each
    pass and then goes on with what follows. What comes lies in one half of its room and in the other, in turn.
    """
    body, turn = node.regions[0], f"turn{next(element.names)}"
    lower, upper, step = (b.literal for b in bounds)
    coming = {place for place, value in enumerate(body.params[1:]) if _awaited(body, value)}
    element.variables.append(f"{turn}: i32 = 0")
    element.say(f"{turn} = {lower};")
    carry(element, node, carried, coming)
    assert element.awaited is not None
    task = element.awaited.name
    element.pause()
    with element.inner(f"if ({turn} < {upper})"):
        element.hold(body.params[0], View("i32", (), literal=turn))
        _halve(element, node, carried, coming, turn)
        element.awaited = Part(task)
        statements(element, body)
        element.awaited = None
        leave(element, node, body, coming)
        element.say(f"{turn} += {step};")
        element.say("return;")
    element.unpin()
    passes = len(range(int(lower), int(upper), int(step)))
    for place in coming:
        view = carried[place]
        element.values[node.results[place]] = replace(view, offset=view.offset + passes % 2 * view.size)


def _awaited(body: Block, value: Value) -> bool:
    return any(n.op is mesh.arrived and n.args[0] == value for n in body.nodes)


def _halve(element: Element, node: Node, carried: Sequence[View], coming: Collection[int], turn: str) -> None:
    """A pass's parameters: of what comes the half that is there; the next goes into the other."""
    body = node.regions[0]
    for place, (param, value) in enumerate(zip(body.params[1:], node.results, strict=True)):
        view = element.values[value]
        if place in coming:
            size, here = carried[place].size, f"half{next(element.names)}"
            element.say(f"const {here}: i16 = @as(i16, {turn} % 2) * {size};")
            element.turns[body.results[place]] = replace(view, onward=f"{size} - {here}")
            view = replace(view, onward=here)
        element.hold(param, view)
