"""Builtins of DSDs, DSRs and FIFOs: descriptor updates, DSD operations, register loads, `@map`."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.dsd_table import DSD_OPS, DSD_OPS_BY_FP16, DsdOp
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.builtins import (
    BUILTINS,
    BuiltinSpec,
    evaluate_constant,
    evaluate_integer,
    register_builtin,
    require_section,
)
from tessera.interp.target.csl.sema.coercion import coerce, render_code
from tessera.interp.target.csl.sema.context import (
    VOID,
    AnalysisContext,
    ExprValue,
    list_members,
    make_anonymous_struct,
    make_known,
    make_runtime,
)
from tessera.interp.target.csl.sema.task_builtins import render_task_id
from tessera.interp.target.csl.sema.values import DSD_UPDATES, Dsr, FifoRef
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

# DSD updates and DSD operations.


_MEMORY_DSDS = (t.MEM1D, t.MEM4D, t.CIRCBUF)


def _evaluate_descriptor(f: AnalysisContext, node: s.BuiltinCall, kinds: tuple[t.CslType, ...]) -> ExprValue:
    o = f.evaluate(node.args[0])
    if o.type not in kinds:
        type_mismatch(node.args[0].loc, kinds[0], o.type)
    return o


def _update_descriptor(
    f: AnalysisContext, node: s.BuiltinCall, o: ExprValue, by: ExprValue, scale: int = 0
) -> ExprValue:
    """The updated descriptor, evaluated at comptime if all operands are known."""
    if o.known and by.known:
        return make_known(
            o.type, DSD_UPDATES[node.name[1:]](o.const, by.const * scale if scale else by.const), node.loc
        )
    f.cost += COSTS.global_change if _is_in_memory(o) else COSTS.local_change
    extra = f"{render_code(f, by)} * {scale}" if scale else render_code(f, by)
    return make_runtime(o.type, f"{node.name[1:]}({render_code(f, o)}, {extra})", node.loc)


@register_builtin("increment_dsd_offset", 3)
def _increment_offset(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = _evaluate_descriptor(f, node, _MEMORY_DSDS)
    offset, type_ = coerce(f, f.evaluate(node.args[1]), t.I16, node.args[1].loc), evaluate_type(f, node.args[2])
    return _update_descriptor(f, node, o, offset, type_.size)


@register_builtin("set_dsd_length", 2)
def _set_length(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = _evaluate_descriptor(f, node, (t.MEM1D, t.FABIN, t.FABOUT, t.CIRCBUF))
    return _update_descriptor(f, node, o, coerce(f, f.evaluate(node.args[1]), t.U16, node.args[1].loc))


@register_builtin("set_dsd_stride", 2)
def _set_stride(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = _evaluate_descriptor(f, node, (t.MEM1D,))
    return _update_descriptor(f, node, o, coerce(f, f.evaluate(node.args[1]), t.I8, node.args[1].loc))


@register_builtin("set_dsd_base_addr", 2)
def _set_base(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = _evaluate_descriptor(f, node, _MEMORY_DSDS)
    base = f.evaluate_operand(node.args[1])
    if isinstance(base.type, t.CslArray):
        base = f.evaluate_operand(s.UnaryExpr(node.args[1].loc, "&", node.args[1]))
    if not isinstance(base.type, t.CslPointer):
        type_mismatch(node.args[1].loc, "pointer or array", base.type)
    return _update_descriptor(f, node, o, base)


def is_dsd(type_: t.CslType) -> bool:
    """Whether an operand of a type is a DSD, DSR or FIFO."""
    return type_ in t.DSDS or type_ in t.DSRS


def render_options(f: AnalysisContext, o: ExprValue, loc: Location) -> str:
    """The code of the options of a DSD operation: a dict with evaluated task ids."""
    if o.type is not t.ANON:
        type_mismatch(loc, t.ANON, o.type)
    rows = []
    for name, value in list_members(o).items():
        if name in ("activate", "unblock"):
            kinds = (t.LOCAL_TASK,) if name == "activate" else (t.LOCAL_TASK, t.DATA_TASK, t.CONTROL_TASK, t.COLOR)
            kinds = (*kinds, t.INPUT_QUEUE) if name == "unblock" else kinds
            rows.append(f"{name!r}: {render_task_id(f, value, loc, kinds)}")
        elif name not in _OPERATION_OPTIONS:
            fail(loc, f"unexpected field '{name}' in DSD operation configuration")
        elif name == "on_control":
            rows.append(f"'on_control': {_render_on_control(f, value, loc)}")
        elif value.fields is None and value.type is not t.ANON:
            rows.append(f"{name!r}: {render_code(f, value)}")
    return "{" + ", ".join(rows) + "}"


def _render_on_control(f: AnalysisContext, o: ExprValue, loc: Location) -> str:
    """What a control wavelet does to an operation: end it, and activate or unblock a task."""
    if o.type is not t.ANON or set(list_members(o)) - {"terminate", "activate", "unblock"}:
        fail(loc, "'.on_control' must be .{ .terminate = true }, .{ .activate = task } or .{ .unblock = task }")
    return render_options(
        f, make_anonymous_struct({n: v for n, v in list_members(o).items() if n != "terminate"}, loc), loc
    )


_OPERATION_OPTIONS = frozenset(
    "async activate unblock index ut_id priority on_control save_address single_step saturate scaling".split()
)


def _operand_kind(o: ExprValue, op: DsdOp) -> str:
    if is_dsd(o.type):
        return "D"
    if (
        isinstance(o.type, t.CslPointer)
        and not o.type.many
        and not o.type.const
        and _is_word_compatible(o.type.element, op.result)
    ):
        return "P"
    return "S"


def _is_word_compatible(type_: t.CslType, wanted: t.CslType) -> bool:
    """Whether a pointer type can receive a result: equal types, or integers of one width."""
    whole = isinstance(type_, t.CslInt) and isinstance(wanted, t.CslInt) and type_.bits == wanted.bits
    return type_ == wanted or whole


def _evaluate_operation(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    op = DSD_OPS_BY_FP16[f.unit.options.fp16_format][node.name[1:]]
    args = [f.evaluate_operand(a) for a in node.args]
    if f.comptime:
        fail(node.loc, f"'{node.name}' is only valid at run time")
    options = args.pop() if len(args) > 1 and args[-1].type is t.ANON else None
    form = "".join(_operand_kind(o, op) for o in args)
    if form not in op.forms:
        fail(node.loc, f"operand types do not match expectations for '{node.name}'", suggestion=_describe_forms(op))
    texts = [render_code(f, args[0])]
    for o, kind, type_, arg in zip(args[1:], form[1:], op.sources, node.args[1 : len(args)], strict=True):
        texts.append(render_code(f, o) if kind == "D" else _render_scalar(f, o, type_, op, arg.loc))
    _check_fabric_operands(f, node, args, options)
    f.held.clear()
    f.cost += sum(_count_load_cycles(f, o) for o in args if o.type in t.DSDS)
    f.cost += COSTS.constant_operand * sum(o.known for o, kind in zip(args, form, strict=True) if kind == "S")
    f.flush(node.loc)
    return _emit_operation(f, node, op, texts, [o.type for o in args], options)


def _count_load_cycles(f: AnalysisContext, o: ExprValue) -> int:
    """The cycles to load the descriptor of an operand into a register."""
    if not o.known:
        return _count_variable_load_cycles(f, o)
    return COSTS.fabric_load if o.type in (t.FABIN, t.FABOUT) else COSTS.descriptor_load


def _count_variable_load_cycles(f: AnalysisContext, o: ExprValue) -> int:
    """The cycles to load a descriptor from a global variable, or from the processor's registers."""
    return COSTS.global_load if _is_in_memory(o) else COSTS.local_load[f.unit.options.arch == "wse3"]


