"""Host communication libraries: `<memcpy/…>`, `<debug>` (trace records) and `<simprint>` (log text)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tessera.interp.target.csl.fabric.routing import Opcode, encode_payload
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ComptimeValue, Fabout, NativeFunction
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

# The libraries `<memcpy/get_params>`, `<memcpy/memcpy>` and `<memcpy/memcpy_switches>`. The first two are named
# `<memcpy_multi/…>` in the SDKs before 1.0.


STREAM_COLORS = tuple(f"MEMCPY{way}_{number}" for way in ("H2D", "D2H") for number in range(1, 5))
LAUNCH_COLOR = "LAUNCH"  # the launch color, which programs for early SDKs name


def make_memcpy_params(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`get_params(x)`: the parameters of `<memcpy/memcpy>` for column x; equal for every column."""
    unknown = [name for name in params if name not in ("width", "height", LAUNCH_COLOR, *STREAM_COLORS)]
    if unknown or "width" not in params or "height" not in params:
        raise CslError(
            "wrong parameters of <memcpy/get_params>",
            expected="width, height, and colors MEMCPYH2D_1 … MEMCPYD2H_4",
            received=", ".join(params),
        )
    width = int(params["width"].data)

    def get_params(unit: Any, x: ComptimeValue) -> ComptimeValue:
        if not 0 <= int(x.data) < width:
            raise CslError(f"get_params({x.data}) is not a column of the program", expected=f"0 to {width - 1}")
        missing = {
            name: ComptimeValue(t.VOID, None) for name in STREAM_COLORS
        }  # programs compare a color's type with void
        return ComptimeValue(t.ANON, {**missing, **params})

    kind = t.CslFunctionType("", (None,), t.ANON)
    return {"get_params": ComptimeValue(kind, NativeFunction("get_params", get_params, comptime=True))}


def make_memcpy(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """The colors of streams, and `unblock_cmd_stream()`."""

    def unblock(pe: Any) -> None:
        pe.state["memcpy"].unblock(pe.clock)

    colors = {name: value for name, value in params.items() if name in (LAUNCH_COLOR, *STREAM_COLORS)}
    function = NativeFunction("unblock_cmd_stream", unblock, cycles=4, deferrable=True, live=True)
    streaming = NativeFunction("get_streaming_fabout_dsd", make_streaming_fabout)
    return {
        **colors,
        "unblock_cmd_stream": ComptimeValue(t.CslFunctionType("", (), t.VOID), function),
        "get_streaming_fabout_dsd": ComptimeValue(
            t.CslFunctionType("", (t.COLOR, t.U16, t.OUTPUT_QUEUE), t.FABOUT), streaming
        ),
    }


def make_streaming_fabout(pe: Any, color: int, extent: int, queue: int) -> Fabout:
    """A DSD that sends `extent` wavelets to the host."""
    return Fabout(color, extent, queue)


def make_early(factory: Callable[..., dict[str, ComptimeValue]]) -> Callable[..., dict[str, ComptimeValue]]:
    """A library of the SDKs before 1.0, which other versions refuse."""

    def make(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
        if not unit.options.early:
            raise CslError(
                f"the library <memcpy_multi> does not exist in SDK {unit.options.sdk}",
                suggestion="import <memcpy/…>, or compile a program for an earlier SDK with --sdk 0.9",
            )
        return factory(unit, params)

    return make


def make_memcpy_switches(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """Payloads of control wavelets: `ctrl(switch_cmd_11())` advances two routers, `ctrl(teardown_cmd_1())` tears a
    color down.
    """

    def command(name: str, opcodes: list[Opcode]) -> ComptimeValue:
        payload = encode_payload([(opcode, True) for opcode in opcodes])
        run = NativeFunction(name, lambda unit: ComptimeValue(t.U32, payload), comptime=True)
        return ComptimeValue(t.CslFunctionType("", (), t.U32), run)

    advance = {f"switch_cmd_{'1' * n}": command(f"switch_cmd_{'1' * n}", [Opcode.SWITCH_ADV] * n) for n in (1, 2, 3, 4)}
    ctrl = NativeFunction("ctrl", lambda unit, payload: payload, comptime=True)
    return {
        **advance,
        "teardown_cmd_1": command("teardown_cmd_1", [Opcode.TEARDOWN]),
        "ctrl": ComptimeValue(t.CslFunctionType("", (t.U32,), t.U32), ctrl),
    }


# The libraries `<debug>` and `<simprint>`.


Members = dict[str, ComptimeValue]
_FORMAT_FIELD = re.compile(r"\{\{|\{(.?)\}")


def _make_printer(
    name: str, params: tuple[t.CslType | None, ...], run: Callable[..., Any], cycles: int = 4, typed: bool = False
) -> ComptimeValue:
    return ComptimeValue(
        t.CslFunctionType("", params, t.VOID), NativeFunction(name, run, cycles=cycles, live=True, typed=typed)
    )


def make_debug(unit: Any, params: Members) -> Members:
    """Records of a run by `key`, which the host reads."""
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
    members = {f"trace_{name}": _make_printer(f"trace_{name}", (x,), record, 12) for name, x in kinds.items()}
    members["trace_string"] = _make_printer("trace_string", (t.STRING,), record, 12)
    members["trace"] = _make_printer("trace", (None,), record, 12)
    members["trace_timestamp"] = _make_printer("trace_timestamp", (), lambda pe: record(pe, pe.clock), 16)
    return members


def print_text(pe: Any, text: str) -> None:
    """Print text; each full line goes to `pe.output`."""
    *lines, rest = (pe.state.get("line", "") + text).split("\n")
    pe.output.extend(lines)
    pe.state["line"] = rest


_FORMATS: dict[str, Callable[[Any, int], str]] = {
    "d": lambda v, bits: str(v),
    "X": lambda v, bits: f"{v:0{bits // 4}X}",
    "b": lambda v, bits: f"{v:0{bits}b}",
    "f": lambda v, bits: str(v),
}


def format_text(text: str, values: list[Any], bits: list[int]) -> str:
    """A format string with its values, which have `widths` bits.

    >>> format_text("{d} {X} {{b}", [42, 42], [16, 16])
    '42 002A {b}'
    """
    left = iter(zip(values, bits, strict=True))

    def spell(match: re.Match[str]) -> str:
        if match.group() == "{{":
            return "{"
        if match.group(1) not in _FORMATS:
            raise CslFault(f"'{match.group()}' is no format", expected="{d}, {X}, {b} or {f}")
        found = next(left, None)
        if found is None:
            raise CslFault(f"'{text}' has more fields than values", received=str(len(values)))
        return _FORMATS[match.group(1)](*found)

    return _FORMAT_FIELD.sub(spell, text)


def make_simprint(unit: Any, params: Members) -> Members:
    """Text in the log of the simulation; the parameter `enable` set to false disables it."""
    on = bool(params["enable"].data) if "enable" in params else True

    def put(pe: Any, text: str) -> None:
        if on:
            print_text(pe, text)

    def number(name: str, type_: t.CslType, spell: Callable[[Any], str]) -> ComptimeValue:
        return _make_printer(name, (type_,), lambda pe, v: put(pe, spell(v)))

    def fmt(name: str, spell: Callable[[Any, str], str]) -> ComptimeValue:
        def run(pe: Any, types: tuple[t.CslType, ...], text: str, args: dict[str, Any]) -> None:
            put(pe, spell(pe, format_text(text, list(args.values()), [8 * x.size for x in types])))

        return _make_printer(name, (t.STRING, None), run, 40, typed=True)

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
