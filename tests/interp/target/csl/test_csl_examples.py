"""Programs of the vendor's public example repository pass with their own scripts; the repository is not copied here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.interp.target.csl.host import host_tools_folder

VARIABLE = "TESSERA_CSL_EXAMPLES"
CHECKOUT = os.environ.get(VARIABLE, "")
PROGRAMS = (
    "tutorials/gemv-03-memcpy",
    "tutorials/gemv-08-routes-3",
    "tutorials/gemv-09-streaming",
    "tutorials/pipeline-02-fifo",
    "tutorials/topic-05-sentinels",
    "tutorials/topic-06-switches",
    "tutorials/topic-11-collectives",
    "benchmarks/gemm-collectives_2d",
    "benchmarks/cholesky",
    "benchmarks/single-tile-matvec",
)

pytestmark = pytest.mark.skipif(
    not CHECKOUT, reason=f"{VARIABLE} does not name a checkout of the vendor's public CSL examples"
)


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_published_program_passes_its_own_check(program, arch, tmp_path):
    source = Path(CHECKOUT) / program
    script = f"commands_{arch}.sh"
    if not (source / script).is_file():
        pytest.skip(f"{program} has no {script}")
    shutil.copytree(source, tmp_path / "program")
    env = {
        **os.environ,
        "PATH": f"{host_tools_folder()}{os.pathsep}{os.environ['PATH']}",
        "TESSERA_PYTHON": sys.executable,
    }
    done = subprocess.run(
        ["bash", script], cwd=tmp_path / "program", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "SUCCESS" in done.stdout