def _is_in_memory(o: ExprValue) -> bool:
    """Whether a global variable holds a value."""
    return o.place is not None and bool(o.place.array)


def _describe_forms(op: DsdOp) -> str:
    words = {"D": "dsd", "S": "scalar", "P": f"*{op.result}"}
    return "one of " + "; ".join(f"@{op.name}({', '.join(words[k] for k in form)})" for form in op.forms)


def _render_scalar(f: AnalysisContext, o: ExprValue, type_: t.CslType, op: DsdOp, loc: Location) -> str:
    allowed = op.scalars or (type_,)
    if o.type in allowed:
        return render_code(f, o)
    literal = o.type in (t.COMPTIME_INT, t.COMPTIME_FLOAT)
    wanted = next((x for x in allowed if _accepts_literal(x, o)), type_) if literal else type_
    return render_code(f, coerce(f, o, wanted, loc))


def _accepts_literal(type_: t.CslType, o: ExprValue) -> bool:
    if isinstance(type_, t.CslInt):
        return o.type is t.COMPTIME_INT and type_.low <= o.const <= type_.high
    return o.type is t.COMPTIME_FLOAT


def _check_fabric_operands(
    f: AnalysisContext, node: s.BuiltinCall, args: list[ExprValue], options: ExprValue | None
) -> None:
    """Check the static rules of fabric operands."""
    types = [o.type for o in args]
    if types[0] is t.FABIN:
        fail(node.loc, "a 'fabin_dsd' cannot be the destination of a DSD operation")
    if t.FABOUT in types[1:]:
        fail(node.loc, "a 'fabout_dsd' cannot be a source of a DSD operation")
    if f.unit.options.arch == "wse3" and types.count(t.FABIN) > 1:
        fail(node.loc, "at most one 'fabin_dsd' operand is supported on wse3")
    chosen = list_members(options) if options is not None else {}
    is_async = chosen.get("async")
    if is_async is None or not is_async.const:
        lone = next((n for n in ("activate", "unblock") if n in chosen), None)
        if lone:
            fail(node.loc, f"'.{lone}' requires '.async = true'")
        return
    if not any(x in (t.FABIN, t.FABOUT, t.FIFO) or x in t.DSRS for x in types):
        fail(node.loc, "asynchronous DSD operations must have at least one fabric operand")


