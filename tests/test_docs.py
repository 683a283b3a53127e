"""What the docs show runs: every doctest of the package, and the README's program."""

import doctest
import importlib
import linecache
import pkgutil
import re
from pathlib import Path

import pytest

import tessera
from tessera.ir.rules import REGISTRY

ROOT = Path(__file__).parents[1]
MODULES = [m.name for m in pkgutil.walk_packages(tessera.__path__, "tessera.") if not m.name.endswith("__main__")]


@pytest.fixture(autouse=True)
def source_lines_stay(monkeypatch):
    """Doctest's debugger looks at each file of which a line was ever read, thousands, once for each docstring."""
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)


@pytest.mark.parametrize("name", ["tessera", *MODULES])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("op", [op for op in REGISTRY.values() if ">>>" in op.__doc__], ids=lambda op: op.name)
def test_examples_of_ops(op):
    """An op is no function, so that `testmod` does not find its docstring."""
    names = dict(vars(importlib.import_module(op.ref.__module__)))
    example = doctest.DocTestParser().get_doctest(op.__doc__, names, op.name, None, 0)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0


def test_the_readme_program(tmp_path, monkeypatch):
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "readme.py").write_text(program + "\nassert (y == 2 * x).all()\n")
    scope = {"__name__": "readme"}
    exec(compile(program + "\nassert (y == 2 * x).all()\n", str(tmp_path / "readme.py"), "exec"), scope)
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_the_readme_trains(capsys):
    _, program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    tessera.manual_seed(0)
    scope = {"__name__": "readme"}
    exec(compile(program, "readme.py", "exec"), scope)
    assert len(scope["losses"]) == 20 and scope["losses"][-1] < 0.2 * scope["losses"][0]


def test_every_public_name_is_documented():
    for name in tessera.__all__:
        value = getattr(tessera, name)
        assert getattr(value, "__doc__", None), f"ts.{name} says nothing of itself"
