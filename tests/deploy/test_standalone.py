"""Standalone programs: C libraries that link and run without Python, on this processor and on AArch64."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf
from tessera import deploy
from tessera.core.errors import ArgumentError, FileError, UnknownNameError, UnsupportedOpError
from tessera.tools.cli.main import main

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
needs_cpp = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
AARCH64 = "aarch64-linux-gnu-gcc", "qemu-aarch64"
needs_aarch64 = pytest.mark.skipif(not all(map(shutil.which, AARCH64)), reason="needs a cross compiler and qemu-user")
RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 5)).astype(np.float32)
X = RNG.standard_normal((3, 4)).astype(np.float32)


def run(made, inputs, shape, dtype=np.float32, command=("./example",), cc=("cc",), sizes=()):
    """Link the example, run it on inputs in an empty environment, and read its results."""
    folder = made.folder
    link = [*cc, "-std=gnu11", "-Wall", "-Werror", "example.c", "-o", "example", "-L.", f"-l{made.name}"]
    subprocess.run([*link, "-Wl,-rpath,$ORIGIN"], cwd=folder, check=True)
    (folder / "in").write_bytes(b"".join(np.ascontiguousarray(a).tobytes() for a in inputs))
    done = subprocess.run(
        [*command, "in", "out", *map(str, sizes)], cwd=folder, capture_output=True, text=True, env={}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return np.fromfile(folder / "out", dtype).reshape(shape)


@ts.jit
def layer(p, x):
    return ts.softmax(ts.relu(x @ p["w"]) + 0.5, axis=-1)


def want(x):
    hidden = np.maximum(x.astype(np.float64) @ W, 0) + 0.5
    return np.exp(hidden) / np.exp(hidden).sum(-1, keepdims=True)


@needs_compiler
@pytest.mark.parametrize("machine", [None, "x86-64-v3", "native"])
@pytest.mark.parametrize("threads", [False, True])
def test_the_example_runs_without_python(tmp_path, machine, threads):
    made = deploy.standalone(layer, {"w": W}, X, out=tmp_path, weights=["p"], machine=machine, threads=threads)
    np.testing.assert_allclose(run(made, [X], (3, 5)), want(X), rtol=1e-5, atol=1e-6)
    assert len((tmp_path / "example.c").read_text().splitlines()) <= 30
    shown = subprocess.run(["nm", "-D", "--defined-only", made.library], capture_output=True, text=True).stdout
    assert sorted(line.split()[-1] for line in shown.splitlines()) == ["layer", "layer_error"]
    needed = subprocess.run(["ldd", made.library], capture_output=True, text=True).stdout
    assert "python" not in needed and "tessera" not in needed


@needs_compiler
def test_arguments_of_other_types(tmp_path):
    for named in ({"out": 3}, {"name": 3}, {"machine": [3]}, {"weights": 3}, {"target": None}):
        with pytest.raises(ArgumentError, match="is no"):
            deploy.standalone(layer, {"w": W}, X, **{"out": tmp_path, "link": False, **named})


@needs_compiler
def test_the_makefile_links_both(tmp_path):
    deploy.standalone(layer, {"w": W}, X, out=tmp_path, weights=["p"], link=False)
    assert not (tmp_path / "liblayer.so").exists()
    subprocess.run(["make", "-s"], cwd=tmp_path, check=True)
    assert (tmp_path / "liblayer.so").exists() and (tmp_path / "example").exists()


@needs_aarch64
def test_on_an_emulated_aarch64(tmp_path):
    cc, qemu = AARCH64
    made = deploy.standalone(layer, {"w": W}, X, out=tmp_path, weights=["p"], machine="aarch64")
    found = run(made, [X], (3, 5), command=(qemu, "-L", "/usr/aarch64-linux-gnu", "./example"), cc=(cc,))
    np.testing.assert_allclose(found, want(X), rtol=1e-5, atol=1e-6)


def test_machine_code_for_aarch64_needs_no_compiler(tmp_path):
    deploy.standalone(layer, {"w": W}, X, out=tmp_path, weights=["p"], machine="aarch64", link=False)
    code = (tmp_path / "kernels.o").read_bytes()
    assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == 183  # EM_AARCH64


def test_the_same_files_each_time(tmp_path):
    for name in "ab":
        deploy.standalone(layer, {"w": W}, X, out=tmp_path / name, weights=["p"], machine="x86-64", link=False)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files) and len(files) > 7


@needs_compiler
def test_symbolic_sizes(tmp_path):
    made = deploy.standalone(
        ts.require("B % 2 == 0")(lambda x: x) and ts.jit(lambda p, x: ts.softmax(ts.relu(x @ p["w"]) + 0.5, axis=-1)),
        {"w": W}, X, out=tmp_path, weights=["p"], dynamic={"x": {0: "B"}}, name="any_batch",
    )  # fmt: skip
    assert "int any_batch(int64_t B, const float *x, float *out);" in (tmp_path / "any_batch.h").read_text()
    for n in (1, 3, 70):
        x = RNG.standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_allclose(run(made, [x], (n, 5), sizes=(n,)), want(x), rtol=1e-5, atol=1e-6)
    done = subprocess.run(["./example", "in", "out", "0"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "wrong sizes" in done.stderr
    for arguments, said in ((("in", "out", "-5"), "not enough memory"), (("in", "/dev/full", "1"), "not written"),
                            (("/dev/null", "out", "1"), "too short")):  # fmt: skip
        done = subprocess.run(["./example", *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr and "success" not in done.stdout


@needs_compiler
def test_loops_and_branches(tmp_path):
    @ts.jit
    def steps(x):
        y = ts.fori_loop(0, 5, lambda i, y: y * 1.5 - 0.25, x)
        y = ts.while_loop(lambda y: ts.max(y) > 1.0, lambda y: y * 0.5, y)
        return ts.cond(ts.sum(y) > 0, lambda y: y + 10.0, lambda y: -y, y)

    for x in (X, -np.abs(X)):
        made = deploy.standalone(steps, x, out=tmp_path)
        np.testing.assert_allclose(run(made, [x], (3, 4)), steps(x).numpy(), rtol=1e-6)


@needs_compiler
def test_results_several_inputs_and_types(tmp_path):
    a, b = RNG.integers(-9, 9, (7,)).astype(np.int32), RNG.standard_normal((7,))
    made = deploy.standalone(ts.jit(lambda a, b: (a + 1, b * 2.0)), a, b, out=tmp_path, name="two")
    found = run(made, [a, b], (-1,), np.uint8).tobytes()
    assert np.array_equal(np.frombuffer(found[:28], np.int32), a + 1)
    assert np.array_equal(np.frombuffer(found[28:], np.float64), b * 2.0)


@needs_compiler
def test_a_kernel_that_writes_in_place_and_takes_a_number(tmp_path):
    @ts.kernel
    def scale(x, factor: ts.f32, *, BLOCK: int = 4):
        i = ts.tile.program_id(0) * BLOCK
        x[i : i + BLOCK] = x[i : i + BLOCK] * factor

    x = np.arange(8, dtype=np.float32)
    made = deploy.standalone(scale[(2,)], x, np.float32(2), out=tmp_path)
    assert "int scale(float *x, float factor);" in (tmp_path / "scale.h").read_text()
    np.testing.assert_array_equal(run(made, [x, np.float32(2.5)], (8,)), x * 2.5)


@needs_compiler
def test_a_failed_assertion_is_a_result(tmp_path):
    @ts.kernel
    def positive(x, y):
        i = ts.tile.program_id(0)
        assert x[i] > 0, "not positive"
        y[i] = x[i]

    x = np.ones(3, np.float32)
    made = deploy.standalone(positive[(3,)], x, np.zeros(3, np.float32), out=tmp_path)
    np.testing.assert_array_equal(run(made, [x, x * 0], (3,)), x)
    (tmp_path / "in").write_bytes(np.float32([1, -1, 1, 0, 0, 0]).tobytes())
    done = subprocess.run(["./example", "in"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "test_standalone.py" in done.stderr and "not positive" in done.stderr
    library = ctypes.CDLL(str(made.library))  # a failure does not outlive its call
    for first, fails in ((-1, True), (1, False)):
        x = np.float32([first, 1, 1])
        assert (
            bool(library.positive(x.ctypes.data_as(ctypes.c_void_p), (x * 0).ctypes.data_as(ctypes.c_void_p))) is fails
        )


@needs_compiler
def test_an_optimised_model(tmp_path):
    model = ts.nn.Sequential(ts.nn.Linear(64, 32), ts.nn.ReLU(), ts.nn.Linear(32, 3))
    x = RNG.standard_normal((2, 64)).astype(np.float32)
    small = ts.optimize(model, target="edge", optimizations=["weight_int4", "constant_folding"], example=(x,))
    made = deploy.standalone(small, out=tmp_path, name="classifier")
    np.testing.assert_allclose(run(made, [x], (2, 3)), small(x).numpy(), rtol=1e-5, atol=1e-5)
    assert (tmp_path / "weights.bin").stat().st_size < 2500


CPP = """
#include "layer.hpp"
#include <cstdio>
using namespace pyflame;
int main() {
  auto a = Tensor::zeros({100, 100});
  if (a.ndim() != 2 || a.numel() != 10000 || a.data<float>()[5] != 0.0f) return 1;
  const float values[12] = {%s};
  Tensor y = programs::layer(Tensor::from({3, 4}, values));
  y.eval();
  float *data = y.data<float>();
  for (int i = 0; i < 15; i++) std::printf("%%.9g\\n", data[i]);
  try { programs::layer(Tensor::ones({2, 4})); return 2; } catch (const std::invalid_argument &) {}
  try { y.data<double>(); return 3; } catch (const std::invalid_argument &) {}
  return 0;
}
"""


@needs_cpp
@needs_compiler
def test_the_cpp_header(tmp_path):
    made = deploy.standalone(layer, {"w": W}, X, out=tmp_path, weights=["p"])
    (tmp_path / "main.cpp").write_text(CPP % ", ".join(f"{v!r}f" for v in map(float, X.ravel())))
    flags = ["-std=c++14", "-Wall", "-Wextra", "-Werror"]
    link = ["c++", *flags, "main.cpp", "-o", "main", "-L.", "-llayer", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(link, cwd=made.folder, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, capture_output=True, text=True, check=True)
    np.testing.assert_allclose(np.float32(done.stdout.split()).reshape(3, 5), want(X), rtol=1e-5, atol=1e-6)


@needs_compiler
def test_a_model_of_pyflame_runs_without_python(tmp_path):
    model = pf.nn.Sequential([pf.nn.Linear(4, 6), pf.nn.ReLU(), pf.nn.Linear(6, 5)])
    classify = ts.jit(lambda model, x: model(x))
    made = deploy.standalone(classify, model, X, out=tmp_path, weights=["model"], name="classify")
    np.testing.assert_allclose(run(made, [X], (3, 5)), model(pf.tensor(X)).numpy(), rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["exp", "int", "main", "2x", "free", "tessera_poll"])
def test_names_of_c(tmp_path, name):
    """A function or parameter whose name means something in C gets another one."""
    made = deploy.standalone(ts.jit(lambda free, slots: free * slots), X, X, out=tmp_path, name=name)
    assert made.name != name
    np.testing.assert_array_equal(run(made, [X, X], X.shape), X * X)


@needs_compiler
@pytest.mark.parametrize("shape", [(0,), (), (1,), (0, 3), (257,)])
def test_odd_sizes(tmp_path, shape):
    x = np.asarray(RNG.standard_normal(shape), np.float32)
    made = deploy.standalone(ts.jit(lambda x: x * 2.0), x, out=tmp_path, name="double_it")
    np.testing.assert_array_equal(run(made, [x], shape), x * 2)


@needs_compiler
@pytest.mark.parametrize("dtype", [ts.f16, ts.bf16, ts.f64, ts.int8, ts.int64, ts.uint8, ts.bool, ts.fp8_e4m3])
def test_every_type(tmp_path, dtype):
    x = ts.Tensor(RNG.integers(0, 2, (5,))).to(dtype).numpy()
    made = deploy.standalone(ts.jit(lambda x: ts.where(x == x, x, x)), x, out=tmp_path, name="same")
    np.testing.assert_array_equal(run(made, [x], (5,), x.dtype), x)


def test_what_needs_python_is_refused(tmp_path):
    cases = (
        (ts.jit(lambda x: x + ts.randn(3, 4)), "draws random numbers"),
        (ts.jit(lambda x: ts.linalg.svd(x)[1]), "computed by NumPy"),
    )
    for f, says in cases:
        with pytest.raises(UnsupportedOpError, match=says):
            deploy.standalone(f, X, out=tmp_path / "a")
    with pytest.raises(UnknownNameError, match="no machine"):
        deploy.standalone(layer, {"w": W}, X, out=tmp_path / "a", machine="pdp11")
    with pytest.raises(UnknownNameError, match="not a code generator"):
        deploy.standalone(layer, {"w": W}, X, out=tmp_path / "a", target="toaster")
    assert not (tmp_path / "a").exists()


def test_failures_of_the_tools(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        deploy.standalone(layer, {"w": W}, X, out=tmp_path / "file", weights=["p"])
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ArgumentError, match="did not link"):
        deploy.standalone(layer, {"w": W}, X, out=tmp_path / "b", weights=["p"])


def test_the_folder_of_the_csl_sdk(tmp_path):
    from tessera.tools.cli.main import main as command

    made = deploy.standalone(ts.jit(lambda w, x: x + w), X, X, out=tmp_path / "a", weights=["w"], target="csl:2x2")
    files = {p.name for p in made.folder.iterdir()}
    assert files >= {"layout.csl", "pe_program.csl", "run.py", "commands_wse2.sh", "README", "weights"}
    np.testing.assert_array_equal(np.load(made.folder / "weights" / "w.npy"), X)
    assert "--input weights/w.npy x.npy" in (made.folder / "README").read_text() and made.library is None
    assert command(["csl", "check", str(made.folder)]) == 0


PROGRAM = """
import numpy as np
import tessera as ts

@ts.example(lambda rng: (np.ones((4, 3), np.float32), rng.standard_normal((2, 4)).astype(np.float32)), weights=("w",))
@ts.jit
def f(w, x):
    return x @ w
"""


@needs_compiler
def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prog.py").write_text(PROGRAM)
    assert main(["build", "prog.py", "--standalone", "-o", "out", "--machine", "x86-64"]) == 0
    assert "libf.so" in capsys.readouterr().out and (tmp_path / "out" / "f.h").exists()
    assert main(["build", "prog.py", "-o", "out2", "--machine", "x86-64"]) == 2
    assert "--machine is for a standalone program" in capsys.readouterr().err
