"""The MPI engine: 4 processes that mpiexec starts compare it with the simulator; ranks that fail end all others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")
HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-m", "tessera.tools.cli", "launch", "-n", "4"]


def launch(*program, count=4, seconds=120):
    """Run a program as processes of MPI; none of this process's variables of a launcher go on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "HYDRA"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "OMP_NUM_THREADS": "1"}
    command = [*LAUNCH[:-1], str(count), *map(str, program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)


def test_mpi_equals_the_simulator():
    found = launch(HERE / "mpi_checks.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("checked") == 4


def test_training_over_mpi():
    program = HERE.parents[1] / "examples" / "dist" / "gpt.py"
    names = ("tp_dp", "pp", "zero3", "ep", "ring")
    found = launch(program, *names, "steps=2")
    assert found.returncode == 0, found.stderr
    lines = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert set(lines) == set(names) and all(float(line.split("<=")[1]) < 1e-5 for line in lines.values()), found.stdout


FAULT = """
import os, sys, time
import tessera as ts

@ts.spmd(mesh=ts.Mesh(4))
def step(x):
    for i in range(1000):
        if i == 3 and ts.get_rank() == 2:
            {fault}
        x = ts.all_reduce(x, "mean")
    return x

step(ts.ones((4,)))
"""


ORDERS = """
import functools
import tessera as ts

def reduce_both(x, late_first):
    late = x
    for _ in range(8):
        late = ts.tanh(late @ x)
    first, second = (late, x) if late_first else (x, late)
    return ts.all_reduce(first), ts.all_reduce(second), ts.tanh(late @ x) @ x

PROGRAMS = [ts.jit(functools.partial(reduce_both, late_first=k), target="llvm") for k in (False, True)]

@ts.spmd(mesh=ts.Mesh(2), out_specs="ranks")
def step(x):
    for number in (0, 1, ts.get_rank()):
        found = PROGRAMS[number](x)
    return found

step(ts.ones((4, 4)))
"""


def test_ranks_whose_orders_differ_are_refused_each_time(tmp_path):
    """Both orders have been run, and compared, by both ranks before."""
    program = tmp_path / "program.py"
    program.write_text(ORDERS)
    found = launch(program, count=2, seconds=60)
    assert found.returncode != 0
    assert "CollectiveError: the programs of rank" in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("fault", "text"),
    [("os.kill(os.getpid(), 9)", "signal 9"), ("raise ValueError('broken')", "rank 2 failed: all 4 ranks end")],
    ids=["killed", "error"],
)
def test_a_rank_that_fails_ends_all(fault, text, tmp_path):
    (tmp_path / "fault.py").write_text(FAULT.format(fault=fault))
    start = time.monotonic()
    found = launch(tmp_path / "fault.py", seconds=60)
    assert found.returncode != 0 and time.monotonic() - start < 30
    assert text in found.stderr and "tessera launch: " in found.stderr, found.stderr
