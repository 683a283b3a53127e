"""Cooperative launches: CTAs that wait for each other, and threads in nanosleep."""

import numpy as np
import pytest

from tessera.core.errors import BarrierError, ResourceError
from tessera.interp.target.ptx import PtxModule
from tessera.interp.target.ptx import module as module_file

MEETING = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 state, .param .u64 out)
{
.reg .b64 %s, %o, %a; .reg .b32 %t, %c, %n, %v; .reg .pred %p;
ld.param.u64 %s, [state]; ld.param.u64 %o, [out];
mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %n, %nctaid.x;
mad.lo.u32 %v, %c, 8, %t; mul.wide.u32 %a, %v, 4; add.s64 %a, %o, %a; st.global.u32 [%a], %c;
bar.sync 0; setp.ne.u32 %p, %t, 0; @%p bra MET;
fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%s], 1;
LOOK: ld.acquire.gpu.global.u32 %v, [%s]; setp.ge.u32 %p, %v, %n; @%p bra MET;
nanosleep.u32 40; bra LOOK;
MET: bar.sync 0;
sub.s32 %c, %n, %c; sub.s32 %c, %c, 1; mad.lo.u32 %v, %c, 8, %t; mul.wide.u32 %a, %v, 4; add.s64 %o, %o, %a;
ld.global.u32 %v, [%o]; add.u32 %v, %v, 100; bar.sync 0; st.global.u32 [%o], %v;
ret;
}
"""


@pytest.mark.parametrize("debug", [False, True])
def test_blocks_that_meet(debug, monkeypatch):
    """More of them than run side by side otherwise; the state's count says that each has come once."""
    monkeypatch.setattr(module_file, "LANES", 64)
    monkeypatch.setattr(module_file, "DEBUG_LANES", 64)
    state, out = np.zeros(1, np.uint32), np.zeros((50, 8), np.uint32)
    PtxModule(MEETING).launch("k", 50, 8, [state, out], debug=debug, cooperative=True)
    assert state[0] == 50
    np.testing.assert_array_equal(out, np.repeat(np.arange(50)[:, None] + 100, 8, 1))


def test_more_than_can_run_at_once():
    arrays = [np.zeros(1, np.uint32), np.zeros((40_000, 8), np.uint32)]
    with pytest.raises(ResourceError, match="a cooperative launch of 40,000 CTAs[\\s\\S]*at most 33,792 of 8 threads"):
        PtxModule(MEETING).launch("k", 40_000, 8, arrays, cooperative=True)


def test_sleepers_let_others_run():
    """One thread sleeps until another has written what it waits for, which comes later in the text."""
    text = """.version 8.0 .target sm_80 .address_size 64
    .visible .entry k(.param .u64 p) { .reg .b64 %a; .reg .b32 %t, %v; .reg .pred %q; ld.param.u64 %a, [p];
    mov.u32 %t, %tid.x; setp.ne.u32 %q, %t, 0; @%q bra OTHER;
    L: ld.volatile.global.u32 %v, [%a]; setp.eq.u32 %q, %v, 0; @%q nanosleep.u32 20; @%q bra L;
    st.global.u32 [%a+4], %v; ret;
    OTHER: st.global.u32 [%a], 7; ret; }"""
    x = np.zeros(2, np.uint32)
    PtxModule(text).launch("k", 1, 2, [x])
    assert x.tolist() == [7, 7]


LONELY = """.version 8.0 .target sm_80 .address_size 64
.visible .entry k(.param .u64 p, .param .u32 most) { .reg .b64 %a; .reg .b32 %v, %n; .reg .pred %q;
ld.param.u64 %a, [p]; ld.param.u32 %n, [most];
L: ld.volatile.global.u32 %v, [%a]; setp.ne.u32 %q, %v, 0; @%q bra E; nanosleep.u32 20;
sub.s32 %n, %n, COUNTED; setp.ne.u32 %q, %n, 0; @%q bra L;
E: st.global.u32 [%a+4], 5; ret; }"""


def test_a_wait_for_nobody_is_found():
    with pytest.raises(BarrierError, match="deadlock: no thread can continue: nanosleep"):
        PtxModule(LONELY.replace("COUNTED", "0")).launch("k", 1, 3, [np.zeros(2, np.uint32), 7])


def test_a_wait_that_counts_ends():
    x = np.zeros(2, np.uint32)
    PtxModule(LONELY.replace("COUNTED", "1")).launch("k", 1, 3, [x, 2000])
    assert x.tolist() == [0, 5]
