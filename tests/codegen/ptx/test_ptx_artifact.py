"""Artifacts of the target ptx: command line, reproducible bytes, errors."""

import re
import types

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, numbers
from tilekernels import Kernel

import tessera as ts
from conformance.case import all_cases
from conformance.run import Engine, run_case
from tessera.codegen.contract import list_backends
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime import driver_api
from tessera.codegen.ptx.runtime.driver_api import GPU, _assembly_error
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.codegen.ptx.text.builder import SourceFiles
from tessera.core.device import count_gpus
from tessera.core.errors import ArgumentError, DeviceUnavailable, ExecutionError, ResourceError, UnsupportedOpError
from tessera.core.types import bool_, f32
from tessera.interp.target.ptx.text.parser import PtxModuleParser
from tessera.ops.dialects import tile
from tessera.ops.tensor import elementwise as e
from tessera.runtime import driver
from tessera.tools.cli.main import main


@ts.kernel
def double(x, out):
    out[:] = x[:] * 2.0


def module(size=40, dtype=f32):
    x = numbers(dtype, size)
    k = Kernel(x, x)
    k.store(k.params[1], k(e.exp, k.load(k.params[0])))
    return k.module()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reproducible_bytes(arch):
    first, second = (emit_checked(module(), arch) for _ in range(2))
    assert first == second and f".target {arch}" in first.text(TEXT_FILE)
    assert ".loc 1 " in first.text(TEXT_FILE) and first.manifest["options"] == {"arch": arch}


def test_debug_option():
    assert ".loc" not in BACKEND.emit(module(), {"debug": False}).text(TEXT_FILE)


def test_built_and_run_from_the_command_line(tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["build", "examples/softmax.py", "--target", "ptx", "--arch", "sm_90a", "-o", str(folder)]) == 0
    assert ".target sm_90a" in (folder / TEXT_FILE).read_text()
    if not count_gpus():
        assert main(["run", str(folder)]) == 0
        assert "PTX emulator" in " ".join(capsys.readouterr().out.split())


def test_unknown_options_and_architectures():
    with pytest.raises(ArgumentError, match="no architecture sm_20"):
        BACKEND.emit(module(), {"arch": "sm_20"})
    with pytest.raises(ArgumentError, match="no option speed"):
        BACKEND.emit(module(), {"speed": 11})
    assert "ptx" in list_backends()


def test_too_much_shared_memory_is_refused():
    k = Kernel(numbers(f32, 1, 8))
    room = k(tile.alloc, shape=(300, 1024), dtype=f32)
    k.store(k.params[0], k.load(room, 0, 0, shape=(1, 8)))
    with pytest.raises(ResourceError, match="shared memory"):
        emit_checked(k.module())


def test_unsupported_op():
    k = Kernel(numbers(f32, 8))
    k(tile.pause, k.const(True, bool_), names=(), known=(), function="f", depth=0)
    with pytest.raises(UnsupportedOpError, match=r"ptx.*debugger"):
        emit_checked(k.module())


def test_assertions_name_the_first_failure():
    def built(group):
        k = Kernel(x, group=group)
        rows = k(tile.program_id, axis=0) if group == 1 else k(tile.local_id)
        value = k.load(k.params[0], rows, 0, shape=(1, 50))
        k(tile.assert_, k(e.less, value, k.const(3.0, f32, (1, 50))), value, message="too large")
        return BACKEND.interpreter(emit_checked(k.module((6,) if group == 1 else (1,))))

    x = np.zeros((6, 50), np.float32)
    built(1)([x])
    x[[4, 2, 2], [7, 33, 41]] = 5
    with pytest.raises(ExecutionError, match=r"(?s)too large.*program \(2,\), element \(0, 33\)"):
        built(1)([x])
    with pytest.raises(ExecutionError, match=r"tile 2, element \(0, 33\)"):
        built(6)([x])


def test_assembly_error_shows_the_line():
    error = _assembly_error("first;\nsecond;\n", "ptxas application ptx input, line 2; error : no")
    assert "line 2: second;" in str(error)


