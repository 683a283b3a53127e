"""The sanitizer on global and local memory: races, synchronisation between CTAs, uninitialised bytes."""

import numpy as np
import pytest

from tessera.core.errors import RaceError, UninitializedError
from tessera.interp.target.ptx import PtxModule

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.file 1 "model.py"
.visible .entry k(.param .u64 a, .param .u64 f)
{ .reg .b64 %a, %f, %p, %o; .reg .b32 %i, %c, %r<8>; .reg .b16 %h; .reg .pred %q; .local .b32 mine[4];
ld.param.u64 %a, [a]; ld.param.u64 %f, [f]; mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x;
mad.wide.u32 %p, %i, 4, %a; xor.b32 %r7, %i, 33; mad.wide.u32 %o, %r7, 4, %a;
"""


def run(lines, grid, block):
    a, f = np.zeros(4096, "u4"), np.zeros(64, "u4")
    PtxModule(f"{HEAD}{lines}\nret;\n}}", "k.ptx").launch("k", grid=grid, block=block, args=[a, f], debug=True)
    return a


STORED, LOADED = "st.global.u32 [%p], %i;", "\n.loc 1 42 7\nld.global.u32 %r0, [%o];"
# One block writes and sets a flag, the other waits for it and reads.
MESSAGE = "setp.eq.u32 %q, %c, 0; @!%q bra R; st.global.u32 [%a], 7; {} bra E; R: {} ld.global.u32 %r1, [%a]; E:"
WAIT = "W: ld.acquire.gpu.global.u32 %r0, [%f]; setp.eq.u32 %q, %r0, 0; @%q bra W;"
# The last of the blocks to come reads what all of them wrote.
LAST = """mad.wide.u32 %p, %c, 4, %a; st.global.u32 [%p], 1; bar.sync 0; setp.ne.u32 %q, %i, 0; @%q exit; {}
atom.global.add.u32 %r0, [%f], 1; setp.ne.u32 %q, %r0, 9; @%q exit; ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%a];"""


TWO = "setp.eq.u32 %q, %c, 3; @%q bra X; st.global.u32 [%a], 5; bra Y; X: st.global.u32 [%a], 6; Y:"


@pytest.mark.parametrize(
    "wrong,right,grid,block",
    [
        (STORED + LOADED, STORED + "bar.sync 0;" + LOADED, 1, 64),
        (TWO, "st.global.u32 [%a], 5;", 9, 1),  # whoever is last writes the same
        ("st.global.u32 [%a], %c;", "mad.wide.u32 %p, %c, 4, %a; st.global.u32 [%p], %c;", 3000, 1),  # not all at once
        ("red.global.add.u32 [%a], 1; ld.global.u32 %r0, [%a];", "red.global.add.u32 [%a], 1;", 4, 32),
        (MESSAGE.format("", ""), MESSAGE.format("st.release.gpu.global.u32 [%f], 1;", WAIT), 2, 1),
        (MESSAGE.format("st.global.u32 [%f], 1;", WAIT), MESSAGE.format("atom.exch.b32 %r2, [%f], 1;", WAIT), 2, 1),
        (LAST.format("st.global.u32 [%a], 3;"), LAST.format("membar.gl;"), 10, 32),
        ("cvt.u16.u32 %h, %c; st.global.u8 [%a], %h;",
         "cvt.u16.u32 %h, %c; cvt.u64.u32 %o, %c; add.u64 %p, %a, %o; st.global.u8 [%p], %h;", 5, 1),
    ],
)  # fmt: skip
def test_races_of_global_memory(wrong, right, grid, block):
    with pytest.raises(RaceError, match=r"k\.ptx:\d+:\d+.*(different values|nothing that orders it after being)"):
        run(wrong, grid, block)
    run(right, grid, block)


def test_a_race_names_both_accesses():
    says = r"k\.ptx:11:1.*\(model\.py:42:7\): byte 132 of argument 0 is read by .* written by st.* at k\.ptx:9:1, block"
    with pytest.raises(RaceError, match=says + r" \(0,0,0\), thread \(33,0,0\), block \(0,0,0\), thread \(0,0,0\)"):
        run(STORED + LOADED, 1, 64)


@pytest.mark.parametrize(
    "lines,fine",
    [
        ("ld.local.u32 %r0, [mine];", True),  # nobody looks
        ("ld.local.u32 %r0, [mine]; add.u32 %r0, %r0, 1;", False),
        ("st.local.u32 [mine], %i; ld.local.v2.u32 {%r0, %r1}, [mine]; add.u32 %r0, %r0, %r1;", True),
        ("ld.local.u32 %r0, [mine]; and.b32 %r0, %r0, 254; st.local.u32 [mine], %r0;", True),  # a field is set
        ("st.local.u32 [mine], %r3; ld.local.u32 %r0, [mine]; st.global.u32 [%a], %r0;", False),
        ("mov.b64 %p, {%r2, %i}; mov.b64 {%r2, %r3}, %p; add.u32 %r3, %r3, 1;", True),
        ("mov.u32 %r2, %r3; add.u32 %r2, %r2, 1;", False),
        (
            "setp.ne.u32 %q, %i, 0; @!%q mov.u32 %r2, 5; shfl.sync.idx.b32 %r3, %r2, 0, 31, -1; add.u32 %r3, %r3, 1;",
            True,
        ),
        (
            "setp.ne.u32 %q, %i, 1; @!%q mov.u32 %r2, 5; shfl.sync.idx.b32 %r3, %r2, 0, 31, -1; add.u32 %r3, %r3, 1;",
            False,
        ),
    ],
)
def test_what_was_never_written_counts_where_it_is_used(lines, fine):
    if fine:
        run(lines, 1, 32)
        return
    with pytest.raises(UninitializedError, match=r"register %r\d is used before it is initialised"):
        run(lines, 1, 32)
