"""The debugging snippets of the programming model, chapters 12.2 and 12.3, on a small model of kernels."""

import builtins

import numpy as np
import pytest

import tessera
from tessera import tile


@tessera.kernel
def attention(x, out):
    i = tile.program_id(0)
    scores = tile.exp(x[i, 0:4])
    tile.store(out[i, 0:4], scores / tile.sum(scores))


@tessera.kernel
def custom_kernel(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((64,), tessera.f32)
    row[2 * me] = x[me]
    tile.barrier()
    out[me] = row[2 * me]


def model(x):
    out = np.zeros_like(x)
    attention[(len(x),)](x, out)
    return out


FINE, LARGE = np.ones((2, 4), np.float32), np.full((2, 4), 89.3, np.float32)


def test_the_interactive_debugger(monkeypatch, capsys):
    @tessera.debug.interactive(commands="trace_back scores; fix_suggestion; continue")
    def debug_model(x):
        try:
            with tessera.debug.checked(nan=True):
                return model(x)
        except tessera.NumericalError as e:
            tessera.debug.break_here(locals())
            return e

    typed = iter(["print(type(e).__name__, x.max())"])

    def answer(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", answer)
    assert isinstance(debug_model(LARGE), tessera.NumericalError)
    shown = capsys.readouterr().out
    assert "ts.exp makes inf of finite operands" in shown and "NonFiniteError 89.3" in shown
    assert np.allclose(debug_model(FINE), 0.25)


def test_watched_tensors():
    warned = []

    @tessera.debug.watch("scores", "activations", write=warned.append)
    def monitored_training(batch):
        activations = batch * 2.0
        return model(activations)

    monitored_training(LARGE)
    assert any("activations: min 178.6" in line for line in warned)
    assert any("scores" in line and "WARNING: not all elements are finite" in line for line in warned)


def test_memory(capsys):
    kept = []

    @tessera.debug.memory
    def find_memory_leak():
        for _ in range(20):
            kept.append(model(FINE))
        tessera.debug.memory_report()

    find_memory_leak()
    shown = capsys.readouterr().out
    assert "peak" in shown and "still held" in shown and "test_chapter_12.py" in shown


def test_a_kernel(capsys):
    @tessera.debug.kernel
    def debug_custom_kernel():
        x = np.ones(32, np.float32)
        with tessera.debug.kernel_trace():
            custom_kernel[(1,), 32](x, np.zeros_like(x))
        tessera.debug.kernel_report()

    debug_custom_kernel()
    shown = capsys.readouterr().out
    for words in ("custom_kernel, grid (1,), group 32", "shared memory: 256 bytes", "occupancy", "memory 57.1%",
                  "bank conflicts: 2 extra cycles", "coalescing: 100%", "suggestion: pad or swizzle"):  # fmt: skip
        assert words in shown, shown


def test_nondeterminism():
    counter = iter(range(100))

    @tessera.debug.deterministic
    def debug_nondeterminism(x):
        return tessera.exp(x * float(next(counter)))

    with pytest.raises(tessera.TesseraError):
        debug_nondeterminism(tessera.Tensor([1.0, 2.0]))