def _emit_operation(
    f: AnalysisContext,
    node: s.BuiltinCall,
    op: DsdOp,
    texts: list[str],
    types: list[t.CslType],
    options: ExprValue | None,
) -> ExprValue:
    name = f.unit.add_constant(op)
    arguments = f"({', '.join(texts)},)"
    text = render_options(f, options, node.loc) if options is not None else "{}"
    if options is not None and "async" in list_members(options) and list_members(options)["async"].const:
        f.emit(f"pe.launch({name}, {arguments}, {text}, {f.unit.add_constant(node.loc)})", node.loc)
    elif all(x in (t.MEM1D, t.MEM4D) or not is_dsd(x) for x in types) and text == "{}":
        f.emit(f"compute(pe, {name}, {arguments})", node.loc)
    else:
        if f.function is not None:
            f.function.waits = True
        call = f"(yield from pe.perform({name}, {arguments}, {text}, {f.unit.add_constant(node.loc)}))"
        if any(x is t.FIFO or x in t.FIFO_DSRS for x in types):
            return make_runtime(t.BOOL, call, node.loc)
        f.emit(call, node.loc)
    return make_known(t.BOOL, True, node.loc)  # only a FIFO can end an operation early


for _name in DSD_OPS:
    BUILTINS["@" + _name] = BuiltinSpec(2, 5, _evaluate_operation)


# DSRs and FIFOs. A FIFO uses a pair of DSRs.


# The fabric DSDs that a DSR file cannot hold.
FORBIDDEN_DSDS = {t.DSR_DEST: (t.FABIN,), t.DSR_SRC0: (), t.DSR_SRC1: (t.FABOUT,)}


