"""Watched variables and followed memory."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError


@ts.kernel
def summed(x, out):
    i = ts.tile.program_id(0)
    total = 0.0
    for j in ts.tile.range(0, 3):
        total += x[i] * j
    total = total / (x[i] - x[i])
    out[i] = total


def test_a_kernels_variables_are_watched():
    lines = []

    @ts.debug.watch("total", write=lines.append)
    def run(x, out):
        summed[(4,)](x, out)

    run(np.arange(4, dtype=np.float32), np.zeros(4, np.float32))
    seen = run.watch.seen
    assert [s.stats.split(",")[1] for s in seen] == [" max 0", " max 0", " max 3", " max 9", " nan 1"]
    assert seen[-1].warning == "not all elements are finite" and "test_watching.py:17" in seen[-1].place
    assert lines == [str(s) for s in seen]


def test_a_functions_variables_are_watched():
    @ts.debug.watch("h", "loss", limit=100.0, write=lambda line: None)
    def model(x):
        h = x * 2.0
        h = ts.exp(h)
        loss = h.sum()
        return loss

    model(ts.Tensor([1.0, 3.0]))
    names = [s.name for s in model.watch.seen]
    assert names == ["h", "h", "loss"] and [bool(s.warning) for s in model.watch.seen] == [False, True, True]
    assert "a magnitude of 403.429 (limit 100)" in model.watch.seen[1].warning


@ts.kernel
def buffered(x, out):
    row = ts.tile.alloc_shared((64,), ts.f32)
    ts.tile.store(row[0:64], ts.tile.load(x[0:64]))
    ts.tile.store(out[0:64], ts.tile.load(row[0:64]))


def test_memory_that_is_kept_is_named(capsys):
    kept = []

    @ts.debug.memory
    def leaks():
        for _ in range(3):
            kept.append(np.zeros(1 << 14, np.float64))
        buffered[(1,)](np.ones(64, np.float32), np.ones(64, np.float32))
        assert ts.debug.memory_report(show=False).held >= 3 << 17

    leaks()
    report = ts.debug.memory_report()
    assert report.peak >= report.held >= 3 << 17 and report.buffers == {"shared": 256}
    assert "test_watching.py:61" in report.sources[0].place and report.sources[0].bytes >= 3 << 17
    assert str(report) in capsys.readouterr().out and "kernel buffers of one group: 256 bytes shared" in str(report)


def test_memory_that_is_freed_is_not():
    @ts.debug.memory
    def clean():
        np.zeros(1 << 16, np.float64)

    clean()
    report = ts.debug.memory_report(show=False)
    assert report.peak >= 1 << 19 and report.held < 1 << 16


def test_nothing_followed(monkeypatch):
    from tessera.tools.debug import kernel_tracing, memory_use

    monkeypatch.setattr(memory_use, "_LAST", [])
    monkeypatch.setattr(kernel_tracing, "_LAST", [])
    for report in (ts.debug.memory_report, ts.debug.kernel_report):
        with pytest.raises(ArgumentError):
            report()


@ts.kernel
def squares(x, out):
    i = ts.tile.program_id(0)
    y = x[i] * x[i]
    out[i] = y


def test_the_decorators_take_kernels(capsys):
    x, out = np.float32([1, 200]), np.zeros(2, np.float32)
    watched = ts.debug.watch("y", write=lambda line: None)(squares)
    for each in (watched, ts.debug.memory(squares), ts.debug.kernel(squares)):
        each[(2,)](x, out)
        assert each.__name__ == "squares" and out.tolist() == [1, 40000]
    assert [seen.warning for seen in watched.watch.seen] == ["a magnitude of 40000 (limit 10000)"]
    assert "squares" in str(ts.debug.kernel_report()) and ts.debug.memory_report(show=False).peak >= 0
