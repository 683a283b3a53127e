"""System calls: vprintf and __assertfail."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from tessera.core.errors import ExecutionError
from tessera.interp.target.ptx.isa.addressing import check_address, split_by_state_space
from tessera.interp.target.ptx.isa.decoder import DECODE_RULES, SYSTEM_FUNCTIONS, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.operands import PtxVariableAddress
from tessera.interp.target.ptx.machine.lane_set import LaneSet, make_single_lane
from tessera.interp.target.ptx.machine.memory import GENERIC_WINDOWS, PtxFault
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import NameOperand, PtxInstruction, VectorOperand, get_callee_operand

_CONVERSION = re.compile(r"%([-+ #0]*)(\d+|\*)?(\.(?:\d+|\*)?)?(hh|h|ll|l|j|z|t)?([diouxXcsfFeEgGaAp%])")
_FLOATS, _WIDE, _NARROW = "fFeEgGaA", ("ll", "l", "j", "z", "t"), {"hh": 1, "h": 2}


@decode_rule("call", table=DECODE_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    return SYSTEM_FUNCTIONS[get_callee_operand(inst).text](d, inst)


def _call_operand_addresses(d: PtxDecoder, inst: PtxInstruction) -> tuple[list[int], list[int]]:
    """The addresses of results and arguments in local memory."""
    groups = [[_find_local_address(d, o) for o in g.parts] for g in inst.operands if isinstance(g, VectorOperand)]
    return (groups[0], groups[1]) if len(groups) == 2 else ([], groups[0])


def _find_local_address(d: PtxDecoder, operand: Any) -> int:
    result = d.resolve(operand.text) if isinstance(operand, NameOperand) else None
    assert isinstance(result, PtxVariableAddress) and result.space == "local"
    return result.address


def _read_local_number(m: PtxMachine, lane: int, address: int, size: int) -> int:
    """An integer in a lane's local memory."""
    start = m.find_local_offset(lane, address)
    return int.from_bytes(m.flat["local"].raw[start : start + size].tobytes(), "little")


def _load_generic(m: PtxMachine, lane: int, address: int, size: int) -> bytes:
    """The bytes at a generic address."""
    format_one, at = make_single_lane(lane, m.extent), np.array([[address]], np.uint64)
    ((_, space),) = split_by_state_space(at, format_one)
    within = at if space == "global" else at - np.uint64(GENERIC_WINDOWS[space])
    start = int(check_address(m, space, within, format_one, size, 1).reshape(-1)[0])
    return m.flat[space].raw[start : start + size].tobytes()


def _read_string(m: PtxMachine, lane: int, address: int) -> str:
    result = bytearray()
    while (byte := _load_generic(m, lane, address + len(result), 1)) != b"\0":
        result += byte
    return result.decode("utf-8", "replace")


@decode_rule("vprintf", table=SYSTEM_FUNCTIONS)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Print at once, lane by lane."""
    results, (form, values) = _call_operand_addresses(d, inst)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for lane in lanes.flat.tolist():
            text, count = _format_printf(
                m,
                lane,
                _read_string(m, lane, _read_local_number(m, lane, form, 8)),
                _read_local_number(m, lane, values, 8),
            )
            sys.stdout.write(text)
            for position in results:
                start = m.find_local_offset(lane, position)
                m.flat["local"].raw[start : start + 4] = np.frombuffer(count.to_bytes(4, "little"), np.uint8)
                if m.debug:
                    m.shadow.local[start : start + 4] = True

    return step


def _format_printf(m: PtxMachine, lane: int, form: str, buffer: int) -> tuple[str, int]:
    """A format filled with arguments from a buffer, each aligned to its size; the number of arguments."""
    position, count = 0, 0

    def take(size: int) -> bytes:
        nonlocal position, count
        position = -(-position // size) * size + size
        count += 1
        return _load_generic(m, lane, buffer + position - size, size)

    def format_one(result: re.Match[str]) -> str:
        flags, length, kind = result[1], result[4] or "", result[5]
        if kind == "%":
            return "%"
        # A width or precision of `*` is an argument before the number.
        width, precision = (
            (part or "").replace(
                "*", str(int.from_bytes(take(4), "little", signed=True)) if "*" in (part or "") else ""
            )
            for part in result.group(2, 3)
        )
        raw = take(8 if kind in _FLOATS + "sp" or length in _WIDE else 4)[: _NARROW.get(length)]
        return _format_printf_argument(m, lane, f"%{flags}{width}{precision}", kind, raw)

    return _CONVERSION.sub(format_one, form), count


def _format_printf_argument(m: PtxMachine, lane: int, shape: str, kind: str, raw: bytes) -> str:
    """One argument, formatted as in C; Python differs in `%a` and in `#` with `%o`."""
    if kind in _FLOATS:
        value = float(np.frombuffer(raw, np.float64)[0])
        return _format_hex_float(shape, value, kind) if kind in "aA" else f"{shape}{kind}" % value
    number = int.from_bytes(raw, "little", signed=kind in "di")
    if kind == "s":
        return f"{shape}s" % (_read_string(m, lane, number) if number else "(null)")
    if kind == "p":
        return f"{shape}s" % (f"{number:#x}" if number else "(nil)")
    if kind == "c":
        return f"{shape}s" % chr(number & 0xFF)
    if kind == "o" and "#" in shape:
        return f"{shape.replace('#', '')}s" % f"0{number:o}"
    return f"{shape}{'d' if kind == 'u' else kind}" % number


def _format_hex_float(shape: str, value: float, kind: str) -> str:
    """`%a`: hexadecimal digits without trailing zeros."""
    text = re.sub(r"\.?0*p", "p", value.hex()) if np.isfinite(value) else str(value)
    sign = "+" if "+" in shape and not text.startswith("-") else ""
    return f"%{shape.strip('%+ #0')}s" % (sign + (text.upper() if kind == "A" else text))


@decode_rule("__assertfail", table=SYSTEM_FUNCTIONS)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    _, (message, file, line, function, *_) = _call_operand_addresses(d, inst)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        lane = int(lanes.flat[0])
        text, where, name = (
            _read_string(m, lane, _read_local_number(m, lane, p, 8)) for p in (message, file, function)
        )
        raise PtxFault(
            f"assertion `{text}` failed in {name} at {where}:{_read_local_number(m, lane, line, 4)}",
            ExecutionError,
            lane,
        )

    return step
