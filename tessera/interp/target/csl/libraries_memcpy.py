"""The libraries `<memcpy/get_params>`, `<memcpy/memcpy>` and `<memcpy/memcpy_switches>`."""

from __future__ import annotations

from typing import Any

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError
from tessera.interp.target.csl.values import Fabout, NativeFunction, Value
from tessera.interp.target.csl.wavelets import Opcode, encode

COLORS = tuple(f"MEMCPY{way}_{number}" for way in ("H2D", "D2H") for number in range(1, 5))
OLDER = "LAUNCH"  # the color of launches, which programs for the first SDKs name


def get_params_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """`get_params(x)`: what a PE of column x gives to `<memcpy/memcpy>`; the same for every column."""
    unknown = [name for name in params if name not in ("width", "height", OLDER, *COLORS)]
    if unknown or "width" not in params or "height" not in params:
        raise CslError(
            "the parameters of <memcpy/get_params> do not fit",
            expected="width, height, and colors MEMCPYH2D_1 … MEMCPYD2H_4",
            received=", ".join(params),
        )
    width = int(params["width"].data)

    def get_params(unit: Any, x: Value) -> Value:
        if not 0 <= int(x.data) < width:
            raise CslError(f"get_params({x.data}) is not a column of the program", expected=f"0 to {width - 1}")
        missing = {name: Value(t.VOID, None) for name in COLORS}  # programs ask whether a color's type is void
        return Value(t.ANON, {**missing, **params})

    kind = t.Fn("", (None,), t.ANON)
    return {"get_params": Value(kind, NativeFunction("get_params", get_params, comptime=True))}


def memcpy_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """The colors of streams, and `unblock_cmd_stream()`."""

    def unblock(pe: Any) -> None:
        pe.state["memcpy"].unblock(pe.clock)

    colors = {name: value for name, value in params.items() if name in (OLDER, *COLORS)}
    function = NativeFunction("unblock_cmd_stream", unblock, cycles=4, apart=True, live=True)
    streaming = NativeFunction("get_streaming_fabout_dsd", streaming_fabout)
    return {
        **colors,
        "unblock_cmd_stream": Value(t.Fn("", (), t.VOID), function),
        "get_streaming_fabout_dsd": Value(t.Fn("", (t.COLOR, t.U16, t.OUTPUT_QUEUE), t.FABOUT), streaming),
    }


def streaming_fabout(pe: Any, color: int, extent: int, queue: int) -> Fabout:
    """A descriptor that sends `extent` wavelets to the host."""
    return Fabout(color, extent, queue)


def switches_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """Payloads of control words: `ctrl(switch_cmd_11())` advances two routers, `ctrl(teardown_cmd_1())` tears down."""

    def command(name: str, opcodes: list[Opcode]) -> Value:
        payload = encode([(opcode, True) for opcode in opcodes])
        run = NativeFunction(name, lambda unit: Value(t.U32, payload), comptime=True)
        return Value(t.Fn("", (), t.U32), run)

    advance = {f"switch_cmd_{'1' * n}": command(f"switch_cmd_{'1' * n}", [Opcode.SWITCH_ADV] * n) for n in (1, 2, 3, 4)}
    ctrl = NativeFunction("ctrl", lambda unit, payload: payload, comptime=True)
    return {
        **advance,
        "teardown_cmd_1": command("teardown_cmd_1", [Opcode.TEARDOWN]),
        "ctrl": Value(t.Fn("", (t.U32,), t.U32), ctrl),
    }
