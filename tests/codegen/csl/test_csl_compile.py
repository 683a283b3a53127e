"""The options and results of compiling a graph to a folder of CSL."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl import CodeGenOptions, CSLCodeGenerator, compile_to_csl


def graph(rows=8):
    x = np.ones((rows, rows), np.float32)
    return ts.jit(lambda x: ts.relu(x @ x)).trace(x).function


def test_files_are_written(tmp_path):
    result = compile_to_csl(graph(), CodeGenOptions(output_dir=str(tmp_path / "out"), fabric_width=2, fabric_height=1))
    assert result.success and not result.error_message
    assert {"layout.csl", "pe_program.csl", "run.py"} <= {f.name for f in (tmp_path / "out").iterdir()}
    assert "@set_rectangle(2, 1);" in result.sources["layout.csl"]


def test_as_few_elements_as_hold_the_program(tmp_path):
    result = compile_to_csl(graph(120), CodeGenOptions(output_dir=str(tmp_path / "out")))
    assert "@set_rectangle(2, 2);" not in result.sources["layout.csl"] and result.success


WRONG = [
    ({"target": "wse9"}, "no architecture wse9"),
    ({"fabric_width": 1, "fabric_height": 1}, "KB of the 40 KB"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_errors_are_told(tmp_path, change, message):
    options = CodeGenOptions(output_dir=str(tmp_path / "out"), **change)
    result = CSLCodeGenerator().generate(graph(120), options)
    assert not result.success and message in result.error_message and not (tmp_path / "out").exists()


def test_comments_can_be_left_out(tmp_path):
    result = compile_to_csl(graph(), CodeGenOptions(output_dir=str(tmp_path / "out"), emit_comments=False))
    assert "//" not in result.sources["pe_program.csl"]
