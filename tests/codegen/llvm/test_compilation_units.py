"""Compilation by unit: the same results as the whole text, each unit compiled once, and Ctrl-C between two units."""

import contextlib
import ctypes
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.contract import get_backend
from tessera.codegen.llvm.runtime import jit, object_files
from tessera.codegen.llvm.runtime.jit import divide_text
from tessera.core.errors import ArtifactError, ExecutionError
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
def compiled(monkeypatch, tmp_path):
    """The units that are compiled; the cache is empty."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    found, compile_unit = [], jit.compile_unit
    monkeypatch.setattr(jit, "compile_unit", lambda unit: found.append(unit) or compile_unit(unit))
    return found


def emit(function, *arrays):
    levels = prepare(ts.jit(function), arrays, "llvm").levels
    return get_backend("llvm").emit(levels["tile"], {}).text("kernels.ll")


@pytest.mark.parametrize("threads", (1, 2))
def test_units_compute_what_the_whole_computes(compiled, threads):
    program = prepare(ts.jit(ts.value_and_grad(loss)), (W, X), "llvm")
    artifact = get_backend("llvm").emit(program.levels["tile"], {})
    found = get_backend("llvm").runtime(artifact, threads).run(list(program.arrays))
    assert len(compiled) > 3
    for got, want in zip(found, program.run("target", "llvm"), strict=True):  # the emulator reads the whole text
        np.testing.assert_array_equal(got, want)


def test_units_share_the_words_of_the_runtime(compiled):
    x, y = np.arange(4, dtype="f4"), np.zeros(4, "f4")
    kernel = meet.like(meet.options.__class__(target="llvm"))
    kernel[(4,)](x, y)
    np.testing.assert_array_equal(y, [2, 4, 6, 0])
    with pytest.raises(ExecutionError, match="too large"):
        kernel[(4,)](np.full(4, 99, np.float32), y)


def defined(unit):
    return set(re.findall(r"^define [^@]*@([\w.$-]+)\(", unit.text, re.MULTILINE))


def test_every_function_is_in_a_unit_that_has_what_it_calls():
    text = emit(ts.grad(loss), W, X)
    units = divide_text(text)
    _, functions = jit._take_functions(text)
    assert divide_text(text) == units and functions.apart and sum(unit.shared is not None for unit in units) > 1
    for name in {*functions.texts} - functions.internal | functions.apart:
        assert sum(name in defined(unit) for unit in units) == 1
    for unit in units:
        called = {n for name in defined(unit) for n in functions.find_called([name])[0]}
        assert called | {*unit.calls} <= defined(unit) | functions.apart and not {*unit.calls} & defined(unit)
    assert "= global i64" in units[0].text and not any("= global i64" in unit.text for unit in units[1:])


def test_a_text_whose_functions_cannot_be_told_apart_is_one_unit():
    text = emit(ts.grad(loss), W, X)
    for changed in (text.replace("\ndefine ", "\n}\n; a line\n}\ndefine ", 1), "define strange\n}\n"):
        assert jit._take_functions(changed)[1].texts == {} and [u.text for u in divide_text(changed)] == [changed]


def test_kernels_that_call_each_other_are_one_unit():
    text = emit(ts.grad(loss), W, X)
    kernels = [name for unit in divide_text(text) for name in defined(unit) if name.endswith(".task")]
    first, last = (name.removesuffix(".task") for name in (kernels[0], kernels[-1]))
    changed = text.replace(f"call void @{first}(", f"call void @{last}(")
    assert any({first + ".task", last} <= defined(unit) for unit in divide_text(changed))
    changed, texts = text, jit._take_functions(text)[1].texts
    pair = [unit.shared for unit in divide_text(text) if unit.shared][:2]
    for name, other in zip(pair, reversed(pair), strict=True):
        changed = changed.replace(texts[name], texts[name].replace("  ret void", f"  call void @{other}()\n  ret void"))
    assert len(divide_text(changed)) == 1  # functions that are never inlined, and call each other


def test_a_unit_is_compiled_once(compiled):
    """A changed model compiles what changed; comments that move its lines change nothing."""
    text = emit(lambda x, w: ts.softmax(x @ w) @ w, X, W)
    code = jit.get_object_code(text)
    first = [*compiled]
    assert re.search(r"!DILocation\(line: \d+", text)
    assert jit.get_object_code(re.sub(r"line: \d+", "line: 7", text)) == code and compiled == first
    assert code == jit.compile_object(text)
    del compiled[:]
    jit.get_object_code(emit(lambda x, w: ts.log_softmax(x @ w) @ w, X, W))
    assert 0 < len(compiled) < len(first) and not {unit.shared for unit in compiled} - {None}


def test_a_caller_knows_what_llvm_found_out_about_a_function_of_another_unit():
    text = "define i32 @f(ptr %p) noinline {\n  %x = load i32, ptr %p\n  %y = and i32 %x, 7\n  ret i32 %y\n}\n"
    declaration = jit.compile_unit(jit.Unit(text, (), "f")).partition(b"\0")[0].decode()
    assert re.fullmatch(r"declare [^\n]*i32 @f\(ptr [^\n]*%p\)[^\n]*", declaration)
    assert "nounwind" in declaration and "noinline" in declaration
    caller = f"define i32 @g(ptr %p) {{\n  %x = call i32 @f(ptr %p)\n  ret i32 %x\n}}\n{declaration}\n"
    code = jit.compile_unit(jit.Unit(caller, ("f",))).partition(b"\0")[2]
    assert object_files.list_symbols(code)[0] == ["g"] and "f" in object_files.list_symbols(code)[1]


def test_object_code_is_packed():
    pack, unpack = object_files.pack_objects, object_files.unpack_objects
    assert pack([b"one"]) == b"one" and unpack(b"one") == [b"one"]
    assert unpack(pack([b"a", b"", b"ccc"])) == [b"a", b"", b"ccc"]


def test_ctrl_c_between_units_keeps_those_that_are_done(compiled, monkeypatch, tmp_path):
    text, compile_unit = emit(loss, W, X), jit.compile_unit

    def interrupt(unit):
        if len(compiled) == 3:
            raise KeyboardInterrupt
        return compile_unit(unit)

    monkeypatch.setattr(jit, "compile_unit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        jit.get_object_code(text)
    assert len([*tmp_path.iterdir()]) == len(compiled) == 3
    monkeypatch.setattr(jit, "compile_unit", compile_unit)
    jit.get_object_code(text)
    assert len({*compiled}) == len(compiled) > 3


ANSWER = "define i64 @answer() {\n  ret i64 %d\n}\n"


def test_code_outlives_its_linker(monkeypatch):
    """Symbols are those of a program, whatever others define; a linker makes a number of libraries."""
    monkeypatch.setattr(object_files, "LIBRARIES", 2)
    codes = [jit.MachineCode(ANSWER % n) for n in range(7)]
    assert [ctypes.CFUNCTYPE(ctypes.c_int64)(c.address("answer"))() for c in codes] == [*range(7)]
    assert codes[0].find_variable("another") == 0
    with pytest.raises(ArtifactError, match="no symbol another"):
        codes[0].address("another")


def test_threads_that_compile_at_once_share_the_code():
    """`functools.cache` kept the code of one of them, and freed what another one was running."""
    both, made = threading.Barrier(2, timeout=0.2), []

    @jit.compile_once
    def compile_answer():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # for a second thread, which waits for this one
        made.append(jit.MachineCode(ANSWER % 1))
        return made[-1]

    with ThreadPoolExecutor(2) as threads:
        found = [f.result() for f in [threads.submit(compile_answer) for _ in range(2)]]
    assert found == made * 2 and len(made) == 1


def test_code_that_needs_what_this_process_lacks_is_refused():
    text = "declare void @tessera_unknown()\ndefine void @f() {\n  call void @tessera_unknown()\n  ret void\n}\n"
    with pytest.raises(ArtifactError, match="lacks the function tessera_unknown"):
        jit.MachineCode(text)
