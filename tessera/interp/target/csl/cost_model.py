"""Cost model: the cycles of the parts of a program, each with its evidence (`docs/csl-cycles.md`).

The vendor documents the elements per cycle of vector operations and the width of a link. Everything here is fitted to
published counts of whole programs; `python -m benchmarks.csl_calibration` compares them. What the counts leave open has
a range in `RANGES`, and `tessera csl run --range` prints the cycles at both ends.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from typing import Any

from tessera.core.errors import ArgumentError

VARIABLE = "TESSERA_CSL_COSTS"


@dataclass(frozen=True)
class CostModel:
    """Cycles of each part. Pairs are those of (WSE-2, WSE-3)."""

    task_start: tuple[int, int] = (3, 4)  # a task after the previous one: slides of vectors; a stencil in tiles
    overlapped_start: tuple[int, int] = (0, 0)  # directly after a synchronous operation on the fabric: a bridge
    wavelet_start: tuple[int, int] = (0, 2)  # more for a data task on an idle PE: one wavelet through 8 PEs
    activation: int = 0  # more for a local task
    dsd_start: tuple[int, int] = (1, 2)  # an operation on loaded registers: a stencil of six operations of one element
    descriptor_load: int = 2  # a constant descriptor into a register: STREAM
    fabric_load: int = 1  # a constant fabric descriptor: slides of vectors
    local_load: tuple[int, int] = (4, 5)  # a descriptor in a local variable: products of matrices
    global_load: int = 6  # a descriptor in a global variable: a student's product, solvers
    constant_operand: int = 1  # a constant scalar operand: STREAM
    register_load: tuple[int, int] = (3, 2)  # `@load_to_dsr` of a memory descriptor: the stencil in tiles
    fabric_register_load: int = 3  # of a fabric descriptor: allreduce
    task_call: int = 4  # `@activate`: slides of vectors
    task_block: tuple[int, int] = (2, 4)  # `@block`, `@unblock`: slides in both directions; the stencil in tiles
    receive_end: int = 4  # from the last word that an asynchronous operation receives to its end: slides to the right
    launch: int = 0  # an asynchronous operation, beside its descriptors
    map_call: int = 1  # a call of `@map`: a product of a matrix and a vector on one PE
    local_change: int = 5  # `@increment_dsd_offset` and its relatives, of a local variable: products
    global_change: int = 10  # of a global variable, with the store: allreduce
    descriptor: int = 3  # `@get_dsd` of a local variable: slides to the right
    iteration: int = 5  # of a loop that is not unrolled: scalar loops
    branch: int = 2  # `if`
    element: int = 3  # an element at a computed index: scalar loops
    fixed_element: int = 1  # an element at a constant index
    assignment: int = 2  # to an element at a computed index
    fixed_assignment: int = 1  # to a variable or a constant index
    long_integer: int = 1  # more for 32-bit integers, and to store 32 bits
    declaration: int = 1
    cast: int = 3  # between integers and floats
    integer_cast: int = 1  # between integers: a wavelet that is sent on after a cast, over 4 x 4 PEs
    call: int = 0  # of a function: the vendor's compiler inlines
    argument: int = 0
    timestamp: int = 5  # `get_timestamp`: STREAM
    injection: tuple[int, int] = (4, 7)  # a word from its operation into the router: stencils, traces of a message
    hop: tuple[int, int] = (1, 2)  # from router to router: documented, traces of a message
    configuration: int = 10  # a call of `<tile_config>` that changes the router
    collective_setup: int = 510  # `<collectives_2d>`: before the first word of an operation
    collective_forwarding: int = 215  # more on a PE that forwards words
    fft_butterfly: int = 47  # `<kernels/fft>`: two sizes of the vendor's own program
    fft_transpose: int = 21  # a complex element of a transpose
    transfer: int = 140  # of the host, between two transfers: five programs with many launches
    stream: int = 1000  # after a host's stream, which has no acknowledgement


# The ends between which the counts do not decide: programs that depend on a part disagree about it.
RANGES: dict[str, tuple[Any, Any]] = {
    "task_start": ((2, 3), (4, 6)),
    "overlapped_start": ((0, 0), (3, 4)),
    "register_load": ((2, 2), (4, 3)),
    "task_call": (2, 5),
    "task_block": ((1, 4), (2, 5)),
    "local_load": ((4, 4), (6, 6)),
    "global_load": (4, 8),
    "local_change": (4, 8),
    "global_change": (8, 12),
    "map_call": (0, 5),
    "call": (0, 5),
    "argument": (0, 2),
    "injection": ((2, 6), (6, 10)),
    "collective_setup": (470, 560),
    "transfer": (120, 160),
}


def load_costs(text: str) -> CostModel:
    """The model that a text selects: `low` or `high` (the ends of `RANGES`), or a JSON object of changes.

    >>> load_costs("high").task_call, load_costs('{"activation": 3}').activation
    (5, 3)

    Raises:
        ArgumentError: the text names no part of the model, or gives a part another kind of value.
    """
    if text in ("low", "high"):
        return replace(CostModel(), **{name: ends[text == "high"] for name, ends in RANGES.items()})
    try:
        changes = dict(json.loads(text or "{}"))
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{VARIABLE} is no cost model", expected="low, high, or a JSON object") from error
    for name, value in changes.items():
        changes[name] = _check_part(name, value)
    return replace(CostModel(), **changes)


def _check_part(name: str, value: Any) -> Any:
    """The value of a part: a whole number, or one for each machine."""
    default = {part.name: part.default for part in fields(CostModel)}
    if name not in default:
        raise ArgumentError(f"the cost model has no part '{name}'", expected=", ".join(default))
    values = value if isinstance(value, list) else [value]
    wanted = 2 if isinstance(default[name], tuple) else 1
    if len(values) != wanted or not all(type(v) is int and 0 <= v < 1 << 20 for v in values):
        raise ArgumentError(
            f"the part '{name}' of the cost model is wrong",
            expected="two cycle counts" if wanted == 2 else "a cycle count",
            received=repr(value),
        )
    return tuple(values) if wanted == 2 else value


COSTS = load_costs(os.environ.get(VARIABLE, ""))
