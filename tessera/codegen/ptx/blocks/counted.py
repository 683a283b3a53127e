"""Barriers in memory where the hardware's do not serve: a word of the state that is changed by compare-and-swap.

Those of sm_80 count no bytes, and none may be begun again while it stands, as one made in a loop or a branch is.

The word holds the number of the phase, the arrivals that it still takes, and (signed, at the top) the bytes; the next
word the arrivals of each phase. Where nothing is missing any more, the phase after it begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.ops import mbarrier

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

PHASE, ARRIVALS = 20, 20  # bits of the two lower numbers
BYTES_AT = PHASE + ARRIVALS
COUNT = 8  # where the second word lies
REST = 20  # nanoseconds between two looks


def used(kernel: Kernel) -> bool:
    """Whether a function's barriers are these."""
    body = kernel.function.body
    bytes_ = any(n.op in (mbarrier.mbarrier_expect, mbarrier.mbarrier_copies) for n in body.walk())
    inside = any(n.op is mbarrier.mbarrier_init and n not in body.nodes for n in body.walk())
    return inside or (bytes_ and kernel.arch != "sm_90a")


def begin(kernel: Kernel, place: str, count: int, guard: str) -> None:
    """Phase 0 of a barrier that takes `count` arrivals."""
    kernel.text.do("st.shared.u64", f"[{place}]", count << PHASE, guard=guard)
    kernel.text.do("st.shared.u64", f"[{place}+{COUNT}]", count, guard=guard)


def arrive(kernel: Kernel, place: str, count: int, guard: str) -> None:
    """So many arrivals less are missing."""
    _change(kernel, place, -(count << PHASE), guard)


def expect(kernel: Kernel, place: str, count: int, guard: str) -> None:
    """So many bytes more are missing."""
    _change(kernel, place, count << BYTES_AT, guard)


def come(kernel: Kernel, place: str, count: int, guard: str) -> None:
    """So many bytes less are missing."""
    _change(kernel, place, -(count << BYTES_AT), guard)


def _change(kernel: Kernel, place: str, by: int, guard: str) -> None:
    """Add to the word; if that leaves nothing missing, begin the next phase."""
    text = kernel.text
    again, done = text.new_label("again"), text.new_label("changed")
    if guard:
        text.do(f"bra {done}", guard=f"!{guard}")
    text.do("fence.acq_rel.cta")
    count = text.let("ld.shared.u64", "b64", f"[{place}+{COUNT}]")
    full = text.let("shl.b64", "b64", count, PHASE)
    old = text.let("ld.volatile.shared.u64", "b64", f"[{place}]")
    text.label(again)
    less = text.let("add.s64", "b64", old, by)
    none = text.let("setp.eq.u64", "pred", text.let("shr.u64", "b64", less, PHASE), 0)
    phase = text.let("and.b64", "b64", text.let("add.s64", "b64", old, 1), (1 << PHASE) - 1)
    new = text.let("selp.b64", "b64", text.let("or.b64", "b64", phase, full), less, none)
    seen = text.let("atom.shared.cas.b64", "b64", f"[{place}]", old, new)
    other = text.let("setp.ne.s64", "pred", seen, old)
    text.do("mov.b64", old, seen)
    text.do(f"bra {again}", guard=other)
    text.label(done)


def wait(kernel: Kernel, place: str, parity: str) -> None:
    """Look until the phase under way has another parity."""
    text, again = kernel.text, kernel.text.new_label("wait")
    text.label(again)
    word = text.let("cvt.u32.u64", "b32", text.let("ld.acquire.cta.shared.u64", "b64", f"[{place}]"))
    same = text.let("setp.eq.u32", "pred", text.let("and.b32", "b32", word, 1), parity)
    text.do("nanosleep.u32", REST, guard=same)
    text.do(f"bra {again}", guard=same)
