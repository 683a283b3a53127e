"""Machine code in artifacts: it is used for the processor and the text that it was built for, and else compiled."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.artifact import read_artifact
from tessera.codegen.llvm.runtime import jit, object_files, program
from tessera.codegen.llvm.runtime.jit import divide_text
from tessera.codegen.llvm.runtime.program import OBJECT_FILE

X = np.arange(6, dtype=np.float32)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """An artifact of x * 2, and an empty cache."""
    folder = ts.build(ts.jit(lambda x: x * 2.0), X, out=tmp_path / "a")
    ts.load(folder)(X)  # compiles what the runtime itself needs
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """The texts of the units that are compiled."""
    texts, compile_unit = [], jit.compile_unit
    monkeypatch.setattr(jit, "compile_unit", lambda unit: texts.append(unit.text) or compile_unit(unit))
    return texts


def test_an_artifact_is_not_compiled_again(built, compiled):
    np.testing.assert_array_equal(ts.load(built)(X).numpy(), 2 * X)
    assert compiled == []


def for_another_processor(folder, monkeypatch):
    key = jit.compute_cache_key
    for module in (jit, program):
        monkeypatch.setattr(module, "compute_cache_key", lambda text: key(f"another processor {text}"))


def of_another_text(folder, monkeypatch):
    other = read_artifact(ts.build(ts.jit(lambda x: x * 3.0), X, out=folder.parent / "other"))
    made = read_artifact(folder)
    dataclasses.replace(made, files={**made.files, OBJECT_FILE: other.files[OBJECT_FILE]}).save(folder)


def writable_by_others(folder, monkeypatch):
    (folder / OBJECT_FILE).chmod(0o666)


def missing(folder, monkeypatch):
    made = read_artifact(folder)
    dataclasses.replace(made, files={k: v for k, v in made.files.items() if k != OBJECT_FILE}).save(folder)


@pytest.mark.parametrize("change", [for_another_processor, of_another_text, writable_by_others, missing])
def test_the_text_is_compiled_where_the_machine_code_cannot_be_trusted(built, compiled, monkeypatch, change):
    change(built, monkeypatch)
    compiled.clear()
    monkeypatch.setenv("TESSERA_CACHE", str(built.parent / "empty"))
    np.testing.assert_array_equal(ts.load(built)(X).numpy(), 2 * X)
    assert compiled == [unit.text for unit in divide_text(read_artifact(built).text("kernels.ll"))]


CALLER = "declare double @no_such_function(double)\ndefine double @f(double %x) {\n  %y = call double " + (
    "@no_such_function(double %x)\n  ret double %y\n}\n"
)
SAFE = "define double @f(double %x) {\n  ret double %x\n}\n"


def test_object_code_with_unresolved_symbols_never_runs(tmp_path, monkeypatch, compiled):
    """Such code ends the process. Earlier versions stored it in the cache, and code generation itself adds calls."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    wrong = jit._create_target_machine().emit_object(jit._parse_text(CALLER))
    assert object_files.list_unresolved_symbols(wrong) == ["no_such_function"]
    assert jit.MachineCode(SAFE, wrong).address("f") and compiled == [SAFE]
    key = jit.compute_cache_key(SAFE)
    (tmp_path / f"{key}.o").write_bytes(object_files.seal_object(key, b"\0" + wrong))
    assert object_files.list_unresolved_symbols(jit.get_object_code(SAFE)) == [] and compiled == [SAFE, SAFE]


LOAD = """
import sys
import numpy as np
import tessera as ts
loaded = ts.load(sys.argv[1])
assert (loaded(np.ones(6, np.float32)).numpy() == 2).all()
print(*sys.modules)
"""


def test_a_loader_imports_no_compiler(built):
    done = subprocess.run([sys.executable, "-c", LOAD, str(built)], capture_output=True, text=True, check=True)
    compiler = ("tessera.lower.pipeline", "tessera.runtime.driver", "tessera.codegen.llvm.table", "importlib.metadata")
    assert [m for m in done.stdout.split() if m.startswith(compiler)] == []
