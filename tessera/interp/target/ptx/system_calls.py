"""Functions that the system provides: vprintf, and what a failed assertion calls."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.target.ptx.address import locate, windows
from tessera.interp.target.ptx.decode import EXTERNAL, RULES, Decoder, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes, single
from tessera.interp.target.ptx.machine import Machine, Step
from tessera.interp.target.ptx.memory import WINDOWS
from tessera.interp.target.ptx.operands import Place
from tessera.interp.target.ptx.syntax import Group, Instruction, Name, called

_CONVERSION = re.compile(r"%([-+ #0]*)(\d+|\*)?(\.(?:\d+|\*)?)?(hh|h|ll|l|j|z|t)?([diouxXcsfFeEgGaAp%])")
_FLOATS, _WIDE, _NARROW = "fFeEgGaA", ("ll", "l", "j", "z", "t"), {"hh": 1, "h": 2}


@rule("call", table=RULES)
def _(d: Decoder, inst: Instruction) -> Step:
    return EXTERNAL[called(inst).text](d, inst)


def _places(d: Decoder, inst: Instruction) -> tuple[list[int], list[int]]:
    """Where results and arguments lie in local memory."""
    groups = [[_place(d, o) for o in g.parts] for g in inst.operands if isinstance(g, Group)]
    return (groups[0], groups[1]) if len(groups) == 2 else ([], groups[0])


def _place(d: Decoder, operand: Any) -> int:
    found = d.resolve(operand.text) if isinstance(operand, Name) else None
    assert isinstance(found, Place) and found.space == "local"
    return found.address


def _local(m: Machine, lane: int, address: int, size: int) -> int:
    """A number in a lane's local memory."""
    start = m.local_start(lane, address)
    return int.from_bytes(m.flat["local"].raw[start : start + size].tobytes(), "little")


def _load(m: Machine, lane: int, address: int, size: int) -> bytes:
    """Bytes at a generic address."""
    one, at = single(lane, m.extent), np.array([[address]], np.uint64)
    ((_, space),) = windows(at, one)
    within = at if space == "global" else at - np.uint64(WINDOWS[space])
    start = int(locate(m, space, within, one, size, 1).reshape(-1)[0])
    return m.flat[space].raw[start : start + size].tobytes()


def _string(m: Machine, lane: int, address: int) -> str:
    found = bytearray()
    while (byte := _load(m, lane, address + len(found), 1)) != b"\0":
        found += byte
    return found.decode("utf-8", "replace")


@rule("vprintf", table=EXTERNAL)
def _(d: Decoder, inst: Instruction) -> Step:
    """Printed when it is executed, lane by lane."""
    results, (form, values) = _places(d, inst)

    def step(m: Machine, lanes: Lanes) -> None:
        for lane in lanes.flat.tolist():
            text, many = _formatted(m, lane, _string(m, lane, _local(m, lane, form, 8)), _local(m, lane, values, 8))
            sys.stdout.write(text)
            for place in results:
                start = m.local_start(lane, place)
                m.flat["local"].raw[start : start + 4] = np.frombuffer(many.to_bytes(4, "little"), np.uint8)
                if m.debug:
                    m.shadow.local[start : start + 4] = True

    return step


def _formatted(m: Machine, lane: int, form: str, buffer: int) -> tuple[str, int]:
    """A format with its arguments, which lie in a buffer, each aligned to its size."""
    place, many = 0, 0

    def take(size: int) -> bytes:
        nonlocal place, many
        place = -(-place // size) * size + size
        many += 1
        return _load(m, lane, buffer + place - size, size)

    def one(found: re.Match[str]) -> str:
        flags, length, kind = found[1], found[4] or "", found[5]
        if kind == "%":
            return "%"
        # A width or precision given as `*` is an argument of its own, before the number.
        width, precision = (
            (part or "").replace(
                "*", str(int.from_bytes(take(4), "little", signed=True)) if "*" in (part or "") else ""
            )
            for part in found.group(2, 3)
        )
        raw = take(8 if kind in _FLOATS + "sp" or length in _WIDE else 4)[: _NARROW.get(length)]
        return _shown(m, lane, f"%{flags}{width}{precision}", kind, raw)

    return _CONVERSION.sub(one, form), many


def _shown(m: Machine, lane: int, shape: str, kind: str, raw: bytes) -> str:
    """One argument, as C shows it; Python's own formats differ in `%a` and in what `#` does to `%o`."""
    if kind in _FLOATS:
        value = float(np.frombuffer(raw, np.float64)[0])
        return _hexadecimal(shape, value, kind) if kind in "aA" else f"{shape}{kind}" % value
    number = int.from_bytes(raw, "little", signed=kind in "di")
    if kind == "s":
        return f"{shape}s" % (_string(m, lane, number) if number else "(null)")
    if kind == "p":
        return f"{shape}s" % (f"{number:#x}" if number else "(nil)")
    if kind == "c":
        return f"{shape}s" % chr(number & 0xFF)
    if kind == "o" and "#" in shape:
        return f"{shape.replace('#', '')}s" % f"0{number:o}"
    return f"{shape}{'d' if kind == 'u' else kind}" % number


def _hexadecimal(shape: str, value: float, kind: str) -> str:
    """`%a`: hexadecimal digits without zeros at their end."""
    text = re.sub(r"\.?0*p", "p", value.hex()) if np.isfinite(value) else str(value)
    sign = "+" if "+" in shape and not text.startswith("-") else ""
    return f"%{shape.strip('%+ #0')}s" % (sign + (text.upper() if kind == "A" else text))


@rule("__assertfail", table=EXTERNAL)
def _(d: Decoder, inst: Instruction) -> Step:
    _, (message, file, line, function, *_) = _places(d, inst)

    def step(m: Machine, lanes: Lanes) -> None:
        lane = int(lanes.flat[0])
        said, where, name = (_string(m, lane, _local(m, lane, p, 8)) for p in (message, file, function))
        raise Fault(f"assertion `{said}` failed in {name} at {where}:{_local(m, lane, line, 4)}", ExecutionError, lane)

    return step