class Driver(types.SimpleNamespace):
    """What stands for pycuda's driver: one GPU whose capability is given."""

    def __init__(self, capability=(9, 0)):
        errors = {n: type(n, (Exception,), {}) for n in ("MemoryError", "LaunchError")}
        device = types.SimpleNamespace(compute_capability=lambda: capability, name=lambda: "a GPU")
        super().__init__(init=lambda: None, Device=lambda i: device, Error=Exception, **errors)


def test_old_gpu(monkeypatch):
    monkeypatch.setattr(driver_api, "_import_pycuda", lambda: Driver((7, 5)))
    with pytest.raises(DeviceUnavailable, match=r"7\.5"):
        GPU()


def bare(driver):
    """A GPU that nothing was asked of yet."""
    made = GPU.__new__(GPU)
    made.driver, made.device, made.capability = driver, driver.Device(0), (9, 0)
    made.here = types.SimpleNamespace(active=True)
    return made


@pytest.mark.parametrize(
    ("raised", "typed"), [("MemoryError", ResourceError), ("LaunchError", ExecutionError), ("Error", ExecutionError)]
)
def test_driver_errors_of_the_context(raised, typed):
    driver = Driver()
    with pytest.raises(typed), bare(driver).active():
        raise getattr(driver, raised)("no")


def test_architecture_mismatch():
    with pytest.raises(DeviceUnavailable, match="sm_90a"):
        made = bare(Driver())
        made.capability = (8, 0)
        made.check_architecture("sm_90a")


def test_scalars_and_empty_programs():
    x, s = numbers(f32, 40), np.asarray(2.5, np.float32)
    k = Kernel(x, s, x)
    k.store(k.params[2], k(e.mul, k.load(k.params[0]), k.broadcast(k.params[1], 40)))
    out = np.zeros_like(x)
    BACKEND.interpreter(emit_checked(k.module()))([x, s, out])
    np.testing.assert_array_equal(out, x * np.float32(2.5))
    BACKEND.interpreter(emit_checked(k.module((0,))))([x, s, out])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_sample_of_the_suite(arch):
    engine = Engine("ptx text", "target", "ptx")
    chosen = [c for i, c in enumerate(all_cases()) if i % 13 == (arch == "sm_90a") and c.rejects is None]
    outcomes = [o for case in chosen for o in run_case(case, [engine])]
    assert len(outcomes) > 20 and not [(o.case, o.detail) for o in outcomes if o.status == "fail"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_one_name_assemble(arch):
    """Two versions of a kernel: the second one's name differs from those of the first one's parameters."""

    def twice(x):
        return ts.launch(double, (1,), x[:4], ts.like(x[:4])), ts.launch(double, (1,), x, ts.like(x))

    graph = ts.jit(twice).trace(np.zeros(8, "f4")).function
    artifact = emit_checked(driver.lower(graph, "ptx")["tile"], arch)
    names = [name for name in artifact.manifest["plan"]["entries"] if name.startswith("double")]
    assert names == ["double", "double_1"]
    assert not re.search(r"\.param \.u64 double_1\b", artifact.text(TEXT_FILE))


def test_a_file_name_with_quotes_is_read_back():
    """The directive .file has the name as LLVM writes strings: quotes and backslashes are escaped."""
    files = SourceFiles()
    names = ['a "b".py', "c\\d.py", "plain.py"]
    assert [files.number(name) for name in names] == [1, 2, 3]
    text = "\n".join([".version 8.0", ".target sm_80", ".address_size 64", *files.text()])
    assert PtxModuleParser(text, "k.ptx").files == dict(enumerate(names, 1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_tiles_are_those_of_the_architecture(arch, tmp_path):
    """120 blocks of 128 x 160 where copies feed them; else blocks have powers of two."""
    a, b = np.zeros((768, 8192), np.float16), np.zeros((8192, 3072), np.float16)
    folder = ts.build(ts.jit(lambda a, b: a @ b), a, b, out=tmp_path / "made", target="ptx", arch=arch)
    assert ("grid = [6 : i64, 20 : i64]" in (folder / "tile.mlir").read_text()) == (arch == "sm_90a")
