"""Barriers in memory (mbarriers): counted arrivals and bytes, phase by phase.

The state is shared memory of shape (n, 4), int64: for each of n barriers the arrivals of a phase, those still
missing, the bytes still missing, and the number of the phase. A phase ends when neither arrivals nor bytes are
missing; then the next one begins, with as many arrivals missing as at first. The meaning of parities is
that of the PTX ISA, section "mbarrier".
"""

from __future__ import annotations

from tessera.errors import DTypeError, ShapeError
from tessera.op import STORAGE, op
from tessera.ops.control import direct
from tessera.types import RefType, TensorType, int64

FIELDS = 4
COUNT, MISSING, BYTES, PHASE = range(FIELDS)
EFFECTS = ("memory",)


def _check(ref: RefType, slot: TensorType) -> None:
    if ref.rank != 2 or int(ref.shape[1]) != FIELDS or ref.dtype != int64:
        raise ShapeError("this is no memory of mbarriers", expected=f"shared int64 (n, {FIELDS})", received=str(ref))
    if slot.rank or not slot.dtype.is_integer:
        raise DTypeError("the number of an mbarrier is an integer scalar", expected="int64", received=str(slot))


def _counted(ref: RefType, slot: TensorType, *, count: int) -> None:
    _check(ref, slot)
    if count < 1:
        raise ShapeError("an mbarrier counts at least one", received=str(count))


@op(infer=_counted, coerce=direct, numerics=STORAGE, dialect="tile", effects=EFFECTS)
def mbarrier_init(ref, slot, *, count: int = 1):
    """Begin phase 0 of a barrier, each of whose phases takes `count` arrivals."""


@op(infer=_counted, coerce=direct, numerics=STORAGE, dialect="tile", effects=EFFECTS)
def mbarrier_arrive(ref, slot, *, count: int = 1):
    """Each tile here arrives, `count` times."""


@op(infer=_counted, coerce=direct, numerics=STORAGE, dialect="tile", effects=EFFECTS)
def mbarrier_expect(ref, slot, *, count: int = 1):
    """The phase under way does not end before `count` more bytes (for each tile here) have come."""


@op(infer=_counted, coerce=direct, numerics=STORAGE, dialect="tile", effects=("memory", "async"))
def mbarrier_copies(ref, slot, *, count: int = 1):
    """When the copies begun since the last commit are done, `count` bytes have come (for each tile here).

    They make a group, as if committed.
    """


def _waited(ref: RefType, slot: TensorType, parity: TensorType) -> None:
    _check(ref, slot)
    if parity.rank or not parity.dtype.is_integer:
        raise DTypeError("a parity is an integer scalar", expected="int64", received=str(parity))


@op(infer=_waited, coerce=direct, numerics=STORAGE, dialect="tile", effects=EFFECTS)
def mbarrier_wait(ref, slot, parity):
    """Wait until the latest phase of this parity has ended: as long as the number of the phase under way has it.

    What tiles wrote before they arrived in a phase is seen by those that have waited for its end.
    """


OPS = (mbarrier_init, mbarrier_arrive, mbarrier_expect, mbarrier_copies, mbarrier_wait)
