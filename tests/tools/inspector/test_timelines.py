"""Timelines: a model of warps and barriers with known answers, and a mesh whose sums are those of the simulator."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.interp.target.csl.fabric.router_grid import TRAFFIC_LOG
from tessera.interp.target.csl.host.visualisation import summarise_run
from tessera.interp.target.ptx import PtxModule
from tessera.interp.target.ptx.text.parser import parse_module
from tessera.runtime import driver
from tessera.tools.inspector import gpu_timeline, mesh_timeline
from tessera.tools.inspector.gpu_timeline import BARRIER, SHARED, WAIT, TimelineRecorder, estimate_registers

# Warp 1 executes three more instructions than warp 0 before the barrier; then each thread reads what another wrote.
TEXT = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {
.reg .pred %q; .reg .b32 %t, %a, %s, %v; .reg .b64 %x;
.shared .align 4 .b8 held[256];
mov.u32 %t, %tid.x;
shl.b32 %s, %t, 2;
setp.lt.u32 %q, %t, 32;
@%q bra $low;
add.u32 %t, %t, 1;
add.u32 %t, %t, 1;
sub.u32 %t, %t, 2;
$low:
mov.u32 %a, held;
add.u32 %a, %a, %s;
st.shared.u32 [%a], %t;
bar.sync 0;
ld.shared.u32 %v, [%a];
ret;
}
"""


@pytest.fixture
def timeline():
    recorder = TimelineRecorder({"k": (1, TEXT.count("\n"))})
    PtxModule(TEXT).launch("k", grid=3, block=64, args=[np.zeros(1, np.uint32)], observer=recorder)
    return recorder.kernels["k"]


def test_a_barrier_lasts_until_its_last_warp_arrives(timeline):
    ((slot, number, warps, line),) = timeline.barriers
    assert (number, warps) == (0, 2) and TEXT.splitlines()[line - 1] == "bar.sync 0;"
    waits = [[(a, b) for a, b, kind, _ in spans if kind == WAIT] for spans in timeline.spans]
    assert waits == [[(slot - 3, slot)], []]
    for spans in timeline.spans:
        assert [s[0] for s in spans[1:]] == [s[1] for s in spans[:-1]]  # without gaps
        assert any(kind == BARRIER and b <= slot for _, b, kind, _ in spans)
        assert any(kind == SHARED and a >= slot for a, _, kind, _ in spans)
    assert timeline.instructions == 10 + 13


def test_shared_memory_is_that_of_the_first_block(timeline):
    written = [s for s in timeline.shared if s[4]]
    assert {(s[2], s[3]) for s in written} <= {(0, 256), (0, 128), (128, 256)}
    assert (min(s[2] for s in timeline.shared), max(s[3] for s in timeline.shared)) == (0, 256)


def test_a_long_timeline_is_cut():
    found = gpu_timeline.KernelTimeline.of(1)
    for _ in range(gpu_timeline.MOST_SLOTS + 5):
        found.issue([0], 0, 1)
    assert found.cut and found.clocks == [gpu_timeline.MOST_SLOTS] and found.spans == [[[0, 4000, 0, 1]]]


@pytest.mark.parametrize(
    ("body", "registers"),
    [
        ("mov.u32 %a, 1; add.u32 %b, %a, 1; add.u32 %c, %b, %b; st.global.u32 [%x], %c;", 3),  # x and one more
        ("mov.u32 %a, 1; mov.u32 %b, 2; mov.u32 %c, 3; add.u32 %a, %a, %b; add.u32 %a, %a, %c; "
         "st.global.u32 [%x], %a;", 5),
        ("mov.u32 %a, 1; @%p mov.u32 %a, 2; st.global.u32 [%x], %a;", 3),
        ("mov.u32 %a, 1; $l: add.u32 %b, %a, 1; setp.lt.u32 %p, %b, 9; @%p bra $l; st.global.u32 [%x], %b;", 4),
        ("ld.global.v2.u32 {%a, %b}, [%x]; st.global.v2.u32 [%x], {%b, %a};", 4),
    ],
)  # fmt: skip
def test_registers_are_those_live_at_once(body, registers):
    text = f""".version 8.0\n.target sm_80\n.address_size 64
    .visible .entry k() {{ .reg .b32 %a, %b, %c; .reg .b64 %x; .reg .pred %p; mov.u64 %x, 0; {body} ret; }}"""
    assert estimate_registers(parse_module(text, "k.ptx").functions[0]) == registers


def test_the_mesh_has_the_sums_of_the_simulator():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 8), np.float32), rng.standard_normal((8, 8), np.float32)
    function = ts.jit(lambda x, w: ts.tanh(x @ w)).trace(x, w).function
    module = driver.lower(function, "csl:2x2")["tile"]
    bursts = []
    token = TRAFFIC_LOG.set(lambda *burst: bursts.append(burst))
    try:
        runtime = driver.make_runtime(module, "csl:2x2")
        result = runtime.run([x, w])
    finally:
        TRAFFIC_LOG.reset(token)
    np.testing.assert_allclose(result[0], np.tanh(x.astype(np.float64) @ w), atol=1e-5)
    summary = summarise_run(runtime.last_run)
    for each in summary["pes"]:
        for number, name in enumerate(("WEST", "EAST", "NORTH", "SOUTH")):
            words = sum(b[5] for b in bursts if b[:3] == (each["x"], each["y"], number))
            assert words == each["sent"][name]
    found = mesh_timeline.describe_mesh(runtime.last_run, bursts)
    width = found["cycles"] / found["frames"]
    for number, (x_, y_) in enumerate(found["places"]):
        busy = next(p["busy"] for p in summary["pes"] if (p["x"], p["y"]) == (x_, y_))
        assert sum(f[number] for f in found["busy"]) * width / 100 == pytest.approx(busy, rel=0.02)
    sent = sum(b[5] for b in bursts if b[2] < 4)
    assert sent and sum(n for frame in found["traffic"] for _, _, n in frame) == pytest.approx(sent, rel=0.1)


def test_a_program_of_too_many_threads_has_no_timeline():
    x = np.zeros((1 << 22,), np.float32)
    function = ts.jit(lambda x: x + 1.0).trace(x).function
    module = driver.lower(function, "ptx")["tile"]
    artifact = get_backend("ptx").emit(module, {})
    plan = artifact.manifest["plan"]
    plan = {**plan, "launches": [{**plan["launches"][0], "grid": [1 << 16, 1, 1]}]}
    assert "and at most 2,097,152 are emulated" in gpu_timeline._find_obstacle(plan)


@pytest.mark.parametrize(
    ("start", "end", "want"),
    [(10, 20, {1: 6}), (0, 5, {0: 6}), (15, 25, {1: 3, 2: 3}), (95, 120, {9: 1.2}), (33, 33, {3: 6}),
     (5, 35, {0: 1, 1: 2, 2: 2, 3: 1})],
)  # fmt: skip
def test_a_span_is_spread_over_its_frames(start, end, want):
    column = np.zeros(10)
    mesh_timeline._add_span(column, start, end, 10, 100, 6)
    assert {int(i): pytest.approx(column[i]) for i in np.flatnonzero(column)} == want
