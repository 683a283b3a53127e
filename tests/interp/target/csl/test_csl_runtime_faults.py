"""Run-time faults of CSL programs with their location and message; wrong arguments of the compiler."""

import pytest
from csl_harness import build, cases, outcome, run

from tessera.core.errors import ArgumentError, FileError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.pe.processing_element import Pe
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault


@pytest.mark.parametrize(("name", "title"), cases("lang_faults.csl"))
def test_fault(name, title):
    error, _, message = outcome(name, title)
    assert isinstance(error, CslFault) and message in error.message and error.message.startswith("PE (0, 0)")


@pytest.mark.parametrize(("name", "title"), cases("lang_programs.csl"))
def test_a_program_of_several_files(name, title):
    error, _, message = outcome(name, title)
    assert isinstance(error, CslError | CslFault) and message in str(error)


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), AssertionError("x")])
def test_an_error_of_a_library_is_an_internal_error_at_the_line_of_its_call(error, tmp_path, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(Pe, "native", lambda pe, function: fails)
    text = """const random = @import_module("<random>"); var x: f32;
      export fn main() void { x = random.random_f32(0.0, 1.0); }"""
    with pytest.raises(CslFault, match=f"PE .*internal error of the simulator: {type(error).__name__}") as caught:
        run(tmp_path, text)
    assert caught.value.location.line == 2 and caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("options", "message"),
    [({"arch": "wse1"}, "unknown arch"), ({"sdk": "3"}, "unknown sdk"), ({"fp16_format": "cb16"}, "unknown fp16")],
)
def test_unknown_options_are_errors(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        build(tmp_path, "", **options)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        compile_program(tmp_path / "none.csl")
