"""mbarriers, clusters and bulk copies: phases, waits, and deadlock reports."""

import numpy as np
import pytest
from ptx_hopper_snippets import barrier, entry, wait

from tessera.core.errors import BarrierError
from tessera.interp.target.ptx import PtxModule


def run(lines, params=("out",), args=(), **options):
    PtxModule(entry(params, lines)).launch("k", args=args, **{"block": 64, "shared": 4096, "debug": True, **options})


def test_phases():
    """Each round's parity is that of the phase that ends; all threads arrive, all wait."""
    out = np.zeros((4, 64), "u4")
    lines = barrier(64) + "add.u32 %t, %s, 0; mad.lo.u32 %t, %i, 4, %t;"
    for r in range(4):
        lines += f"""mov.u32 %r0, {r}; mad.lo.u32 %r0, %i, 10, %r0; st.shared.u32 [%t], %r0;
        mbarrier.arrive.release.cta.shared::cta.b64 _, [%bar];
        {wait(r % 2, name=f"W{r}")}
        xor.b32 %r1, %i, 63; mad.lo.u32 %r2, %r1, 4, %s; ld.shared.u32 %r3, [%r2];
        mad.wide.u32 %d0, %i, 4, %p0; st.global.u32 [%d0+{256 * r}], %r3; bar.sync 0;"""
    run(lines, args=[out])
    assert (out == np.arange(63, -1, -1) * 10 + np.arange(4)[:, None]).all()


def test_a_fresh_barrier_has_its_odd_phase_behind_it():
    out = np.zeros(64, "u4")
    lines = barrier() + wait(1) + "mbarrier.test_wait.parity.shared::cta.b64 %q1, [%bar], 0; selp.u32 %r0, 1, 2, %q1;"
    run(lines + "mad.wide.u32 %d0, %i, 4, %p0; st.global.u32 [%d0], %r0;", args=[out])
    assert (out == 2).all()


def test_states_counts_and_drops():
    """64 threads in one arrival, a token waited for, and a barrier that expects fewer after a drop."""
    out = np.zeros(2, "u4")
    lines = (
        barrier(64)
        + f"""@!%first bra END; mbarrier.arrive.shared.b64 %d1, [%bar], 64;
    T: mbarrier.test_wait.shared.b64 %q1, [%bar], %d1; @!%q1 bra T;
    mbarrier.arrive_drop.shared.b64 _, [%bar]; mbarrier.arrive.shared.b64 _, [%bar], 63;
    {wait(1)}
    mbarrier.arrive.shared.b64 _, [%bar], 63;
    {wait(0, name="V")}
    st.global.u32 [%p0], 7; mbarrier.inval.shared.b64 [%bar]; END:"""
    )
    run(lines, args=[out])
    assert out[0] == 7


def test_polling_lets_others_run():
    """A loop on test_wait at a low address does not starve those that will arrive."""
    lines = (
        barrier(63)
        + """@%first bra POLL; bra ARRIVE;
    POLL: mbarrier.test_wait.parity.shared::cta.b64 %q1, [%bar], 0; @!%q1 bra POLL; st.global.u32 [%p0], 5; bra END;
    ARRIVE: mbarrier.arrive.shared.b64 _, [%bar]; END:"""
    )
    out = np.zeros(1, "u4")
    run(lines, args=[out])
    assert out[0] == 5


def test_bulk_copies_there_and_back():
    x, y = np.arange(256, dtype="u4"), np.zeros(256, "u4")
    lines = (
        barrier()
        + f"""@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 1024, [%bar];
    {wait()}
    @%first cp.async.bulk.global.shared::cta.bulk_group [%p1], [%s], 1024;
    @%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group.read 0;
    @%first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%p1], [%s], 512;
    @%first cp.async.bulk.commit_group; @%first cp.async.bulk.wait_group 0;"""
    )
    run(lines, ("in", "out"), [x, y])
    assert (y == x + np.where(np.arange(256) < 128, x, 0)).all()


CLUSTER = """mov.u32 %r0, %cluster_ctarank; xor.b32 %r1, %r0, 1; mapa.shared::cluster.u32 %r2, %s, %r1;
mapa.shared::cluster.u32 %r3, %bar, %r1; mad.lo.u32 %r2, %i, 4, %r2;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
mad.lo.u32 %r4, %r0, 1000, %i;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2], %r4, [%r3];
"""
OUT = """mad.lo.u32 %t, %i, 4, %s; ld.shared.u32 %r5, [%t]; mov.u32 %r6, %ctaid.x; mad.lo.u32 %r6, %r6, 64, %i;
mad.wide.u32 %d0, %r6, 4, %p0; st.global.u32 [%d0], %r5;"""


def test_stores_to_the_neighbour():
    out = np.zeros((4, 64), "u4")
    run(barrier() + CLUSTER + wait() + OUT, args=[out], grid=4, cluster=2)
    assert (out == np.arange(64) + np.array([[1000], [0], [1000], [0]])).all()


def test_a_remote_arrival():
    lines = (
        barrier()
        + """mov.u32 %r0, %cluster_ctarank; xor.b32 %r1, %r0, 1; mapa.shared::cluster.u32 %r3, %bar, %r1;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    @%first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];"""
    )
    out = np.zeros(1, "u4")
    run(lines + wait() + "@%first atom.global.add.u32 %r5, [%p0], 1;", args=[out], grid=2, cluster=2)
    assert out[0] == 2


def test_deadlock_names_the_barrier():
    with pytest.raises(BarrierError, match=r"try_wait.*lacks 1 arrivals and 0 bytes"):
        run(barrier() + wait(), args=[np.zeros(1)])


@pytest.mark.parametrize(
    "lines,says",
    [
        ("mbarrier.arrive.shared.b64 _, [%bar];", "no mbarrier is initialised at byte 0"),
        (barrier() + "@%first mbarrier.arrive.shared.b64 _, [%bar], 0;" + wait(), "no thread can continue"),
        ("@%first mbarrier.init.shared::cta.b64 [%bar], 0;", "expects 1 to"),
    ],
)
def test_misuse(lines, says):
    with pytest.raises(BarrierError, match=says):
        run(lines, args=[np.zeros(1)])


def test_a_token_says_how_many_were_lacking():
    """The lanes of a warp arrive as one, as on an H200; the phase behind the number counts for the wait alone."""
    out = np.zeros(64, "u4")
    lines = barrier(64) + "mbarrier.arrive.shared::cta.b64 %d0, [%bar]; mbarrier.pending_count.b64 %r0, %d0;"
    lines += "W: mbarrier.test_wait.shared::cta.b64 %q0, [%bar], %d0; @!%q0 bra W;"
    run(lines + "mad.wide.u32 %d1, %i, 4, %p0; st.global.u32 [%d1], %r0;", args=[out])
    assert out.tolist() == [64] * 32 + [32] * 32
