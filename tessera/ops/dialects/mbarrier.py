"""Mbarrier ops: barriers in shared memory that count arrivals and transaction bytes, phase by phase (PTX ISA,
mbarrier)."""

from __future__ import annotations

from tessera.core.errors import DTypeError, ShapeError
from tessera.core.types import RefType, TensorType, int64
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call

MBARRIER_FIELDS = 4
COUNT, MISSING, BYTES, PHASE = range(MBARRIER_FIELDS)
MBARRIER_EFFECTS = ("memory",)


def _check_slot(ref: RefType, slot: TensorType) -> None:
    if ref.rank != 2 or int(ref.shape[1]) != MBARRIER_FIELDS or ref.dtype != int64:
        raise ShapeError(
            "the memory does not hold mbarriers", expected=f"shared int64 (n, {MBARRIER_FIELDS})", received=str(ref)
        )
    if slot.rank or not slot.dtype.is_integer:
        raise DTypeError("the index of an mbarrier is an integer scalar", expected="int64", received=str(slot))


def _infer_counted(ref: RefType, slot: TensorType, *, count: int) -> None:
    _check_slot(ref, slot)
    if count < 1:
        raise ShapeError("an mbarrier counts at least one", received=str(count))


@op(infer=_infer_counted, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MBARRIER_EFFECTS)
def mbarrier_init(ref, slot, *, count: int = 1):
    """Initialise a barrier: phase 0 begins, and each phase completes after `count` arrivals."""


@op(infer=_infer_counted, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MBARRIER_EFFECTS)
def mbarrier_arrive(ref, slot, *, count: int = 1):
    """Each active tile arrives `count` times."""


@op(infer=_infer_counted, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MBARRIER_EFFECTS)
def mbarrier_expect(ref, slot, *, count: int = 1):
    """Increase the transaction count of the current phase by `count` bytes for each active tile."""


@op(infer=_infer_counted, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=("memory", "async"))
def mbarrier_copies(ref, slot, *, count: int = 1):
    """Complete `count` bytes, for each active tile, when the copies since the last commit are done.

    The copies become a group, as if committed.
    """


def _infer_wait(ref: RefType, slot: TensorType, parity: TensorType) -> None:
    _check_slot(ref, slot)
    if parity.rank or not parity.dtype.is_integer:
        raise DTypeError("a parity is an integer scalar", expected="int64", received=str(parity))


@op(infer=_infer_wait, coerce=refuse_direct_call, numerics=STORAGE, dialect="tile", effects=MBARRIER_EFFECTS)
def mbarrier_wait(ref, slot, parity):
    """Wait until the phase of this parity has completed: while the current phase has this parity.

    The writes of tiles before their arrival in a phase are visible to the tiles that have waited for its completion.
    """


MBARRIER_OPS = (mbarrier_init, mbarrier_arrive, mbarrier_expect, mbarrier_copies, mbarrier_wait)
