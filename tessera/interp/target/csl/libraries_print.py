"""The libraries `<debug>` and `<simprint>`: records for the host, and text in the log of the simulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError, CslFault
from tessera.interp.target.csl.values import NativeFunction, Value

Members = dict[str, Value]
_FIELD = re.compile(r"\{\{|\{(.?)\}")


def _live(
    name: str, params: tuple[t.Type | None, ...], run: Callable[..., Any], cycles: int = 4, typed: bool = False
) -> Value:
    return Value(t.Fn("", params, t.VOID), NativeFunction(name, run, cycles=cycles, live=True, typed=typed))


def debug_module(unit: Any, params: Members) -> Members:
    """Records of a run, by `key`, for the host to read."""
    if "key" not in params:
        raise CslError("<debug> needs the parameter 'key'")
    key, size = params["key"].data, int(params["buffer_size"].data) if "buffer_size" in params else 0

    def record(pe: Any, value: Any) -> None:
        rows = pe.traces.setdefault(key, [])
        if size and len(rows) >= size:
            raise CslFault(f"the trace buffer '{key}' of {size} words is full")
        rows.append(value)

    half = t.NAMED[unit.options.fp16_format]
    kinds = {str(x): x for x in (t.BOOL, t.I8, t.U8, t.I16, t.U16, t.I32, t.U32, t.F32)} | {"f16": half}
    found = {f"trace_{name}": _live(f"trace_{name}", (x,), record, 12) for name, x in kinds.items()}
    found["trace_string"] = _live("trace_string", (t.STRING,), record, 12)
    found["trace"] = _live("trace", (None,), record, 12)
    found["trace_timestamp"] = _live("trace_timestamp", (), lambda pe: record(pe, pe.clock), 16)
    return found


def printed(pe: Any, text: str) -> None:
    """Add text to what the PE prints; each full line goes to `pe.output`."""
    *lines, rest = (pe.state.get("line", "") + text).split("\n")
    pe.output.extend(lines)
    pe.state["line"] = rest


_SPELLED: dict[str, Callable[[Any, int], str]] = {
    "d": lambda v, bits: str(v),
    "X": lambda v, bits: f"{v:0{bits // 4}X}",
    "b": lambda v, bits: f"{v:0{bits}b}",
    "f": lambda v, bits: str(v),
}


def formatted(text: str, values: list[Any], bits: list[int]) -> str:
    """A format string with its values, which have so many bits.

    >>> formatted("{d} {X} {{b}", [42, 42], [16, 16])
    '42 002A {b}'
    """
    left = iter(zip(values, bits, strict=True))

    def spell(match: re.Match[str]) -> str:
        if match.group() == "{{":
            return "{"
        if match.group(1) not in _SPELLED:
            raise CslFault(f"'{match.group()}' is no format", expected="{d}, {X}, {b} or {f}")
        found = next(left, None)
        if found is None:
            raise CslFault(f"'{text}' has more fields than values", received=str(len(values)))
        return _SPELLED[match.group(1)](*found)

    return _FIELD.sub(spell, text)


def simprint_module(unit: Any, params: Members) -> Members:
    """Text in the log of the simulation; nothing with the parameter `enable` set to false."""
    on = bool(params["enable"].data) if "enable" in params else True

    def put(pe: Any, text: str) -> None:
        if on:
            printed(pe, text)

    def number(name: str, type_: t.Type, spell: Callable[[Any], str]) -> Value:
        return _live(name, (type_,), lambda pe, v: put(pe, spell(v)))

    def fmt(name: str, spell: Callable[[Any, str], str]) -> Value:
        def run(pe: Any, types: tuple[t.Type, ...], text: str, args: dict[str, Any]) -> None:
            put(pe, spell(pe, formatted(text, list(args.values()), [8 * x.size for x in types])))

        return _live(name, (t.STRING, None), run, 40, typed=True)

    half = t.NAMED[unit.options.fp16_format]
    rows = [
        number("print_string", t.STRING, str),
        number("print_bool", t.BOOL, lambda v: "true" if v else "false"),
        *(number(f"print_{x}_decimal", x, str) for x in (t.I16, t.U16, t.I32, t.U32)),
        *(number(f"print_{x}_hex", x, f"{{:0{2 * x.size}x}}".format) for x in (t.U16, t.U32)),
        *(number(f"print_{x}_binary", x, f"{{:0{8 * x.size}b}}".format) for x in (t.U16, t.U32)),
        number("print_f16", half, str),
        number("print_f32", t.F32, str),
        fmt("fmt", lambda pe, text: text + "\n"),
        fmt("fmt_no_nl", lambda pe, text: text),
        fmt("fmt_with_coords", lambda pe, text: f"PE({pe.x},{pe.y}): {text}\n"),
    ]
    return {row.data.name: row for row in rows}
