"""Builtins of colors, queues and task ids: binding, activation and blocking of tasks."""

from __future__ import annotations

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.builtins import evaluate_constant, register_builtin, require_section
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.compilation_unit import BoundTask
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ExprValue,
    list_members,
    make_known,
    make_runtime,
)
from tessera.interp.target.csl.sema.functions import FunctionValue
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

# The first and last valid ids, by architecture.
LOCAL_TASK_IDS = {"wse2": (0, 30), "wse3": (8, 30)}
CONTROL_TASK_IDS = (0, 63)
MAX_QUEUE_IDS = {("wse2", "input"): 7, ("wse2", "output"): 5, ("wse3", "input"): 7, ("wse3", "output"): 7}


def _evaluate_id(f: AnalysisContext, node: s.BuiltinCall, type_: t.CslType, first: int, last: int) -> ExprValue:
    o = f.evaluate(node.args[0])
    if not t.is_integer(o.type):
        type_mismatch(node.args[0].loc, "integer", o.type)
    if not o.known:
        return make_runtime(type_, o.code, node.loc)
    if not first <= o.const <= last:
        fail(node.loc, f"invalid {type_} {o.const}: must be between {first} and {last} on {f.unit.options.arch}")
    return make_known(type_, int(o.const), node.loc)


@register_builtin("get_color", 1)
def _get_color(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_id(f, node, t.COLOR, 0, 23)


@register_builtin("get_input_queue", 1)
def _get_input_queue(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_id(f, node, t.INPUT_QUEUE, 0, MAX_QUEUE_IDS[f.unit.options.arch, "input"])


@register_builtin("get_output_queue", 1)
def _get_output_queue(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_id(f, node, t.OUTPUT_QUEUE, 0, MAX_QUEUE_IDS[f.unit.options.arch, "output"])


@register_builtin("get_ut_id", 1)
def _get_ut_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    if f.unit.options.arch == "wse2":
        fail(node.loc, "'@get_ut_id' is not supported on wse2")
    return _evaluate_id(f, node, t.UT_ID, 0, 7)


@register_builtin("get_local_task_id", 1)
def _get_local_task_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_id(f, node, t.LOCAL_TASK, *LOCAL_TASK_IDS[f.unit.options.arch])


@register_builtin("get_control_task_id", 1)
def _get_control_task_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_id(f, node, t.CONTROL_TASK, *CONTROL_TASK_IDS)


@register_builtin("get_data_task_id", 1)
def _get_data_task_id(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = f.evaluate(node.args[0])
    id_type = t.COLOR if f.unit.options.arch == "wse2" else t.INPUT_QUEUE
    if o.type is not id_type:
        type_mismatch(node.args[0].loc, id_type, o.type)
    return ExprValue(t.DATA_TASK, o.const, o.code, loc=node.loc)


def _evaluate_bind(f: AnalysisContext, node: s.BuiltinCall, kind: str, type_: t.CslType) -> ExprValue:
    require_section(f, node, "comptime")
    task, number = evaluate_constant(f, node.args[0]), evaluate_constant(f, node.args[1])
    if not isinstance(task.type, t.CslFunctionType) or not task.type.task or not isinstance(task.const, FunctionValue):
        type_mismatch(node.args[0].loc, "task", task.type)
    if number.type is not type_:
        type_mismatch(node.args[1].loc, type_, number.type)
    bind_task(f, task.const, kind, int(number.const), node.loc)
    return VOID


# Ids that tasks of different kinds cannot share: on WSE-2 all kinds share one table.
def bind_task(f: AnalysisContext, value: FunctionValue, kind: str, number: int, loc: Location) -> None:
    """Bind a task to an id."""
    tasks = f.unit.tables.tasks
    if any(task.value is value for task in tasks.values()):
        fail(loc, f"task '{value.decl.name}' has already been bound")
    bound = tasks.get((kind, number)) or next((x for (_, n), x in tasks.items() if n == number), None)
    if bound:
        fail(loc, f"a task has already been bound to ID {number}: '{bound.title}' at {bound.loc}")
    instance = f.unit.compile_function(value)
    if kind == "local" and instance.params:
        fail(value.decl.loc, f"local task '{value.decl.name}' must not have parameters")
    if kind == "data" and not instance.params:
        fail(value.decl.loc, f"data task '{value.decl.name}' must have at least one parameter")
    for p in instance.params:
        if p.size not in (2, 4):
            fail(value.decl.loc, f"task parameter of type '{p}' must have 16 or 32 bits")
    if sum(p.size for p in instance.params) > 4:
        fail(value.decl.loc, f"parameters of task '{value.decl.name}' exceed the 32 bits of a wavelet")
    tasks[kind, number] = BoundTask(number, kind, instance.name, instance.params, value.decl.name, loc, value)


@register_builtin("bind_local_task", 2)
def _bind_local_task(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_bind(f, node, "local", t.LOCAL_TASK)


@register_builtin("bind_data_task", 2)
def _bind_data_task(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_bind(f, node, "data", t.DATA_TASK)


@register_builtin("bind_control_task", 2)
def _bind_control_task(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _evaluate_bind(f, node, "control", t.CONTROL_TASK)


@register_builtin("activate", 1)
def _activate(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = f.evaluate(node.args[0])
    text = render_task_id(f, o, node.args[0].loc, (t.LOCAL_TASK,))
    if not f.comptime:
        f.cost += COSTS.task_call
        f.emit(f"pe.activate({text})", node.loc)
        return VOID
    require_section(f, node, "comptime")
    f.unit.tables.activated.append(int(o.const))
    return VOID


def render_task_id(f: AnalysisContext, o: ExprValue, loc: Location, kinds: tuple[t.CslType, ...]) -> str:
    """The code of a task id; a task means the id it is bound to. In the language of an early SDK a color is an id."""
    if f.unit.options.early:
        kinds = (*kinds, t.COLOR)
    if isinstance(o.type, t.CslFunctionType) and o.type.task and o.known:
        return f.unit.render_task_reference(o.const)
    if o.type not in kinds:
        type_mismatch(loc, kinds[0], o.type)
    return render_code(f, o)


def _set_block_state(f: AnalysisContext, node: s.BuiltinCall, blocked: bool) -> ExprValue:
    o = f.evaluate(node.args[0])
    kinds = (t.LOCAL_TASK, t.DATA_TASK, t.COLOR, t.INPUT_QUEUE, t.CONTROL_TASK)
    text = render_task_id(f, o, node.args[0].loc, kinds)
    if not f.comptime:
        f.cost += COSTS.task_block[f.unit.options.arch == "wse3"]
        f.emit(f"pe.{node.name[1:]}({text})", node.loc)
        return VOID
    require_section(f, node, "comptime")
    states = f.unit.tables.blocked
    (states.add if blocked else states.discard)(int(o.const))
    return VOID


@register_builtin("block", 1)
def _block(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _set_block_state(f, node, True)


@register_builtin("unblock", 1)
def _unblock(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return _set_block_state(f, node, False)


@register_builtin("initialize_queue", 1, 2)
def _initialize_queue(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    queue = evaluate_constant(f, node.args[0])
    if queue.type not in (t.INPUT_QUEUE, t.OUTPUT_QUEUE):
        type_mismatch(node.args[0].loc, t.INPUT_QUEUE, queue.type)
    options = list_members(evaluate_constant(f, node.args[1])) if len(node.args) > 1 else {}
    if "color" not in options:
        return VOID
    color = coerce(f, options["color"], t.COLOR, node.args[1].loc)
    tables = f.unit.tables
    table = tables.queues_in if queue.type is t.INPUT_QUEUE else tables.queues_out
    if queue.const in table:
        fail(node.loc, "initialization for this queue has already been set")
    table[int(queue.const)] = int(color.const)
    return VOID


@register_builtin("set_teardown_handler", 2)
def _set_teardown_handler(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    handler, color = evaluate_constant(f, node.args[0]), evaluate_constant(f, node.args[1], t.COLOR)
    if not isinstance(handler.type, t.CslFunctionType) or handler.type.task:
        type_mismatch(node.args[0].loc, "fn() void", handler.type)
    if color.const in f.unit.tables.teardown:
        fail(node.loc, "teardown handler for this color has already been set")
    f.unit.tables.teardown[int(color.const)] = f.unit.compile_function(handler.const).name
    return VOID


def _evaluate_queue(f: AnalysisContext, node: s.BuiltinCall, index: int) -> tuple[str, ExprValue]:
    """Evaluate the queue argument of a WSE-3 builtin: its side and number."""
    if f.unit.options.arch == "wse2":
        fail(node.loc, f"'{node.name}' is not supported on wse2")
    queue = f.evaluate(node.args[index])
    if queue.type not in (t.INPUT_QUEUE, t.OUTPUT_QUEUE):
        type_mismatch(node.args[index].loc, t.OUTPUT_QUEUE, queue.type)
    return "in" if queue.type is t.INPUT_QUEUE else "out", queue


@register_builtin("set_empty_queue_handler", 2)
def _set_empty_queue_handler(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    handler, (side, queue) = evaluate_constant(f, node.args[0]), _evaluate_queue(f, node, 1)
    if not isinstance(handler.type, t.CslFunctionType) or handler.type.task:
        type_mismatch(node.args[0].loc, "fn() void", handler.type)
    if (side, queue.const) in f.unit.tables.emptied:
        fail(node.loc, "empty queue handler for this queue has already been set")
    f.unit.tables.emptied[side, int(queue.const)] = f.unit.compile_function(handler.const).name
    return VOID


@register_builtin("queue_flush", 1)
def _queue_flush(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    side, queue = _evaluate_queue(f, node, 0)
    if f.comptime:
        fail(node.loc, "'@queue_flush' is only valid at run time")
    f.cost += 2
    f.emit(f"pe.flush({side!r}, {render_code(f, queue)})", node.loc)
    return VOID


@register_builtin("rpc", 1)
def _rpc(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    require_section(f, node, "comptime")
    number = evaluate_constant(f, node.args[0])
    if number.type not in (t.DATA_TASK, t.COLOR):
        type_mismatch(node.args[0].loc, t.DATA_TASK, number.type)
    return VOID  # a launch calls an exported function without a task