@register_builtin("get_dsr", 2)
def _get_dsr(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    if type_ not in t.DSRS:
        type_mismatch(node.args[0].loc, "DSR type", type_)
    file = t.FIFO_DSRS.get(type_, type_)
    number = evaluate_constant(f, node.args[1])
    if number.type in t.DSRS:
        if type_ is file or number.type is not file:
            type_mismatch(node.args[1].loc, "integer" if type_ is file else file, number.type)
        return make_known(type_, number.const, node.loc)
    return make_known(type_, Dsr(file.name, evaluate_integer(f, node.args[1])), node.loc)


@register_builtin("get_xdsr", 1)
def _get_xdsr(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    return make_known(t.XDSR, evaluate_integer(f, node.args[0]), node.loc)


@register_builtin("load_to_dsr", 2, 3)
def _load_to_dsr(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    dsr, dsd = f.evaluate(node.args[0]), f.evaluate(node.args[1])
    if dsr.type not in FORBIDDEN_DSDS:
        type_mismatch(node.args[0].loc, "DSR", dsr.type)
    if dsd.type not in t.DSDS:
        type_mismatch(node.args[1].loc, "DSD", dsd.type)
    if dsd.type in FORBIDDEN_DSDS[dsr.type]:
        fail(node.loc, f"a '{dsd.type}' cannot be loaded to a '{dsr.type}'")
    options = render_options(f, f.evaluate_operand(node.args[2]), node.args[2].loc) if len(node.args) > 2 else "{}"
    text = f"pe.load_dsr({render_code(f, dsr)}, {render_code(f, dsd)}, {options})"
    if f.comptime:
        require_section(f, node, "comptime")
        f.unit.tables.preloads.append((text, node.loc))
        return VOID
    fabric = dsd.type in (t.FABIN, t.FABOUT)
    f.cost += COSTS.fabric_register_load if fabric else COSTS.register_load[f.unit.options.arch == "wse3"]
    f.cost += 0 if dsd.known else _count_variable_load_cycles(f, dsd)
    f.emit(text, node.loc)
    return VOID


@register_builtin("allocate_fifo", 1, 2)
def _allocate_fifo(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    buffer = f.evaluate_operand(node.args[0])
    if isinstance(buffer.type, t.CslPointer) and isinstance(buffer.type.element, t.CslArray):
        buffer = ExprValue(buffer.type.element, buffer.const, buffer.code)
    if not isinstance(buffer.type, t.CslArray):
        type_mismatch(node.args[0].loc, "array", buffer.type)
    options = _evaluate_fifo_options(f, node)
    tasks = [options[n].const if n in options else None for n in ("activate_push", "activate_pop")]
    if f.function is not None:
        fail(node.loc, "'@allocate_fifo' is only valid at the top level")
    fifos = f.unit.tables.fifos
    fifos.append((buffer.type.count, tasks[0], tasks[1]))
    fifo = make_known(t.FIFO, FifoRef(len(fifos) - 1), node.loc)
    _load_fifo_registers(f, node, options, fifo)
    return fifo


def _evaluate_fifo_options(f: AnalysisContext, node: s.BuiltinCall) -> dict[str, ExprValue]:
    """Evaluate the options of a FIFO. Priorities and move widths change only the timing."""
    options, arch = list_members(evaluate_constant(f, node.args[1])) if len(node.args) > 1 else {}, f.unit.options.arch
    allowed = {"activate_push", "activate_pop", *_FIFO_REGISTERS, "simd_mode" if arch == "wse2" else "priority"}
    unknown = set(options) - allowed
    if unknown:
        fail(node.loc, f"unexpected FIFO option '{unknown.pop()}' on {arch}")
    return options


_FIFO_REGISTERS = {"dest": t.DSR_DEST, "src": t.DSR_SRC1, "xdsr": t.XDSR}


def _load_fifo_registers(
    f: AnalysisContext, node: s.BuiltinCall, options: dict[str, ExprValue], fifo: ExprValue
) -> None:
    """Load a FIFO into the DSRs that the program selects."""
    registers = {name: options[name] for name in _FIFO_REGISTERS if name in options}
    if not registers:
        return
    if len(registers) < len(_FIFO_REGISTERS):
        fail(node.loc, "'dest', 'src' and 'xdsr' of a FIFO must be set together")
    for name, o in registers.items():
        if o.type is not _FIFO_REGISTERS[name]:
            type_mismatch(node.loc, _FIFO_REGISTERS[name], o.type)
    if registers["dest"].const.number != registers["src"].const.number:
        fail(node.loc, "'dest' and 'src' of a FIFO must be DSRs of the same number")
    for name in ("dest", "src"):
        text = f"pe.load_dsr({render_code(f, registers[name])}, {render_code(f, fifo)}, {{}})"
        f.unit.tables.preloads.append((text, node.loc))


def _set_fifo_length(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    o = f.evaluate(node.args[0])
    if o.type is not t.FIFO:
        type_mismatch(node.args[0].loc, "FIFO", o.type)
    count = coerce(f, f.evaluate(node.args[1]), t.U16, node.args[1].loc)
    if f.comptime:
        fail(node.loc, f"'{node.name}' is only valid at run time")
    f.cost += 2
    f.emit(f"{render_code(f, o)}.{node.name.removeprefix('@set_fifo_')} = {render_code(f, count)}", node.loc)
    return VOID


for _side in ("read", "write"):
    BUILTINS[f"@set_fifo_{_side}_length"] = BuiltinSpec(2, 2, _set_fifo_length)


# `@map`: calls a function for each element of its operands.


@register_builtin("map", 2, 20)
def _evaluate_map(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    callback = f.evaluate_operand(node.args[0])
    args = [f.evaluate_operand(a) for a in node.args[1:]]
    if f.comptime:
        fail(node.loc, "'@map' is only valid at run time")
    if not isinstance(callback.type, t.CslFunctionType) or callback.type.task:
        type_mismatch(node.args[0].loc, "function", callback.type)
    options = args.pop() if args and args[-1].type is t.ANON else None
    type_ = _map_callback_type(callback, args)
    _check_map_operands(args, type_, node.loc)
    kinds, texts = [], []
    for o, p, arg in zip(args, type_.params, node.args[1:], strict=False):
        kinds.append(p if is_dsd(o.type) else None)
        texts.append(render_code(f, o if is_dsd(o.type) or p is None else coerce(f, o, p, arg.loc)))
    if type_.result is not t.VOID:
        _check_map_target(args[-1], type_.result, node.args[-1].loc)
        texts.append(render_code(f, args[-1]))
    f.flush(node.loc)
    if f.function is not None:
        f.function.waits = True
    shape = f.unit.add_constant((tuple(kinds), None if type_.result is t.VOID else type_.result))
    text = render_options(f, options, node.loc) if options is not None else "{}"
    where = f.unit.add_constant(node.loc)
    f.emit(f"yield from pe.map({render_code(f, callback)}, {shape}, ({', '.join(texts)},), {text}, {where})", node.loc)
    return VOID


def _check_map_operands(args: list[ExprValue], type_: t.CslFunctionType, loc: Location) -> None:
    count = len(type_.params) + (type_.result is not t.VOID)
    if len(args) != count:
        fail(loc, f"@map callback needs {count} operands, {len(args)} provided")
    if not any(is_dsd(o.type) for o in args):
        fail(loc, "@map expects at least one DSD operand")
    if any(o.type is t.FIFO for o in args):
        fail(loc, "a FIFO cannot be an operand of @map")


def _map_callback_type(callback: ExprValue, args: list[ExprValue]) -> t.CslFunctionType:
    """The type of the callback; that of a generic library function follows from the operands."""
    type_: Any = callback.type
    if None in type_.params or type_.result is t.ANYTYPE:
        fail(callback.loc, "@map expects a function whose parameter types are known")
    return type_


def _check_map_target(o: ExprValue, result: t.CslType, loc: Location) -> None:
    if is_dsd(o.type):
        return
    if not isinstance(o.type, t.CslPointer) or o.type.const or o.type.element != result:
        type_mismatch(loc, f"*{result} or DSD", o.type)
