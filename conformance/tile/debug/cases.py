"""The rules of the memory model, each with a kernel that breaks it, which debug mode must report, and its repair."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from conformance.case import Case
from conformance.tile.debug import (
    advice,
    copies,
    counted,
    fresh,
    grids,
    groups,
    indices,
    mbarriers,
    meetings,
    programs,
    rings,
    tiles,
    transfers,
)
from conformance.tile.debug.pair import Pair
from tessera.core.errors import AsyncCopyError, BarrierError, OutOfBoundsError, RaceError, UninitializedError

FIRST = {
    "outside": Pair(
        "M1", programs.next_element, programs.next_element_clipped, OutOfBoundsError,
        ("index 8 is outside axis 0 of x", "program (7,)", "x[i + 1]"),
    ),
    "outside-shared": Pair(
        "M1", groups.long_row, groups.long_row_masked, OutOfBoundsError,
        ("axis 0 of the shared memory", "tile 7"), 8,
    ),
    "negative": Pair(
        "M1", programs.previous_element, programs.previous_element_guarded, OutOfBoundsError,
        ("index -1 is outside axis 0 of x", "program (0,)"),
    ),
    "unwritten-shared": Pair(
        "M2", groups.half_filled, groups.all_filled, UninitializedError,
        ("[4] is read before anything is written there", "tile 4"), 8,
    ),
    "unwritten-register": Pair(
        "M2", programs.empty_accumulator, programs.zeroed_accumulator, UninitializedError,
        ("the register memory", "program (0,)"),
    ),
    "own-copy": Pair(
        "M3", groups.register_exchange, groups.shared_exchange, UninitializedError,
        ("the register memory", "read before anything is written"), 8,
    ),
    "missing-barrier": Pair(
        "M4", groups.mirrored_at_once, groups.mirrored, RaceError,
        ("a data race on the shared memory", "tile 0", "tile 7", "no barrier"), 8,
    ),
    "reused-too-soon": Pair(
        "M4", groups.reused_at_once, groups.reused_later, RaceError,
        ("a data race", "writes it", "reads it", "no barrier"), 8,
    ),
    "global-without-barrier": Pair(
        "M4", groups.neighbour_at_once, groups.neighbour_later, RaceError, ("a data race on out[", "tile"), 8,
    ),
    "barrier-in-only-one-loop": Pair(
        "M4", groups.tree_without_barriers, groups.tree, RaceError, ("a data race", "no barrier"), 8,
    ),
    "shifted-in-place": Pair(
        "M5", programs.shifted_in_place, programs.shifted_apart, RaceError,
        ("a data race on out[", "program (1,)", "programs of a grid have no order"),
    ),
    "shared-total": Pair(
        "M5", programs.total, programs.total_atomic, RaceError, ("a data race on out[0]", "programs of a grid"),
    ),
    "overlapping-blocks": Pair(
        "M5", programs.overlapping, programs.disjoint, RaceError, ("a data race on out[1]", "program (1,)"),
    ),
    "different-values": Pair(
        "M6", programs.own_number, programs.same_number, RaceError, ("writes it", "program"),
    ),
    "different-values-in-a-group": Pair(
        "M6", groups.own_number, groups.same_number, RaceError, ("writes it", "tile"), 8,
    ),
    "parted-barrier": Pair(
        "M7", groups.barrier_in_branch, groups.barrier_after_branch, BarrierError,
        ("tiles 0, 1, 2 of program (0,), 3 of 8", "tile.barrier()"), 8,
    ),
    "barrier-in-uneven-loop": Pair(
        "M7", groups.barrier_in_uneven_loop, groups.barrier_in_even_loop, BarrierError, ("of 8", "barrier"), 8,
    ),
    "half-a-stretch-meets": Pair(
        "M7", groups.half_a_warp_meets, groups.whole_stretches_meet, BarrierError,
        ("a meeting of 4 tiles is reached by tiles 4, 5 of program (0,), 2 of 4", "four.sync()"), 8,
    ),
    "sum-among-some": Pair(
        "M7", groups.sum_of_some, groups.sum_of_all, BarrierError, ("an exchange among 8 tiles", "5 of 8"), 8,
    ),
    "read-before-wait": Pair(
        "M8", copies.early, copies.waited, AsyncCopyError,
        ("reads the shared memory", "copy to it is under way"), None, (1,),
    ),
    "too-many-pending": Pair(
        "M8", copies.one_pending, copies.none_pending, AsyncCopyError,
        ("copy to it is under way",), None, (1,),
    ),
    "wait-of-one-program": Pair(
        "M8", copies.first_program_waits, copies.each_program_waits, AsyncCopyError,
        ("program (1,)", "reads the shared memory", "copy to it is under way"), None, (2,),
    ),
    "source-overwritten": Pair(
        "M8", copies.source_changed, copies.source_kept, AsyncCopyError,
        ("writes out[", "copy from it is under way"), None, (1,),
    ),
    "target-overwritten": Pair(
        "M8", copies.target_changed, copies.target_kept, AsyncCopyError,
        ("writes the shared", "copy to it"), None, (1,),
    ),
    "copy-of-a-neighbour": Pair(  # a barrier orders the tiles, and not their copies
        "M8", copies.neighbour_under_way, copies.neighbour_waited_for, AsyncCopyError,
        ("program (0,), tile 0 reads the shared", "copy to it is under way"), 2,
    ),
    "waited-but-not-met": Pair(
        "M9", copies.no_barrier, copies.barrier_after_wait, RaceError, ("no barrier", "cp_async"), 8,
    ),
    "read-beside-atomic": Pair(
        "M10", programs.count_and_read, programs.count_and_use, RaceError, ("updates it", "reads it"),
    ),
    "plain-beside-atomic": Pair(
        "M10", groups.atomic_and_plain, groups.atomic_then_plain, RaceError, ("updates it", "no barrier"), 8,
    ),
    "met-in-half-the-group": Pair(
        "M4", groups.met_in_half_the_group, groups.met_in_the_half_that_shares, RaceError,
        ("reads it", "writes it", "no barrier"), 8,
    ),
}  # fmt: skip
_MORE = (indices, fresh, tiles, grids, meetings, transfers, mbarriers, rings, counted)
PAIRS = {**FIRST, **{name: pair for module in _MORE for name, pair in module.PAIRS.items()}}


def cases() -> Iterator[Case]:
    """Both kernels of each pair: reported under the rule's number, and clean."""
    for name, pair in PAIRS.items():
        yield _make(f"{pair.rule}-{name}", pair, pair.broken, rejects=pair.error, says=(*pair.says, ".py:", "(rule M"))
        yield _make(f"{pair.rule}-{name}-repaired", pair, pair.repaired)
    for name, better in advice.ADVICE.items():
        for kernel, word in ((better.plain, "plain"), (better.better, "better")):
            yield Case(
                f"tile/debug/advice-{name}-{word}", partial(_square, kernel), grid=(1,), group=better.group, debug=True
            )


def _square(kernel: Any) -> tuple[Any, Any]:
    return kernel, advice.square()


def _make(name: str, pair: Pair, kernel: Any, **more: Any) -> Case:
    grid = pair.grid or ((1,) if pair.group else (8,))
    return Case(
        f"tile/debug/{name}", lambda: (kernel, pair.arguments()), grid=grid, group=pair.group, debug=True, **more
    )
