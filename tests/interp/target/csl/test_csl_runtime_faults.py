"""Run-time faults of CSL programs with their location and message; wrong arguments of the compiler."""

import pytest
from csl_harness import build, cases, outcome

from tessera.core.errors import ArgumentError, FileError
from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault


@pytest.mark.parametrize(("name", "title"), cases("lang_faults.csl"))
def test_fault(name, title):
    error, _, message = outcome(name, title)
    assert isinstance(error, CslFault) and message in error.message and error.message.startswith("PE (0, 0)")


@pytest.mark.parametrize(("name", "title"), cases("lang_programs.csl"))
def test_a_program_of_several_files(name, title):
    error, _, message = outcome(name, title)
    assert isinstance(error, CslError | CslFault) and message in str(error)


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
