"""The libraries `<collectives_2d/params>` and `<collectives_2d/pe>`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.csl import collectives
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.collectives import OVERHEAD, RELAY, Line, Part, Thread
from tessera.interp.target.csl.faults import CslError, CslFault
from tessera.interp.target.csl.values import ColorConfig, NativeFunction, Pointer, Value

WAYS = {"x": ("WEST", "EAST", False), "y": ("NORTH", "SOUTH", True)}
# A color of the library between operations.
RESTING = ColorConfig(("RAMP",), ("RAMP",), teardown=True)
EITHER = t.Pointee("", t.U32, many=True)
FLOATS = t.Pointee("", t.F32, many=True)


def params_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """`get_params(Px, Py, ids)`: the axes for which colors are given; the same struct for every PE."""

    def get_params(unit: Any, x: Value, y: Value, ids: Value) -> Value:
        axes = {axis: axis_params(axis, ids.data) for axis in WAYS if f"{axis}_colors" in ids.data}
        if not axes:
            raise CslError("collectives_2d needs x_colors or y_colors", expected=".x_colors = .{ c0, c1 }, …")
        return Value(t.ANON, axes)

    kind = t.Fn("", (None, None, None), t.ANON)
    return {"get_params": Value(kind, NativeFunction("get_params", get_params, comptime=True))}


def axis_params(axis: str, ids: dict[str, Value]) -> Value:
    """What `<collectives_2d/pe>` gets as `dim_params`.

    Raises:
        CslError: not two distinct colors or task ids.
    """
    for name in ("colors", "entrypoints"):
        given = ids.get(f"{axis}_{name}")
        found = [value.data for value in given.data.values()] if given else []
        if len(set(found)) != 2 or len(found) != 2:
            raise CslError(f"collectives_2d needs two distinct {axis}_{name}", received=str(found))
    fields = {"axis": Value(t.STRING, axis), "colors": ids[f"{axis}_colors"]}
    return Value(t.ANON, fields)


def pe_module(unit: Any, params: dict[str, Value]) -> dict[str, Any]:
    """The operations along one axis, and `pe_id`, this PE's number on its line, which `init()` sets."""
    if "dim_params" not in params:
        raise CslError("collectives_2d/pe needs dim_params", expected="the x or y field of what get_params() gave")
    fields = params["dim_params"].data
    colors = tuple(int(value.data) for value in fields["colors"].data.values())
    line = Line((colors[0], colors[1]), *WAYS[fields["axis"].data])
    number = unit.variable("pe_id", t.U16, 0)
    for color in line.colors:
        unit.set_color(color, RESTING)

    def init(pe: Any) -> None:
        pe.memory(number)[0] = line.place(pe)

    def operation(name: str, thread: Callable[..., Thread], kinds: tuple[t.Type, ...], sizes: Callable) -> Value:
        def run(pe: Any, root: int, *args: Any) -> None:
            *pointers, count, callback = args
            part = Part(line, pe, int(root))
            if part.root > part.last:
                raise CslFault(f"{name}: root {part.root} is not on a line of {part.last + 1} PEs")
            buffers = [words(name, p, n) for p, n in zip(pointers, sizes(part, int(count)), strict=True)]
            relays = thread is not collectives.broadcast and part.distance > 0 and part.beyond > 0
            pe.spawn(started(pe, thread(part, *buffers), relays), lambda: pe.activate(int(callback)), name)

        return Value(
            t.Fn("", (t.U16, *kinds, t.U16, t.LOCAL_TASK), t.VOID),
            NativeFunction(name, run, cycles=20, apart=True, live=True),
        )

    pair = (EITHER, EITHER)
    return {
        "pe_id": number,
        "init": Value(t.Fn("", (), t.VOID), NativeFunction("init", init, cycles=40, live=True)),
        "broadcast": operation("broadcast", collectives.broadcast, (EITHER,), lambda part, n: (n,)),
        "scatter": operation("scatter", collectives.scatter, pair, lambda part, n: (at_root(part, n), n)),
        "gather": operation("gather", collectives.gather, pair, lambda part, n: (n, at_root(part, n))),
        "reduce_fadds": operation("reduce_fadds", collectives.reduce_fadds, (FLOATS, FLOATS), lambda part, n: (n, n)),
    }


def at_root(part: Part, count: int) -> int:
    """The words of the buffer that only the root uses."""
    return count * (part.last + 1) if part.distance == 0 else 0


def started(pe: Any, thread: Thread, relays: bool) -> Thread:
    """The thread after what the library does first; more on a PE that passes words on (routers pass a broadcast's)."""
    yield pe.clock + OVERHEAD + RELAY * relays
    yield from thread


def words(name: str, pointer: Pointer, count: int) -> np.ndarray:
    """The 32-bit words at a pointer.

    Raises:
        CslFault: the variable there holds fewer.
    """
    array, index = pointer
    found = array.reshape(-1)[index : index + count] if array.itemsize == 4 else None
    if found is None or found.size < count:
        raise CslFault(
            f"{name} of {count} words passes the end of its buffer", received=f"{array.size - index} elements"
        )
    return found.view(np.uint32)
