"""Compiled programs: threads, the object cache, arguments of every kind, workspace, and the emulator."""

import ctypes
import itertools
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from test_control_flow import numbers
from test_matmul import matmul
from test_memory_ops import Kernel
from test_reductions import reduced

from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.runtime import jit
from tessera.codegen.llvm.runtime.cooperative_launches import CooperativeLaunches
from tessera.codegen.llvm.runtime.thread_pool import choose_thread_count
from tessera.core.errors import (
    ArgumentError,
    DTypeError,
    ExecutionError,
    ParseError,
    ShapeError,
    UnsupportedOpError,
)
from tessera.core.types import RefType, f32
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Value
from tessera.ops.dialects import host, tile
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce


def scaled(size=100, block=10, outputs=1):
    """out = x + x by several programs."""
    x = np.arange(size, dtype=np.float32)
    k = Kernel(x, x)
    at = k(e.mul, k(tile.program_id), block)
    loaded = k.load(k.params[0], at, shape=(block,))
    k.store(k.params[1], k.add(loaded, loaded), at)
    return k.module((size // block,), outputs), x


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_agree(threads):
    module, (a, b, out) = matmul(100, 90, 80, 16, 16, 16)
    BACKEND.runtime(BACKEND.emit(module, {}), threads).run([a, b, out])
    np.testing.assert_allclose(out, a @ b, 1e-4, 1e-4)


def test_many_runs_from_many_threads():
    module, x = scaled()
    program, wrong = BACKEND.runtime(BACKEND.emit(module, {})), []

    def work(seed):
        for n in range(50):
            mine = np.full(100, seed * 100 + n, np.float32)
            if not (program.run([mine])[0] == 2 * mine).all():
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_wrong_number_of_threads(monkeypatch, text):
    monkeypatch.setenv("TESSERA_THREADS", text)
    with pytest.raises(ArgumentError, match="number of threads"):
        choose_thread_count()


def test_strided_and_readonly_inputs():
    module, x = scaled()
    program = BACKEND.runtime(BACKEND.emit(module, {}))
    wide = np.arange(200, dtype=np.float32)[::2]
    wide.setflags(write=False)
    np.testing.assert_array_equal(program.run([wide])[0], wide * 2)


def test_strided_arrays_are_written_back():
    module, x = scaled(outputs=0)
    out = np.zeros(200, np.float32)
    BACKEND.runtime(BACKEND.emit(module, {})).run([x, out[::2]])
    np.testing.assert_array_equal(out[::2], x * 2)
    assert not out[1::2].any()


def test_overlapping_arrays():
    """What is read is copied before what overlaps it is written."""
    module, _ = scaled(outputs=0)
    memory = np.arange(110, dtype=np.float32)
    before = memory[:100].copy()
    BACKEND.runtime(BACKEND.emit(module, {})).run([memory[:100], memory[10:]])
    np.testing.assert_array_equal(memory[10:], before * 2)


@pytest.mark.parametrize(
    ("array", "error"),
    [(np.zeros(99, np.float32), ShapeError), (np.zeros(100), DTypeError), (None, ArgumentError)],
)
def test_wrong_arguments(array, error):
    program = BACKEND.runtime(BACKEND.emit(scaled()[0], {}))
    with pytest.raises(error):
        program.run([] if array is None else [array])


def test_workspace_views_and_two_launches():
    """out = (x + x) + (x + x), with the first sum in the workspace under another shape."""
    inner, x = scaled()
    kernel = inner.functions[1]
    b, (source, out) = Builder(), (Value(RefType((100,), f32), n) for n in "xy")
    room = b.add(host.alloc, [], {"shape": (10, 10), "dtype": f32, "offset": -1}).out
    flat = b.add(host.view, [room], {"shape": (100,)}).out
    b.add(host.launch, [source, flat], {"kernel": kernel.name, "grid": (10,)})
    b.add(host.launch, [flat, out], {"kernel": kernel.name, "grid": (10,)})
    module = Module("tile", (Function("main", b.block([source, out], []), Attrs({"outputs": 1})), kernel))
    emitted = BACKEND.emit(module, {})
    for run in (BACKEND.runtime(emitted).run, BACKEND.interpreter(emitted)):
        np.testing.assert_array_equal(run([x])[0], 4 * x)


def test_the_cache_is_used_and_a_damaged_entry_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    module, x = scaled()
    text = BACKEND.emit(module, {}).text("kernels.ll")
    first = jit.get_object_code(text)
    monkeypatch.setattr(jit, "compile_unit", None)
    assert jit.get_object_code(text) == first
    monkeypatch.undo()
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    entries = {entry: entry.read_bytes() for entry in tmp_path.iterdir()}
    for entry, content in entries.items():
        entry.write_bytes(content[:-1])
    assert jit.get_object_code(text) == first
    assert {entry: entry.read_bytes() for entry in tmp_path.iterdir()} == entries


def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", "/proc/none")
    module, x = scaled()
    np.testing.assert_array_equal(BACKEND.runtime(BACKEND.emit(module, {})).run([x])[0], 2 * x)


def test_machine_code_has_each_kernel_once():
    """In its task: nothing else calls the kernel and its range, which are inlined there."""
    module, _ = scaled()
    text = re.sub(r"@k\b", "@named_kernel", BACKEND.emit(module, {}).text("kernels.ll"))  # "k" is a number, too
    (task,) = re.findall(r"@(\S+\.task)\(", text)
    kernel = task.removesuffix(".task")
    symbols = jit.compile_object(text).split(b"\0")
    assert f"define void @{kernel}.range(" in text and f"define void @{kernel}(" in text
    assert task.encode() in symbols
    assert not {kernel.encode(), f"{kernel}.range".encode()} & {*symbols}


def test_text_that_llvm_refuses():
    with pytest.raises(ParseError, match="LLVM cannot parse"):
        jit.compile_object("define nonsense")


@pytest.mark.parametrize("name", ["llvm.log1pexp.f64", "no_such_function"])
def test_a_function_that_does_not_exist_is_refused_before_it_runs(name):
    body = f"  %y = call double @{name}(double %x)\n  ret double %y\n"
    text = f"declare double @{name}(double)\ndefine double @f(double %x) {{\n{body}}}"
    with pytest.raises(UnsupportedOpError, match=f"the target llvm has no function {re.escape(name)}"):
        jit.MachineCode(text)
    jit.MachineCode(text.replace(name, "llvm.exp.f64"))
    jit.MachineCode(text.replace(name, "erf"))


@pytest.mark.parametrize(
    "program",
    [
        matmul(33, 40, 50, 16, 16, 16),
        reduced(reduce.argmax, numbers(f32, 5, 37), -1),
        (scaled(outputs=0)[0], [np.ones(100, "f4")] * 2),
    ],
    ids=["matmul", "argmax", "sum"],
)
def test_the_text_interpreter_gives_the_same_bits(program):
    module, arrays = program
    emitted = BACKEND.emit(module, {})
    ours, theirs = [a.copy() for a in arrays], [a.copy() for a in arrays]
    BACKEND.runtime(emitted).run(ours)
    BACKEND.interpreter(emitted)(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_buffer_under_two_names():
    """A launch that passes one buffer twice: what is read through one name is read before the other is written."""
    x = np.arange(64, dtype=np.float32)
    k = Kernel(x, x)
    low, high = k.load(k.params[0], 0, shape=(32,)), k.load(k.params[0], 32, shape=(32,))
    k.store(k.params[1], high, 0)
    k.store(k.params[1], low, 32)
    kernel = k.module().functions[1]
    b, p = Builder(), Value(RefType((64,), f32), "x")
    b.add(host.launch, [p, p], {"kernel": "k", "grid": (1,)})
    module = Module("tile", (Function("main", b.block([p], []), Attrs({"outputs": 0})), kernel))
    BACKEND.runtime(BACKEND.emit(module, {})).run([x])
    np.testing.assert_array_equal(x, np.concatenate([np.arange(32, 64), np.arange(32)]))


def test_a_program_of_a_kernel_without_a_grid_has_a_linear_number():
    x = np.float32([1, 2, -3, 4])
    k = Kernel(x)
    value = k.load(k.params[0], k(tile.program_id), shape=(1,))
    k(tile.assert_, k(e.greater, value, k.const(0.0, f32, (1,))), value, message="positive")
    artifact = BACKEND.emit(k.module((4,)), {})
    for run in (BACKEND.runtime(artifact).run, BACKEND.interpreter(artifact)):
        with pytest.raises(ExecutionError, match=re.escape("program (2,)")):
            run([x])


def test_runs_of_launches_have_each_once():
    """A cooperative launch is a run of its own, wherever it stands."""
    for cooperative in itertools.product((False, True), repeat=4):
        launches = [{"kernel": f"k{i}"} for i in range(4)]
        names = [e["kernel"] for e, c in zip(launches, cooperative, strict=True) if c]
        plan = {"launches": launches, "meeting": names, "scratch": dict.fromkeys(names, 64)}
        code = SimpleNamespace(variable=lambda _: ctypes.addressof(WORD))
        found = CooperativeLaunches(plan, code, None)
        for first, last in itertools.combinations(range(5), 2):
            runs = list(found.split(first, last))
            assert [r for a, b, _ in runs for r in range(a, b)] == list(range(first, last))
            assert all(c == cooperative[a] and (b == a + 1 or not c) for a, b, c in runs)
            assert not any(cooperative[a:b] != (False,) * (b - a) for a, b, c in runs if not c)


WORD = ctypes.c_int64(0)
