"""Groups that fill no whole number of warps: advice of the lint, the report and the build, and none for the others."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.tools.cli.main import main

PROGRAM = """import numpy as np
import tessera as ts
from tessera import tile


@ts.example(lambda rng: (np.ones(128, np.float32),), grid=(128 // {group},), group={group})
@ts.kernel
def twice(x: ts.Tensor["N"]):
    i = tile.program_id(0) * tile.group_size() + tile.local_id()
    x[i] = x[i] * 2.0
"""


@ts.kernel
def twice(x: ts.Tensor["N"]):
    i = tile.program_id(0) * tile.group_size() + tile.local_id()
    x[i] = x[i] * 2.0


def advice(group):
    report = ts.debug.check(twice[(192 // group,), group], np.ones(192, np.float32), lint=True)
    return [f for f in report if f.kind == "partial warp"]


@pytest.mark.parametrize(("group", "idle", "of"), [(4, 28, "its warp"), (48, 16, "its last warp"), (2, 30, "its warp")])
def test_a_group_that_fills_no_warp(group, idle, of):
    (finding,) = advice(group)
    assert finding.is_advice and f"{idle} of the 32 threads of {of} are idle" in finding.message
    assert finding.location.line == twice.kernel_function.__code__.co_firstlineno + 1
    assert "a multiple of 32 tiles" in finding.suggestion


@pytest.mark.parametrize("group", [1, 32, 64, 96])
def test_whole_warps_and_single_tiles_get_no_advice(group):
    assert not advice(group)


def test_the_report_advises_on_the_group_and_not_on_registers():
    with ts.debug.kernel_trace() as trace:
        twice[(32,), 4](np.ones(128, np.float32))
    suggestions = trace.reports[0].suggestions()
    assert any("a group of 4 tiles is a thread block of 4 threads" in s for s in suggestions)
    assert not any("registers" in s for s in suggestions)


@pytest.mark.parametrize("group", [4, 32])
@pytest.mark.parametrize("target", ["ptx", "llvm"])
def test_build_for_a_gpu_says_so(group, target, tmp_path, capsys):
    (tmp_path / "model.py").write_text(PROGRAM.format(group=group))
    assert main(["build", str(tmp_path / "model.py"), "--target", target, "-o", str(tmp_path / "out")]) == 0
    said = "advice: groups of twice have 4 tiles, one thread each; 32 run in lockstep: launch a multiple of 32"
    assert (said in capsys.readouterr().out) == (group == 4 and target == "ptx")
