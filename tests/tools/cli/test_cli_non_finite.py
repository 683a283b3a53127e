"""`tessera run` of programs that make NaN and infinities: counted, compared by place and kind, and where they arise."""

import pytest

from tessera.tools.cli.main import main

HEADER = """import numpy as np
import tessera as ts
from tessera import tile

"""
KERNEL = """
@ts.example(lambda rng: {"x": np.float32([1, 0, 4, -1]), "out": np.zeros(4, np.float32)}, grid=4)
@ts.kernel
def program(x, out):
    i = tile.program_id(0)
    out[i] = 1.0 / tile.sqrt(x[i])
"""
FUNCTION = """
@ts.example(lambda rng: {{"x": np.float32({x})}})
@ts.jit
def program(x):
    return {result}
"""


def said(tmp_path, capsys, body, *options):
    file = tmp_path / "program.py"
    file.write_text(HEADER + body)
    status = main(["run", str(file), *options])
    return status, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("where", [[], ["--target", "llvm"]])
def test_results_of_nan_alone_are_not_checked(tmp_path, capsys, where):
    body = FUNCTION.format(x=[1, 1, 0.5], result="ts.log(x - 2.0) * 3.0")
    status, out = said(tmp_path, capsys, body, *where)
    assert status == 1 and "within the bound" not in out
    assert "not checked: none of 3 elements is a number with a finite bound" in out
    assert "output 0: 3 NaN of 3 elements" in out
    assert "ts.log makes nan of finite operands: element (0,) of its result" in out
    assert "program.py:9:12" in out.replace(" ", "") and "return ts.log(x - 2.0) * 3.0" in out


def test_a_kernel_s_are_named_with_their_program(tmp_path, capsys):
    status, out = said(tmp_path, capsys, KERNEL)
    assert status == 0 and "1 of 4 elements have no finite bound" in out  # sqrt may err by 3 ulps, at 0 too
    assert "output 0: 1 NaN and 1 infinity of 4 elements, where the reference has or allows them" in out
    assert "makes nan of finite operands: program (3,)" in out and "x[i])" in out
    assert "program.py:10:20" in out.replace(" ", "")


def test_those_of_the_inputs_are_told(tmp_path, capsys):
    status, out = said(tmp_path, capsys, FUNCTION.format(x="[1, 'nan', 'inf']", result="x * 2.0"))
    assert status == 0 and "the input x holds 1 NaN and 1 infinity of 3 elements" in out


def test_an_infinite_bound_is_not_within(tmp_path, capsys):
    status, out = said(tmp_path, capsys, FUNCTION.format(x=[3e-8, 2.0], result="1.0 / (x + 1.0 - 1.0)"))
    assert status == 0 and "within the bound" not in out and "1 of 2 elements have no finite bound" in out
