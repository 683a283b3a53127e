"""What kernels did, counted: against what a reader of the kernel counts by hand."""

import json

import numpy as np
import pytest

import tessera as ts
from conformance.tile.debug.advice import ADVICE, square
from tessera import tile
from tessera.core.errors import ArgumentError, DeviceUnavailable
from tessera.runtime.occupancy import GPUS, estimate_occupancy
from tessera.tools.cli.main import main
from tessera.tools.debug import kernel_tracing


@ts.kernel
def add(x, y, out, B: ts.constexpr):
    start = tile.program_id(0) * B
    tile.store(out[start : start + B], tile.load(x[start : start + B]) + tile.load(y[start : start + B]))


@ts.kernel
def product(a, b, out):
    tile.store(out[0:16, 0:16], tile.dot(a[0:16, 0:32], b[0:32, 0:16]))


@ts.kernel
def guarded(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((64,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    if me < 8:
        out[me] = row[me + 8] * 2.0


def ones(*shape):
    return np.ones(shape, np.float32)


def test_bytes_flops_and_sectors_of_an_addition():
    with ts.debug.kernel_trace() as trace:
        add[(8,)](ones(1024), ones(1024), ones(1024), B=128)
    (report,) = trace.reports
    assert (report.counts.read["global"], report.counts.written["global"]) == (8192, 4096)
    assert report.counts.flops == 1024 and report.intensity == 1024 / 12288
    assert report.counts.sectors.taken == 3 * 1024 * 4 // 32 and report.coalescing == 1.0
    assert report.counts.operations == {"memory": 3072, "compute": 1024, "index": 8} and sum(
        report.mix.values()
    ) == pytest.approx(1)


def test_a_product_counts_two_operations_a_step():
    with ts.debug.kernel_trace() as trace:
        product[(1,)](ones(16, 32), ones(32, 16), ones(16, 16))
    assert trace.reports[0].counts.flops == 2 * 16 * 16 * 32


def test_only_active_tiles_count():
    with ts.debug.kernel_trace() as trace:
        guarded[(2,), 32](ones(32), ones(32))
    counts = trace.reports[0].counts
    assert counts.read == {"global": 2 * 32 * 4, "shared": 2 * 8 * 4} and counts.flops == 2 * 8
    assert counts.written == {"global": 2 * 8 * 4, "shared": 2 * 32 * 4} and counts.need.shared_bytes == 256


def traced(kernel):
    with ts.debug.kernel_trace() as trace:
        kernel[(1,), 32](**square())
    return trace.reports[0]


def test_waste_is_counted():
    plain, better = traced(ADVICE["transposed"].plain), traced(ADVICE["transposed"].better)
    assert plain.bank_conflicts == 31 * 32 and better.bank_conflicts == 0
    assert "pad or swizzle" in plain.suggestions()[0] and not any("pad" in s for s in better.suggestions())
    plain, better = traced(ADVICE["down-the-columns"].plain), traced(ADVICE["down-the-columns"].better)
    # 32 loads down a column of 1024 sectors; the loads and stores of `out` (4 sectors each) coalesce.
    assert plain.counts.sectors.taken == 1024 + 64 * 4 and better.counts.sectors.taken == 3 * 32 * 4
    assert plain.coalescing == 384 / 1280 and better.coalescing == 1.0


def test_occupancy_by_hand():
    assert estimate_occupancy("A100", 1024, 0, 32).groups == 2 and estimate_occupancy("A100", 1024, 0, 32).share == 1.0
    assert (
        estimate_occupancy("A100", 256, 163 * 1024, 32).groups == 1
        and estimate_occupancy("A100", 32, 0, 8).limit == "groups"
    )
    assert (
        estimate_occupancy("H100", 256, 0, 128).limit == "registers"
        and estimate_occupancy("H100", 256, 0, 128).groups == 2
    )
    assert estimate_occupancy("T4", 128, 65 * 1024, 32).groups == 0 and len(GPUS) == 10
    with pytest.raises(ArgumentError, match="no GPU P100"):
        estimate_occupancy("P100", 32, 0, 32)


def test_the_report_in_words(capsys):
    @ts.debug.kernel
    def runs():
        guarded[(2,), 32](ones(32), ones(32))

    runs()
    trace = ts.debug.kernel_report()
    shown = capsys.readouterr().out
    assert shown.strip() == str(trace) and "guarded, grid (2,), group 32" in shown
    assert "model of H100: 32 threads" in shown and "occupancy 50% (limited by groups)" in shown


def test_the_timeline_nests(tmp_path):
    with ts.debug.kernel_trace() as trace:
        guarded[(2,), 32](ones(32), ones(32))
    events = json.loads(trace.timeline(tmp_path / "t.json").read_text())["traceEvents"]
    ops = [e for e in events if e["ph"] == "X"]
    assert events[0]["args"]["name"] == "0: guarded(2,)" and {"ts.if", "tile.barrier"} <= {e["name"] for e in ops}
    branch = next(e for e in ops if e["name"] == "ts.if")
    (inner,) = [e for e in ops if e["name"] == "tile.store" and e["args"]["instances"] == 16]
    assert branch["args"]["instances"] == 64 and inner["args"]["line"].split(":")[1] == str(
        guarded.kernel_function.__code__.co_firstlineno + 7
    )
    assert branch["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= branch["ts"] + branch["dur"]


def test_who_touches_what():
    with ts.debug.kernel_trace() as trace:
        add[(4,)](ones(64), ones(64), ones(64), B=16)
    written = [t for t in trace.profile.launches[0].touched if t.tensor == "out"]
    assert [(t.program, t.low, t.high) for t in written] == [((i,), (16 * i,), (16 * i + 16,)) for i in range(4)]
    table, _ = kernel_tracing.first_access_cells(written)
    assert table.tolist() == [[i // 16 for i in range(64)]]


@pytest.mark.parametrize("name", ["p.png", "p.svg"])
def test_the_picture(name, tmp_path):
    pytest.importorskip("matplotlib")
    with ts.debug.kernel_trace() as trace:
        product[(1,)](ones(16, 32), ones(32, 16), ones(16, 16))
    head = trace.picture(tmp_path / name).read_bytes()[:100]
    assert head.startswith(b"\x89PNG") or b"<?xml" in head
    with pytest.raises(ArgumentError, match="nothing was touched"):
        trace.picture(tmp_path / name, "nobody")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with ts.debug.kernel_trace() as trace:
        add[(4,)](ones(64), ones(64), ones(64), B=16)
    with pytest.raises(DeviceUnavailable, match="pictures need matplotlib"):
        trace.picture(tmp_path / "p.png")


def test_tracing_keeps_the_bits(rng):
    x, y, plain, traced = rng.random(64, np.float32), rng.random(64, np.float32), ones(64), ones(64)
    add[(4,)](x, y, plain, B=16)
    with ts.debug.kernel_trace():
        add[(4,)](x, y, traced, B=16)
    assert plain.tobytes() == traced.tobytes()


PROGRAM = """
import numpy as np
import tessera as ts


@ts.example(lambda rng: (np.ones(64, np.float32), np.ones(64, np.float32)), grid=(4,))
@ts.kernel
def copied(x, out):
    i = ts.tile.program_id(0) * 16
    out[i : i + 16] = x[i : i + 16]
"""


def test_the_command(tmp_path, capsys):
    (tmp_path / "copied.py").write_text(PROGRAM)
    arguments = ["run", f"{tmp_path}/copied.py", "--report", "--gpu", "A100", "--timeline", f"{tmp_path}/t.json"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "copied, grid (4,), group 1" in shown and "model of A100" in shown and (tmp_path / "t.json").is_file()
    assert main([*arguments, "--target", "llvm"]) == 2
    assert "a report of kernels is the Tile interpreter's" in capsys.readouterr().err
    assert main(["run", f"{tmp_path}/copied.py", "--report", "--gpu", "P100"]) == 2
