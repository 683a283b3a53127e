"""Builtins of descriptors: `@get_dsd` and what changes a DSD, DSRs, FIFOs, the operations, `@map`."""

from __future__ import annotations

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.descriptors import CHANGES
from tessera.interp.target.csl.dsd_ops import DSD_OPS, OPERATIONS, DsdOp
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.builtins import BUILTINS, Builtin, builtin
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import Operand, anonymous, known, members, runtime
from tessera.interp.target.csl.sema.tasks import task_code
from tessera.interp.target.csl.streams import LOAD

_MEMORY = (t.MEM1D, t.MEM4D, t.CIRCBUF)


def _change(f: Frame, node: s.Builtin, kinds: tuple[t.Type, ...]) -> Operand:
    o = f.value(node.args[0])
    if o.type not in kinds:
        type_mismatch(node.args[0].loc, kinds[0], o.type)
    return o


def _changed(f: Frame, node: s.Builtin, o: Operand, by: Operand, scale: int = 0) -> Operand:
    """The descriptor after the change: worked out now where all is known."""
    if o.known and by.known:
        return known(o.type, CHANGES[node.name[1:]](o.const, by.const * scale if scale else by.const), node.loc)
    f.cost += 4
    extra = f"{code(f, by)} * {scale}" if scale else code(f, by)
    return runtime(o.type, f"{node.name[1:]}({code(f, o)}, {extra})", node.loc)


@builtin("increment_dsd_offset", 3)
def _increment(f: Frame, node: s.Builtin) -> Operand:
    o = _change(f, node, _MEMORY)
    offset, type_ = coerce(f, f.value(node.args[1]), t.I16, node.args[1].loc), type_of(f, node.args[2])
    return _changed(f, node, o, offset, type_.size)


@builtin("set_dsd_length", 2)
def _set_length(f: Frame, node: s.Builtin) -> Operand:
    o = _change(f, node, (t.MEM1D, t.FABIN, t.FABOUT, t.CIRCBUF))
    return _changed(f, node, o, coerce(f, f.value(node.args[1]), t.U16, node.args[1].loc))


@builtin("set_dsd_stride", 2)
def _set_stride(f: Frame, node: s.Builtin) -> Operand:
    o = _change(f, node, (t.MEM1D,))
    return _changed(f, node, o, coerce(f, f.value(node.args[1]), t.I8, node.args[1].loc))


@builtin("set_dsd_base_addr", 2)
def _set_base(f: Frame, node: s.Builtin) -> Operand:
    o = _change(f, node, _MEMORY)
    base = f.operand(node.args[1])
    if isinstance(base.type, t.Array):
        base = f.operand(s.Unary(node.args[1].loc, "&", node.args[1]))
    if not isinstance(base.type, t.Pointee):
        type_mismatch(node.args[1].loc, "pointer or array", base.type)
    return _changed(f, node, o, base)


def is_dsd(type_: t.Type) -> bool:
    """Whether an operand of that type stands for a vector."""
    return type_ in t.DSDS or type_ in t.DSRS


def options_code(f: Frame, o: Operand, loc: Location) -> str:
    """The code of the options of an operation: a dict, with task ids worked out."""
    if o.type is not t.ANON:
        type_mismatch(loc, t.ANON, o.type)
    rows = []
    for name, value in members(o).items():
        if name in ("activate", "unblock"):
            kinds = (t.LOCAL_TASK,) if name == "activate" else (t.LOCAL_TASK, t.DATA_TASK, t.CONTROL_TASK, t.COLOR)
            kinds = (*kinds, t.INPUT_QUEUE) if name == "unblock" else kinds
            rows.append(f"{name!r}: {task_code(f, value, loc, kinds)}")
        elif name not in _OPTIONS:
            fail(loc, f"unexpected field '{name}' in DSD operation configuration")
        elif name == "on_control":
            rows.append(f"'on_control': {_on_control(f, value, loc)}")
        elif value.fields is None and value.type is not t.ANON:
            rows.append(f"{name!r}: {code(f, value)}")
    return "{" + ", ".join(rows) + "}"


def _on_control(f: Frame, o: Operand, loc: Location) -> str:
    """What a control wavelet does to an operation: end it, and activate or unblock a task."""
    if o.type is not t.ANON or set(members(o)) - {"terminate", "activate", "unblock"}:
        fail(loc, "'.on_control' must be .{ .terminate = true }, .{ .activate = task } or .{ .unblock = task }")
    return options_code(f, anonymous({n: v for n, v in members(o).items() if n != "terminate"}, loc), loc)


_OPTIONS = frozenset(
    "async activate unblock index ut_id priority on_control save_address single_step saturate scaling".split()
)


