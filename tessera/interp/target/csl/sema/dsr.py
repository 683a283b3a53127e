"""Builtins of registers for descriptors, and of FIFOs, which take a pair of them."""

from __future__ import annotations

from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.builtins import BUILTINS, Builtin, builtin, constant, number, only_in
from tessera.interp.target.csl.sema.coerce import code, coerce
from tessera.interp.target.csl.sema.dsd import options_code
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import VOID, Operand, known, members
from tessera.interp.target.csl.values import Dsr, FifoRef

# Which fabric descriptors a register may not hold.
REFUSED = {t.DSR_DEST: (t.FABIN,), t.DSR_SRC0: (), t.DSR_SRC1: (t.FABOUT,)}


@builtin("get_dsr", 2)
def _get_dsr(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    if type_ not in t.DSRS:
        type_mismatch(node.args[0].loc, "DSR type", type_)
    file = t.FIFO_DSRS.get(type_, type_)
    given = constant(f, node.args[1])
    if given.type in t.DSRS:
        if type_ is file or given.type is not file:
            type_mismatch(node.args[1].loc, "integer" if type_ is file else file, given.type)
        return known(type_, given.const, node.loc)
    return known(type_, Dsr(file.name, number(f, node.args[1])), node.loc)


@builtin("get_xdsr", 1)
def _get_xdsr(f: Frame, node: s.Builtin) -> Operand:
    return known(t.XDSR, number(f, node.args[0]), node.loc)


@builtin("load_to_dsr", 2, 3)
def _load_to_dsr(f: Frame, node: s.Builtin) -> Operand:
    dsr, dsd = f.value(node.args[0]), f.value(node.args[1])
    if dsr.type not in REFUSED:
        type_mismatch(node.args[0].loc, "DSR", dsr.type)
    if dsd.type not in t.DSDS:
        type_mismatch(node.args[1].loc, "DSD", dsd.type)
    if dsd.type in REFUSED[dsr.type]:
        fail(node.loc, f"a '{dsd.type}' cannot be loaded to a '{dsr.type}'")
    options = options_code(f, f.operand(node.args[2]), node.args[2].loc) if len(node.args) > 2 else "{}"
    text = f"pe.load_dsr({code(f, dsr)}, {code(f, dsd)}, {options})"
    if f.comptime:
        only_in(f, node, "comptime")
        f.unit.tables.loaded.append((text, node.loc))
        return VOID
    f.cost += 3
    f.emit(text, node.loc)
    return VOID


@builtin("allocate_fifo", 1, 2)
def _allocate_fifo(f: Frame, node: s.Builtin) -> Operand:
    buffer = f.operand(node.args[0])
    if isinstance(buffer.type, t.Pointee) and isinstance(buffer.type.element, t.Array):
        buffer = Operand(buffer.type.element, buffer.const, buffer.code)
    if not isinstance(buffer.type, t.Array):
        type_mismatch(node.args[0].loc, "array", buffer.type)
    options = _options(f, node)
    tasks = [options[n].const if n in options else None for n in ("activate_push", "activate_pop")]
    if f.function is not None:
        fail(node.loc, "'@allocate_fifo' is only valid at the top level")
    fifos = f.unit.tables.fifos
    fifos.append((buffer.type.count, tasks[0], tasks[1]))
    found = known(t.FIFO, FifoRef(len(fifos) - 1), node.loc)
    _hold(f, node, options, found)
    return found


def _options(f: Frame, node: s.Builtin) -> dict[str, Operand]:
    """The options of a FIFO. Priorities and the width of a move change when its elements go, not which."""
    options, arch = members(constant(f, node.args[1])) if len(node.args) > 1 else {}, f.unit.options.arch
    allowed = {"activate_push", "activate_pop", *_REGISTERS, "simd_mode" if arch == "wse2" else "priority"}
    unknown = set(options) - allowed
    if unknown:
        fail(node.loc, f"unexpected FIFO option '{unknown.pop()}' on {arch}")
    return options


_REGISTERS = {"dest": t.DSR_DEST, "src": t.DSR_SRC1, "xdsr": t.XDSR}


def _hold(f: Frame, node: s.Builtin, options: dict[str, Operand], fifo: Operand) -> None:
    """Put a FIFO into the registers that are chosen for it."""
    given = {name: options[name] for name in _REGISTERS if name in options}
    if not given:
        return
    if len(given) < len(_REGISTERS):
        fail(node.loc, "the registers of a FIFO, dest, src and xdsr, are chosen together")
    for name, o in given.items():
        if o.type is not _REGISTERS[name]:
            type_mismatch(node.loc, _REGISTERS[name], o.type)
    if given["dest"].const.number != given["src"].const.number:
        fail(node.loc, "the registers dest and src of a FIFO must have the same number")
    for name in ("dest", "src"):
        text = f"pe.load_dsr({code(f, given[name])}, {code(f, fifo)}, {{}})"
        f.unit.tables.loaded.append((text, node.loc))


def _fifo_length(f: Frame, node: s.Builtin) -> Operand:
    o = f.value(node.args[0])
    if o.type is not t.FIFO:
        type_mismatch(node.args[0].loc, "FIFO", o.type)
    count = coerce(f, f.value(node.args[1]), t.U16, node.args[1].loc)
    if f.comptime:
        fail(node.loc, f"'{node.name}' is only valid at run time")
    f.cost += 2
    f.emit(f"{code(f, o)}.{node.name.removeprefix('@set_fifo_')} = {code(f, count)}", node.loc)
    return VOID


for _side in ("read", "write"):
    BUILTINS[f"@set_fifo_{_side}_length"] = Builtin(2, 2, _fifo_length)
