"""Full disks and read-only folders: the first, second, ... call of each operation that writes fails.

What is expected: an error of Tessera or, for a cache, none and the right result; the file that was there before, or the
new one, whole; and no temporary file that stays.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or COMPILER is None, reason="needs LD_PRELOAD and a C compiler"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(made), str(TESTS / "faults.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.mark.parametrize("fault", ["ENOSPC", "EACCES"])
def test_every_write_may_fail(library, fault, tmp_path):
    pytest.importorskip("safetensors")
    settings = {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(tmp_path), "FAULT": fault,
                "TESSERA_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(TESTS.parent)}  # fmt: skip
    command = [sys.executable, str(TESTS / "fault_programs.py"), str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 16 and all(row["calls"] >= 2 for row in found.values()), found
    assert not {name: row["problems"] for name, row in found.items() if row["problems"]}
