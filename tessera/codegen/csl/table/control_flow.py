"""Control flow: loops and branches; each loop-carried value has an array, into which an iteration copies its result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tessera.codegen.csl.table.blocks import emit, emit_block
from tessera.codegen.csl.text.dsd import CSL_TYPES, PeArrayView
from tessera.codegen.csl.text.pe_program import CslEmitter, TaskFunction
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, mesh


def allocate_loop_carried(
    element: CslEmitter, node: Node, carried: Sequence[PeArrayView], coming: Collection[int] = ()
) -> None:
    """Room for what a loop carries, with its first values: the loop's results. What is `coming` has room of its own."""
    given = node.args[len(node.args) - len(carried) :]
    for number, (value, old, start) in enumerate(zip(node.results, given, carried, strict=True)):
        if number in coming:
            element.hold(value, start)
            continue
        twice = given.count(old) > 1  # each needs room of its own
        kind = CSL_TYPES[value.type.dtype]
        place = _copy_to_new_array(element, start, kind) if twice else element.reuse_or_copy(old, start, kind)
        element.hold(value, place)


def _bind_region_params(element: CslEmitter, node: Node, params: Sequence[Value]) -> None:
    """A region sees what is carried as its parameters."""
    for param, value in zip(params, node.results, strict=True):
        element.hold(param, element.values[value])


def emit_yield(element: CslEmitter, node: Node, body: Block, coming: Collection[int] = ()) -> None:
    """What a pass found is carried on; copies are made first where a result stands in another's place."""
    kept = [n for n in range(len(node.results)) if n not in coming]
    places = [element.values[node.results[n]] for n in kept]
    found = [element.values[body.results[n]] for n in kept]
    taken = {p.buffer for p in places}
    apart = [
        _copy_to_new_array(element, x, x.type) if x.buffer in taken and x != place else x
        for x, place in zip(found, places, strict=True)
    ]
    for place, view in zip(places, apart, strict=True):
        element.copy(place, view)
    for view, given in zip(apart, found, strict=True):
        if view is not given:
            element.release(view)
    _drop_region_values(element, body)


def _drop_region_values(element: CslEmitter, block: Block) -> None:
    """What a region's parameters and own results named is named no more."""
    own = {*block.params, *(v for node in block.nodes for v in node.results)}
    for value in dict.fromkeys((*block.params, *block.results)):
        if value in own:
            element.drop(value)


def _copy_to_new_array(element: CslEmitter, view: PeArrayView, kind: str) -> PeArrayView:
    made = element.allocate(view.shape, kind)
    element.copy(made, view)
    return made


def _format_bound(view: PeArrayView) -> str:
    text = view.at(())
    return text if text.lstrip("-").isdigit() else f"@as(i32, {text})"


@emit(control_flow.for_)
def _(element, node, lower, upper, step, *carried):
    body = node.regions[0]
    if element.pending_task is not None and element.depth == 1 and any(n.op is mesh.arrived for n in body.nodes):
        emit_task_loop(element, node, [lower, upper, step], carried)
        return
    turn = next(element.names)
    allocate_loop_carried(element, node, carried)
    element.hold(body.params[0], PeArrayView("i32", (), literal=element.cast_to_index(f"turn{turn}")))
    name = f"turn{turn}"
    _bind_region_params(element, node, body.params[1:])
    with element.inner(
        f"for (@range(i32, {_format_bound(lower)}, {_format_bound(upper)}, {_format_bound(step)})) |{name}|"
    ):
        emit_block(element, body)
        emit_yield(element, node, body)


@emit(control_flow.while_)
def _(element, node, *carried):
    test, body = node.regions
    allocate_loop_carried(element, node, carried)
    with element.inner("while (true)"):
        _bind_region_params(element, node, test.params)
        emit_block(element, test)
        element.add_line(f"if ({element.values[test.results[0]].at(())} == 0) break;")
        _drop_region_values(element, test)
        _bind_region_params(element, node, body.params)
        emit_block(element, body)
        emit_yield(element, node, body)


@emit(control_flow.if_)
def _(element, node, condition):
    places = [element.allocate_for(value.type) for value in node.results]
    for value, place in zip(node.results, places, strict=True):
        element.hold(value, place)
    heads = (f"if ({condition.at(())} != 0)", "else")
    for head, region in zip(heads, node.regions, strict=True):
        with element.inner(head):
            emit_block(element, region)
            for place, result in zip(places, region.results, strict=True):
                element.copy(place, element.values[result])
            _drop_region_values(element, region)


def emit_task_loop(
    element: CslEmitter, node: Node, bounds: Sequence[PeArrayView], carried: Sequence[PeArrayView]
) -> None:
    """A loop whose passes take what has come and begin to receive what the next one takes: a task, which runs for each
    pass and then goes on with what follows. What comes lies in one half of its room and in the other, in turn.
    """
    body, turn = node.regions[0], f"turn{next(element.names)}"
    lower, upper, step = (b.literal for b in bounds)
    coming = {place for place, value in enumerate(body.params[1:]) if _is_awaited(body, value)}
    element.variables.append(f"{turn}: i32 = 0")
    element.add_line(f"{turn} = {lower};")
    allocate_loop_carried(element, node, carried, coming)
    assert element.pending_task is not None
    task = element.pending_task.name
    element.end_task()
    with element.inner(f"if ({turn} < {upper})"):
        element.hold(body.params[0], PeArrayView("i32", (), literal=turn))
        _bind_double_buffers(element, node, carried, coming, turn)
        element.pending_task = TaskFunction(task)
        emit_block(element, body)
        element.pending_task = None
        emit_yield(element, node, body, coming)
        element.add_line(f"{turn} += {step};")
        element.add_line("return;")
    element.unpin()
    passes = len(range(int(lower), int(upper), int(step)))
    for place in coming:
        view = carried[place]
        element.values[node.results[place]] = replace(view, offset=view.offset + passes % 2 * view.size)


def _is_awaited(body: Block, value: Value) -> bool:
    return any(n.op is mesh.arrived and n.args[0] == value for n in body.nodes)


def _bind_double_buffers(
    element: CslEmitter, node: Node, carried: Sequence[PeArrayView], coming: Collection[int], turn: str
) -> None:
    """A pass's parameters: of what comes the half that is there; the next goes into the other."""
    body = node.regions[0]
    for place, (param, value) in enumerate(zip(body.params[1:], node.results, strict=True)):
        view = element.values[value]
        if place in coming:
            size, here = carried[place].size, f"half{next(element.names)}"
            element.add_line(f"const {here}: i16 = @as(i16, {turn} % 2) * {size};")
            element.receive_targets[body.results[place]] = replace(view, dynamic_offset=f"{size} - {here}")
            view = replace(view, dynamic_offset=here)
        element.hold(param, view)
