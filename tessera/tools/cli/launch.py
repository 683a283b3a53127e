"""`tessera launch`: starts a Python program as ranks: by the MPI launcher beside this Python, or one for each GPU."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from tessera.core.device import count_gpus
from tessera.core.errors import DeviceUnavailable, FileError
from tessera.dist.mpi import REPORTS
from tessera.dist.rendezvous import FOLDER, RANK, SIZE

FATAL_SIGNALS = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
POLL_SECONDS = 0.05
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
    command = [sys.executable, options.program, *options.arguments]
    if options.engine == "nccl":
        status = run_on_gpus(command, options.n)
    else:
        status = run_with_mpi(command, options.n)
    if status:
        # MPICH's launcher reports the signal of a rank as the status.
        number = -status if status < 0 else status
        reason = f"signal {number}" if status < 0 or number in FATAL_SIGNALS else f"status {status}"
        text = f"tessera launch: a rank of {options.program} ended with {reason}; all ranks were stopped"
        print(text, file=sys.stderr)
    return status if status >= 0 else 128 - status


def run_with_mpi(command: list[str], count: int) -> int:
    """Run a program as ranks of MPI; the status of the launcher. Says how ranks failed that wrote a report of it.

    Raises:
        DeviceUnavailable: as `find_launcher`.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        environment = {**os.environ, REPORTS: folder}
        status = subprocess.run([find_launcher(), "-n", str(count), *command], env=environment, check=False).returncode
        for report in sorted(Path(folder).iterdir()):
            print(report.read_text(encoding="utf-8"), end="", file=sys.stderr)
    return status


def list_gpus(count: int) -> list[str]:
    """The names that make one GPU visible to a process, for each of `count` processes.

    Raises:
        DeviceUnavailable: there are fewer GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count_gpus())] if visible is None else [n for n in visible.split(",") if n]
    if len(names) < count:
        raise DeviceUnavailable(
            f"{count} ranks need {count} GPUs", expected="one GPU for each rank", received=f"{len(names)} GPUs",
            suggestion="fewer ranks, or --engine mpi, whose ranks compute on processors",
        )  # fmt: skip
    return names[:count]


def run_on_gpus(command: list[str], count: int) -> int:
    """Run a program as ranks that see one GPU each; the status of the first that fails, which ends the others.

    Raises:
        DeviceUnavailable: as `list_gpus`.
    """
    gpus = list_gpus(count)
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        started = [
            subprocess.Popen(
                command, env={**os.environ, RANK: str(i), SIZE: str(count), FOLDER: folder, "CUDA_VISIBLE_DEVICES": gpu}
            )
            for i, gpu in enumerate(gpus)
        ]
        try:
            return _wait_for_all(started)
        finally:
            for process in started:
                process.kill()
                process.wait()


def _wait_for_all(processes: list[subprocess.Popen[bytes]]) -> int:
    """The status of the first process that fails, or 0 when all have ended."""
    while True:
        found = [process.poll() for process in processes]
        failed = next((status for status in found if status), 0)
        if failed or None not in found:
            return failed
        time.sleep(POLL_SECONDS)
