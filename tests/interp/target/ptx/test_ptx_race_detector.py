"""The sanitizer: each kind of finding with its locations, and no finding in the corrected program."""

import numpy as np
import pytest
from ptx_hopper_snippets import STORE, barrier, entry, load

from tessera.core.errors import AsyncCopyError, BarrierError, OutOfBoundsError, RaceError, UninitializedError
from tessera.interp.target.ptx import PtxModule, TensorMap

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.file 1 "model.py"
.extern .shared .align 16 .b8 dyn[];
.visible .entry k(.param .u64 out)
{
.reg .b64 %p; .reg .b32 %i, %s, %a, %b, %r<8>; .reg .pred %q<4>;
ld.param.u64 %p, [out]; mov.u32 %i, %tid.x; mov.u32 %s, dyn; mad.lo.u32 %a, %i, 4, %s;
xor.b32 %b, %i, 33; mad.lo.u32 %b, %b, 4, %s; mad.wide.u32 %p, %i, 4, %p;
"""


def run(lines, block=64, debug=True, shared=1024):
    out = np.zeros(1024, "u4")
    PtxModule(f"{HEAD}{lines}\nret;\n}}", "k.ptx").launch("k", block=block, args=[out], shared=shared, debug=debug)
    return out


STORED = "st.shared.u32 [%a], %i;"
LOADED = "\n.loc 1 42 7\nld.shared.u32 %r0, [%b]; st.global.u32 [%p], %r0;"


@pytest.mark.parametrize(
    "wrong,right,error,says",
    [
        (
            STORED + LOADED,
            STORED + "bar.sync 0;" + LOADED,
            RaceError,
            "nothing that orders it after being written by st",
        ),
        ("ld.shared.u32 %r0, [%a];", STORED + "ld.shared.u32 %r0, [%a];", UninitializedError, "read before it is wri"),
        ("add.u32 %r0, %r1, 1;", "mov.u32 %r1, 0; add.u32 %r0, %r1, 1;", UninitializedError, "register %r1"),
        ("ld.shared.u32 %r0, [%s+1024];", "", OutOfBoundsError, "byte 1024 of shared"),
        ("st.shared.u32 [%s], %i;", "st.shared.u32 [%s], 5;", RaceError, "different values"),
        (
            STORED + "bar.sync 0; ld.shared.u32 %r0, [%b];" + STORED,
            STORED + "bar.sync 0; ld.shared.u32 %r0, [%b]; bar.sync 0;" + STORED,
            RaceError,
            "after being read by ld.shared",
        ),
        (
            STORED + "bar.sync 0; setp.lt.u32 %q0, %i, 40; @%q0 bra X; bar.sync 1, 24; bra Y; X: bar.sync 1, 40; Y:",
            STORED + "bar.sync 0; setp.lt.u32 %q0, %i, 32; @%q0 bra X; bar.sync 1, 64; bra Y; X: bar.sync 1, 64; Y:",
            BarrierError,
            "only a part of a warp",
        ),
        (
            "setp.lt.u32 %q0, %i, 32; @%q0 exit; bar.sync 0; bar.sync 0;",
            "bar.sync 0;",
            None,
            "",
        ),
    ],
)
def test_findings(wrong, right, error, says):
    if error is not None:
        with pytest.raises(error, match=says):
            run(wrong)
    run(right)


def test_a_finding_names_instruction_line_source_and_thread():
    with pytest.raises(
        RaceError, match=r"k\.ptx:13:1.*ld\.shared\.u32 \(model\.py:42:7\).*block \(0,0,0\), thread \(0,0,0\)"
    ):
        run(STORED + LOADED)
    run(STORED + LOADED, debug=False)


def test_order_through_warps_and_named_barriers():
    """Inside a warp bar.warp.sync is enough; arrive and sync order a producer before a consumer."""
    near = "xor.b32 %b, %i, 5; mad.lo.u32 %b, %b, 4, %s;"
    with pytest.raises(RaceError):
        run(near + STORED + LOADED)
    run(near + STORED + "bar.warp.sync 0xffffffff;" + LOADED)
    pair = "setp.ge.u32 %q0, %i, 32; @%q0 bra C; {} bar.arrive 1, 64; exit; C: bar.sync 1, 64; {} exit;"
    far = "xor.b32 %b, %i, 32; mad.lo.u32 %b, %b, 4, %s;"
    run(far + pair.format(STORED, LOADED))
    with pytest.raises(RaceError):
        run(far + pair.replace("{} bar.arrive 1, 64;", "bar.arrive 1, 64; {}").format(STORED, LOADED))


def test_atomics_do_not_race_with_each_other():
    zero = "@!%q0 bra Z; st.shared.u32 [%s], 0; Z: bar.sync 0;"
    first = "setp.eq.u32 %q0, %i, 0;"
    run(first + zero + "red.shared.add.u32 [%s], 1; bar.sync 0; ld.shared.u32 %r0, [%s]; st.global.u32 [%p], %r0;")
    with pytest.raises(RaceError):
        run(first + zero + "red.shared.add.u32 [%s], 1; ld.shared.u32 %r0, [%s];")


COPY = "cp.async.ca.shared.global [%a], [%p], 4; cp.async.commit_group;"


@pytest.mark.parametrize(
    "wait,fine", [("cp.async.wait_group 1;", False), ("cp.async.wait_group 0;", True), ("cp.async.wait_all;", True)]
)
def test_copies_are_waited_for(wait, fine):
    lines = f"{COPY} {wait} ld.shared.u32 %r0, [%a]; st.global.u32 [%p], %r0;"
    if fine:
        run(lines)
    else:
        with pytest.raises(AsyncCopyError, match=r"nothing has waited for: written by cp\.async\.ca"):
            run(lines)


def test_a_copy_is_waited_for_by_its_own_thread():
    """One thread's wait says nothing of another's copies: a barrier after it does."""
    lines = COPY + "cp.async.wait_all; {} ld.shared.u32 %r0, [%b]; st.global.u32 [%p], %r0;"
    run(lines.format("bar.sync 0;"))
    with pytest.raises(AsyncCopyError):
        run(lines.format(""))


def tma(lines, x=None):
    x = np.arange(256, dtype="f4").reshape(16, 16) if x is None else x
    y = np.zeros_like(x)
    maps = [TensorMap(x, (16, 16)), TensorMap(y, (16, 16))]
    PtxModule(entry(["map", "map"], lines)).launch("k", block=64, args=maps, shared=4096, debug=True)
    return x, y


OWN = "mad.lo.u32 %t, %i, 4, %s; "
SAVE = f"@%first {STORE.format(n=2)} [%m1, {{0, 0}}], [%s]; @%first cp.async.bulk.commit_group;"


def test_tensor_loads_are_waited_for():
    good = load([(0, 0, (0, 0))], 1024)
    tma(barrier() + good + OWN + "ld.shared.u32 %r0, [%t];")
    with pytest.raises(AsyncCopyError, match="cp.async.bulk.tensor"):
        tma(barrier() + good.split("W:")[0] + OWN + "ld.shared.u32 %r0, [%t];")


@pytest.mark.parametrize("fence", [True, False])
def test_stores_are_fenced_before_a_tensor_store(fence):
    fill = "".join(f"st.shared.f32 [%t+{256 * k}], 0f3F800000;" for k in range(4))
    lines = OWN + fill + ("fence.proxy.async.shared::cta;" if fence else "") + "bar.sync 0;" + SAVE
    if fence:
        assert (tma(lines + "@%first cp.async.bulk.wait_group 0;")[1] == 1).all()
    else:
        with pytest.raises(AsyncCopyError, match="without a fence.proxy.async"):
            tma(lines)


@pytest.mark.parametrize("wait", ["", "@%first cp.async.bulk.wait_group.read 0;"])
def test_a_stage_is_not_reused_while_a_store_reads_it(wait):
    lines = barrier() + load([(0, 0, (0, 0))], 1024) + SAVE + wait + "bar.sync 0;" + OWN + "st.shared.u32 [%t], 0;"
    if wait:
        tma(lines)
    else:
        with pytest.raises(AsyncCopyError, match="nothing has waited for: read by cp.async.bulk.tensor"):
            tma(lines)


WGMMA = """wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d0, %d1, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;"""
PLACES = """and.b32 %t, %s, 0x3FFFF; shr.u32 %t, %t, 4; cvt.u64.u32 %d0, %t; or.b64 %d0, %d0, 0x1000080000;
add.u64 %d1, %d0, 256;"""


def wgmma(lines, fence="fence.proxy.async;"):
    fill = "mad.lo.u32 %t, %i, 32, %s;" + "".join(
        f"st.shared.u32 [%t+{4 * k}], 0; st.shared.u32 [%t+{4096 + 4 * k}], 0;" for k in range(8)
    )
    out = np.zeros(1, "f4")
    text = entry(["out"], fill + fence + "bar.sync 0;" + PLACES + WGMMA + lines)
    PtxModule(text).launch("k", block=128, args=[out], shared=16384, debug=True)


def test_accumulators_are_waited_for():
    wgmma("wgmma.wait_group.sync.aligned 0; add.f32 %f10, %f0, %f1;")
    with pytest.raises(AsyncCopyError, match="register %f0 is read before the wgmma"):
        wgmma("add.f32 %f10, %f0, %f1;")


def test_registers_of_a_matrix_instruction_in_flight_are_not_written():
    """Neither its accumulators nor its left operand; another wgmma may write the same accumulators."""
    done, left = (
        "wgmma.wait_group.sync.aligned 0;",
        WGMMA.replace("%d0, %d1, 0, 1, 1, 0, 0", "{%r0, %r1, %r2, %r3}, %d1, 0, 1, 1, 0"),
    )
    operand = "".join(f"mov.b32 %r{k}, 0;" for k in range(4))
    wgmma(WGMMA + done + "mov.b32 %f0, 0;")
    with pytest.raises(AsyncCopyError, match="register %f0 is written before the wgmma that writes it was waited for"):
        wgmma(WGMMA + "mov.b32 %f0, 0;" + done)
    wgmma(operand + left + done + operand)
    with pytest.raises(AsyncCopyError, match="register %r0 is written before the wgmma that reads it was waited for"):
        wgmma(operand + left + operand + done)


def test_matrices_are_fenced_and_not_overwritten():
    with pytest.raises(AsyncCopyError, match="without a fence.proxy.async"):
        wgmma("", fence="")
    with pytest.raises(AsyncCopyError, match="read by wgmma"):
        wgmma("mad.lo.u32 %t, %i, 32, %s; st.shared.u32 [%t], 1;")
    wgmma("wgmma.wait_group.sync.aligned 0; bar.sync 0; mad.lo.u32 %t, %i, 32, %s; st.shared.u32 [%t], 1;")


def test_registers_are_fenced_before_a_matrix_instruction_reads_them():
    """A wgmma.fence after the last write of an accumulator that it keeps, or of its left operand in registers."""
    keeps = WGMMA.replace("%d1, 0, 1", "%d1, 1, 1")
    zeros = "".join(f"mov.b32 %f{k}, 0;" for k in range(4))
    done = "wgmma.wait_group.sync.aligned 0;"
    wgmma(done + zeros + keeps + done)
    with pytest.raises(AsyncCopyError, match="register %f0 is read by a wgmma without a wgmma.fence"):
        wgmma(done + zeros + keeps.replace("wgmma.fence.sync.aligned;", "") + done)
    wgmma(done + zeros + WGMMA.replace("wgmma.fence.sync.aligned;", "") + done)  # it keeps no accumulator
    left = keeps.replace("%d0, %d1, 1, 1, 1, 0, 0", "{%r0, %r1, %r2, %r3}, %d1, 1, 1, 1, 0")
    operand = "".join(f"mov.b32 %r{k}, 0;" for k in range(4))
    wgmma(done + zeros + operand + left + done)
    with pytest.raises(AsyncCopyError, match="register %r0 is read by a wgmma without a wgmma.fence"):
        wgmma(done + zeros + "wgmma.fence.sync.aligned;" + operand + left.partition(";")[2] + done)


def test_an_mbarrier_is_initialised_before_it_is_used():
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%bar];"
    tma(barrier(64) + arrive)
    with pytest.raises(RaceError, match="nothing that orders it after mbarrier.init"):
        tma(barrier(64).replace("bar.sync 0;", "") + arrive)
    again = "@%first mbarrier.inval.shared::cta.b64 [%bar]; " + barrier(64) + arrive
    tma(barrier(64) + arrive + "bar.sync 0;" + again)
    with pytest.raises(RaceError, match="nothing that orders it after mbarrier.init"):
        tma(barrier(64) + arrive + "bar.sync 0;" + again.replace("bar.sync 0;", ""))


def test_a_thread_waits_for_its_stores_before_it_exits():
    stored = barrier() + load([(0, 0, (0, 0))], 1024) + SAVE
    for wait in (".read", ""):
        x, y = tma(stored + f"@%first cp.async.bulk.wait_group{wait} 0;")
        np.testing.assert_array_equal(y, x)
    with pytest.raises(AsyncCopyError, match="exits while a bulk copy reads shared memory"):
        tma(stored)
    with pytest.raises(AsyncCopyError, match="exits while a bulk copy reads shared memory"):
        tma(stored + "@%first cp.async.bulk.wait_group.read 1;")
