"""Compilation of a large text in parts: the same results as in one, and Ctrl-C between two parts."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.codegen.llvm.runtime import jit
from tessera.core.errors import ExecutionError
from tessera.runtime.program import prepare

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(32, 64)).astype("f4"), RNG.normal(size=(64, 64)).astype("f4")


def loss(w, x):
    return (ts.softmax(ts.gelu(ts.layer_norm(x @ w) @ w)) * ts.erf(x)).mean()


@ts.kernel
def meet(x: ts.Tensor["N"], y: ts.Tensor["N"]):
    i, n = tile.program_id(0), tile.grid_size(0)
    x[i] = x[i] * 2.0
    tile.grid_barrier()
    tile.assert_(x[(i + 1) % n] < 100.0, "too large")
    y[i] = x[(i + 1) % n]


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The parts of the texts that are compiled."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "PART_CHARACTERS", 2000)
    found, split = [], jit.split_text
    monkeypatch.setattr(jit, "split_text", lambda text: found.append(split(text)) or found[-1])
    return found


@pytest.mark.parametrize("threads", (1, 2))
def test_parts_compute_what_the_whole_computes(parts, threads):
    program = prepare(ts.jit(ts.value_and_grad(loss)), (W, X), "llvm")
    artifact = get_backend("llvm").emit(program.levels["tile"], {})
    found = get_backend("llvm").runtime(artifact, threads).run(list(program.arrays))
    assert max(map(len, parts)) > 3
    for got, want in zip(found, program.run("target", "llvm"), strict=True):  # the emulator reads the whole text
        np.testing.assert_array_equal(got, want)


def test_parts_share_the_words_of_the_runtime(parts):
    x, y = np.arange(4, dtype="f4"), np.zeros(4, "f4")
    kernel = meet.like(meet.options.__class__(target="llvm"))
    kernel[(4,)](x, y)
    np.testing.assert_array_equal(y, [2, 4, 6, 0])
    with pytest.raises(ExecutionError, match="too large"):
        kernel[(4,)](np.full(4, 99, np.float32), y)


def test_every_function_is_in_a_part_that_has_what_it_calls(parts):
    program = prepare(ts.jit(ts.grad(loss)), (W, X), "llvm")
    text = get_backend("llvm").emit(program.levels["tile"], {}).text("kernels.ll")
    found = jit.split_text(text)
    _, functions, internal = jit._take_functions(text)
    exported = [name for name in functions if name not in internal]
    for name in exported:
        assert sum(f"@{name}(" in "".join(line for line in p.splitlines() if "define" in line) for p in found) == 1
    assert jit.split_text(text) == found and "global i64" in found[0] and "external global i64" in found[1]
    monkey = text.replace(f"call void @{exported[0]}(", f"call void @{exported[-1]}(")
    assert jit.split_text(monkey) == [monkey]  # kernels that call each other stay together


def test_object_code_is_packed():
    assert jit.pack_objects([b"one"]) == b"one" and jit.unpack_objects(b"one") == [b"one"]
    assert jit.unpack_objects(jit.pack_objects([b"a", b"", b"ccc"])) == [b"a", b"", b"ccc"]


def test_ctrl_c_between_parts_leaves_no_cache_entry(parts, monkeypatch, tmp_path):
    done, compile_part = [], jit._compile_part

    def interrupt(text):
        done.append(text)
        if len(parts[-1]) > 1 and len(done) % 2 == 0:
            raise KeyboardInterrupt
        return compile_part(text)

    monkeypatch.setattr(jit, "_compile_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ts.jit(loss, target="llvm")(W, X)
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and f.name.startswith(jit.compute_cache_key(""))]
    monkeypatch.setattr(jit, "_compile_part", compile_part)
    assert ts.jit(loss, target="llvm")(W, X).shape == ()