def _kind(o: Operand, op: DsdOp) -> str:
    if is_dsd(o.type):
        return "D"
    if isinstance(o.type, t.Pointee) and not o.type.many and not o.type.const and _word(o.type.element, op.result):
        return "P"
    return "S"


def _word(type_: t.Type, wanted: t.Type) -> bool:
    """Whether a pointer's type fits a result; integers of one width do."""
    whole = isinstance(type_, t.Int) and isinstance(wanted, t.Int) and type_.bits == wanted.bits
    return type_ == wanted or whole


def _operation(f: Frame, node: s.Builtin) -> Operand:
    op = OPERATIONS[f.unit.options.fp16_format][node.name[1:]]
    args = [f.operand(a) for a in node.args]
    if f.comptime:
        fail(node.loc, f"'{node.name}' is only valid at run time")
    options = args.pop() if len(args) > 1 and args[-1].type is t.ANON else None
    form = "".join(_kind(o, op) for o in args)
    if form not in op.forms:
        fail(node.loc, f"operand types do not match expectations for '{node.name}'", suggestion=_forms(op))
    texts = [code(f, args[0])]
    for o, kind, type_, arg in zip(args[1:], form[1:], op.sources, node.args[1 : len(args)], strict=True):
        texts.append(code(f, o) if kind == "D" else _scalar(f, o, type_, op, arg.loc))
    _check_fabric(f, node, args, options)
    f.cost += LOAD * sum(o.type in t.DSDS for o in args)
    f.flush(node.loc)
    return _write(f, node, op, texts, [o.type for o in args], options)


def _forms(op: DsdOp) -> str:
    words = {"D": "dsd", "S": "scalar", "P": f"*{op.result}"}
    return "one of " + "; ".join(f"@{op.name}({', '.join(words[k] for k in form)})" for form in op.forms)


def _scalar(f: Frame, o: Operand, type_: t.Type, op: DsdOp, loc: Location) -> str:
    allowed = op.scalars or (type_,)
    if o.type in allowed:
        return code(f, o)
    literal = o.type in (t.COMPTIME_INT, t.COMPTIME_FLOAT)
    wanted = next((x for x in allowed if _takes(x, o)), type_) if literal else type_
    return code(f, coerce(f, o, wanted, loc))


def _takes(type_: t.Type, o: Operand) -> bool:
    if isinstance(type_, t.Int):
        return o.type is t.COMPTIME_INT and type_.low <= o.const <= type_.high
    return o.type is t.COMPTIME_FLOAT


def _check_fabric(f: Frame, node: s.Builtin, args: list[Operand], options: Operand | None) -> None:
    """The rules of fabric operands that can be seen before the program runs."""
    types = [o.type for o in args]
    if types[0] is t.FABIN:
        fail(node.loc, "a 'fabin_dsd' cannot be the destination of a DSD operation")
    if t.FABOUT in types[1:]:
        fail(node.loc, "a 'fabout_dsd' cannot be a source of a DSD operation")
    if f.unit.options.arch == "wse3" and types.count(t.FABIN) > 1:
        fail(node.loc, "at most one 'fabin_dsd' operand is supported on wse3")
    chosen = members(options) if options is not None else {}
    wanted = chosen.get("async")
    if wanted is None or not wanted.const:
        lone = next((n for n in ("activate", "unblock") if n in chosen), None)
        if lone:
            fail(node.loc, f"'.{lone}' requires '.async = true'")
        return
    if not any(x in (t.FABIN, t.FABOUT, t.FIFO) or x in t.DSRS for x in types):
        fail(node.loc, "asynchronous DSD operations must have at least one fabric operand")


def _write(
    f: Frame, node: s.Builtin, op: DsdOp, texts: list[str], types: list[t.Type], options: Operand | None
) -> Operand:
    name = f.unit.constant(op)
    arguments = f"({', '.join(texts)},)"
    text = options_code(f, options, node.loc) if options is not None else "{}"
    if options is not None and "async" in members(options) and members(options)["async"].const:
        f.emit(f"pe.launch({name}, {arguments}, {text}, {f.unit.constant(node.loc)})", node.loc)
    elif all(x in (t.MEM1D, t.MEM4D) or not is_dsd(x) for x in types) and text == "{}":
        f.emit(f"compute(pe, {name}, {arguments})", node.loc)
    else:
        if f.function is not None:
            f.function.waits = True
        call = f"(yield from pe.perform({name}, {arguments}, {text}, {f.unit.constant(node.loc)}))"
        if any(x is t.FIFO or x in t.FIFO_DSRS for x in types):
            return runtime(t.BOOL, call, node.loc)
        f.emit(call, node.loc)
    return known(t.BOOL, True, node.loc)  # only FIFOs end an operation before its time


for _name in DSD_OPS:
    BUILTINS["@" + _name] = Builtin(2, 5, _operation)
