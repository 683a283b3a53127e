"""`tessera launch`: starts a Python program as the ranks of an MPI program, by the launcher beside this Python."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tessera.core.errors import DeviceUnavailable, FileError

FATAL_SIGNALS = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
LAUNCHERS = ("mpiexec", "mpiexec.hydra", "mpirun")


def find_launcher() -> str:
    """The launcher beside this Python, which belongs to the MPI library installed with it; else that of the path.

    Raises:
        DeviceUnavailable: there is none, or mpi4py is missing.
    """
    beside = [str(Path(sys.executable).parent / name) for name in LAUNCHERS]
    found = next((path for name in (*beside, *LAUNCHERS) if (path := shutil.which(name))), None)
    if found is None or find_spec("mpi4py") is None:
        raise DeviceUnavailable(
            "no MPI launcher was found" if found is None else "the package mpi4py is missing",
            expected="mpi4py, and mpiexec beside this Python or on the path",
            suggestion="pip install 'tessera[mpi]'",
        )
    return found


def main(options: argparse.Namespace) -> int:
    """Start the program and wait for all its ranks; the exit status is that of a rank that failed.

    Raises:
        FileError: there is no such program.
        DeviceUnavailable: as `find_launcher`.
    """
    if not os.path.isfile(options.program):
        raise FileError(
            f"there is no program {options.program}", suggestion="tessera launch -n 4 program.py [arguments]"
        )
    command = [find_launcher(), "-n", str(options.n), sys.executable, options.program, *options.arguments]
    ended = subprocess.run(command, check=False)
    status = ended.returncode
    if status:
        # MPICH's launcher reports the signal of a rank as the status.
        number = -status if status < 0 else status
        reason = f"signal {number}" if status < 0 or number in FATAL_SIGNALS else f"status {status}"
        text = f"tessera launch: a rank of {options.program} ended with {reason}; all ranks were stopped"
        print(text, file=sys.stderr)
    return status if status >= 0 else 128 - status
