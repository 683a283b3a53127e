"""Each wrong program in `programs/` is reported with exactly the text beside it."""

import importlib.util
from pathlib import Path

import pytest

import tessera as ts

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


def load(file):
    spec = importlib.util.spec_from_file_location(f"program_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda f: f.stem)
def test_report(file):
    report = ts.check(load(file).program)
    assert not report.ok
    assert str(report).replace(str(file.parent) + "/", "") + "\n" == file.with_suffix(".txt").read_text()


def test_nothing_runs(monkeypatch):
    monkeypatch.setattr("tessera.ir.rules.Op.execute", lambda *args: pytest.fail("an op was executed"))
    for file in PROGRAMS:
        ts.check(load(file).program)
