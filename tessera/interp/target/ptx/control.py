"""Branches, exits, barriers, fences and traps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.errors import ExecutionError, ParseError
from tessera.interp.target.ptx.address import number_or
from tessera.interp.target.ptx.barriers import MANY, Parked
from tessera.interp.target.ptx.decode import CONTROL, Decoder, modifiers, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Step
from tessera.interp.target.ptx.operands import Jump, Reader, constant
from tessera.interp.target.ptx.stack import Instance
from tessera.interp.target.ptx.syntax import Instruction, Name, Number, Operand, Targets
from tessera.interp.target.ptx.types import TYPES


@rule("bra", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    modifiers(d, inst, "uni", types=0)
    target = _label(d, inst.operands[0], inst)
    _transfer(d, inst, line, lambda m, lanes: m.push(target, lanes))


def _label(d: Decoder, operand: Operand, inst: Instruction) -> int:
    """Where a branch goes."""
    found = d.resolve(operand.text, inst.location) if isinstance(operand, Name) else None
    if not isinstance(found, Jump):
        raise Fault("a branch to what is no label", ParseError)
    return d.labels[found]


@rule("brx", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    index, name = d.reader(inst.operands[0], TYPES["u32"]), inst.operands[1]
    modifiers(d, inst, "idx", "uni", types=0)
    assert isinstance(name, Name)
    listed = d.resolve(name.text, inst.location)
    assert isinstance(listed, Targets)
    targets = [_label(d, Name(t), inst) for t in listed.labels]

    def go(m: Machine, lanes: Lanes) -> None:
        chosen = index(m, lanes)
        if (bad := lanes.select(chosen >= len(targets))).count:
            raise Fault("an index beyond the targets", ExecutionError, int(bad.flat[0]))
        for k, pc in enumerate(targets):
            m.push(pc, lanes.select(chosen == k))

    _transfer(d, inst, line, go)


@rule("ret", "exit", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    modifiers(d, inst, "uni", types=0)
    if inst.op[0] == "ret" and d.names.end >= 0:
        end, instance = d.names.end, d.names.instance
        if instance is None:
            _transfer(d, inst, line, lambda m, lanes: m.push(d.labels[end], lanes))
        else:
            _transfer(d, inst, line, lambda m, lanes: _leave(m, lanes, instance, d.labels[end]))
    else:
        _transfer(d, inst, line, lambda m, lanes: m.exit(lanes))


def _leave(m: Machine, lanes: Lanes, instance: Instance, end: int) -> None:
    if m.stack is None:
        m.push(end, lanes)
    else:
        m.stack.leave(m, lanes, instance, end)


@rule("alloca", "stacksave", "stackrestore", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """Local memory as it is needed: the place of so many bytes, and the top of the stack kept and set."""
    d.program.stack = True
    line.step = {"alloca": _allocate, "stacksave": _save, "stackrestore": _restore}[inst.op[0]](d, inst)


def _allocate(d: Decoder, inst: Instruction) -> Step:
    t, align = TYPES[inst.op[-1]], number_or(inst.operands, 2, 8)
    write, size = d.writer(inst.operands[0], t), d.reader(inst.operands[1], t)
    assert isinstance(align, Number)
    return lambda m, lanes: write(
        m, lanes, m.stack.allocate(m, lanes, size(m, lanes).astype(np.uint64), align.value).astype(t.dtype)
    )


def _save(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[inst.op[-1]]
    write = d.writer(inst.operands[0], t)
    return lambda m, lanes: write(m, lanes, lanes.spread(m.stack.top[lanes.flat]).astype(t.dtype))


def _restore(d: Decoder, inst: Instruction) -> Step:
    read = d.reader(inst.operands[0], TYPES[inst.op[-1]])
    return lambda m, lanes: m.stack.release(m, lanes, read(m, lanes).astype(np.uint64))


@rule("trap", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    def stop(m: Machine, lanes: Lanes) -> None:
        raise Fault("the program trapped", ExecutionError, int(lanes.flat[0]))

    _transfer(d, inst, line, stop)


@rule("brkpt")
def _(d: Decoder, inst: Instruction) -> Step:
    """No debugger is attached: execution goes on."""
    return lambda m, lanes: None


def _transfer(d: Decoder, inst: Instruction, line: Line, go: Step) -> None:
    guard = d.reader(inst.guard, TYPES["pred"]) if inst.guard else None

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        if guard is None:
            go(m, lanes)
            return
        taken = guard(m, lanes)
        some, rest = lanes.select(taken), lanes.select(~taken)
        m.push(pc + 1, rest)
        if some.count:
            go(m, some)

    line.control = control


@rule("nanosleep", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """However long: until all others have run as far as they can."""
    _transfer(d, inst, line, lambda m, lanes: m.doze(m.pc + 1, lanes))


@rule("bar", "barrier", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """`barrier.cluster` and `bar.warp` have rules of their own (cluster.py, warp.py)."""
    found = BARRIER_KINDS.get(inst.op[1])
    if found is not None:
        found(d, inst, line)
        return
    words = [w for w in inst.op[1:] if w not in ("cta", "aligned")]
    kinds = {"sync": _sync, "arrive": _arrive, "red": _reduce}
    kinds[words[0]](d, inst, line, words[1:])


BARRIER_KINDS: dict[str, Callable[[Decoder, Instruction, Line], None]] = {}


def _place(d: Decoder, inst: Instruction, first: int = 0) -> tuple[Reader, Reader]:
    u32, given = TYPES["u32"], inst.operands[first]
    if isinstance(given, Number) and not 0 <= given.value < MANY:
        raise Fault("a barrier number beyond 15", ExecutionError)
    name = d.reader(given, u32)
    return name, d.reader(number_or(inst.operands, first + 1, 0), u32)


def _flat(read: Reader, m: Machine, lanes: Lanes) -> np.ndarray:
    return lanes.compress(read(m, lanes)).astype(np.int64)


def _named(m: Machine, lanes: Lanes, name: Reader) -> np.ndarray:
    ids = _flat(name, m, lanes)
    if len(ids) and int(ids.max()) >= MANY:
        raise Fault("a barrier number beyond 15", ExecutionError, int(lanes.flat[np.argmax(ids)]))
    return ids


def _sync(d: Decoder, inst: Instruction, line: Line, words: list[str]) -> None:
    if words:
        raise d.unsupported(inst)
    name, need = _place(d, inst)
    whole = len(inst.operands) == 1 and isinstance(inst.operands[0], Number)

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        if whole and not m.debug and m.barriers.quick(lanes):
            m.push(pc + 1, lanes)
            return
        m.barriers.wait(Parked(pc, lanes.flat, _named(m, lanes, name), _flat(need, m, lanes)))

    line.control = control


def _arrive(d: Decoder, inst: Instruction, line: Line, words: list[str]) -> None:
    if words:
        raise d.unsupported(inst)
    name, need = _place(d, inst)

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        m.push(pc + 1, lanes)
        m.barriers.arrive(lanes, _named(m, lanes, name), _flat(need, m, lanes))

    line.control = control


def _reduce(d: Decoder, inst: Instruction, line: Line, words: list[str]) -> None:
    kind, out = words[0], TYPES[words[1]]
    write = d.writer(inst.operands[0], out)
    need: Reader = constant(np.array([[0]], np.uint32))
    name = d.reader(inst.operands[1], TYPES["u32"])
    if len(inst.operands) == 4:
        need = d.reader(inst.operands[2], TYPES["u32"])
    vote = d.reader(inst.operands[-1], TYPES["pred"])
    result = {
        "popc": lambda votes, total: votes,
        "and": lambda votes, total: votes == total,
        "or": lambda votes, total: votes > 0,
    }[kind]

    def deliver(m: Machine, lanes: Lanes, votes: np.ndarray, total: np.ndarray) -> None:
        write(m, lanes, lanes.spread(result(votes, total)))

    def control(m: Machine, lanes: Lanes, pc: int) -> None:
        votes = lanes.compress(vote(m, lanes))
        m.barriers.wait(
            Parked(pc, lanes.flat, _named(m, lanes, name), _flat(need, m, lanes), votes.astype(np.int64), deliver)
        )

    line.control = control


@rule("membar", "fence")
def _(d: Decoder, inst: Instruction) -> Step:
    """Memory is sequentially consistent here; only the proxy of asynchronous copies has something to wait for."""
    if "proxy" in inst.op:
        return lambda m, lanes: m.shadow.fence(lanes) if m.debug else None
    return lambda m, lanes: None
