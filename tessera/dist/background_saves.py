"""Checkpoints that are saved while training goes on: a copy of the parts is taken at once, a thread writes it.

The threads of the ranks meet by files in the unfinished folder, never by collectives, which belong to the program.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import FileError, Location, user_location
from tessera.core.pytree import flatten
from tessera.dist.checkpoints import replace_checkpoint, write_manifest, write_parts
from tessera.dist.collectives import all_reduce, barrier
from tessera.dist.mesh import Mesh
from tessera.dist.ranks import require_rank
from tessera.dist.spmd import match_specs
from tessera.ir.tensor import Tensor, as_tensor

POLL_SECONDS = 0.02
WAIT_SECONDS = 600.0  # for the files of the other ranks
FAILED = "failed"


class PendingSave:
    """A checkpoint that is being saved; every rank calls `wait` before it relies on it."""

    def __init__(self, target: Path, leaves: list[tuple[str, Any, Any]], mesh: Mesh, rank: int) -> None:
        self._target, self._leaves, self._mesh, self._rank = target, leaves, mesh, rank
        self._partial = target.with_name(target.name + ".partial")
        self._error: FileError | None = None
        self._place: Location = user_location()
        self._done = False
        self._writer = threading.Thread(target=self._run, args=(self._write,), name=f"checkpoint of rank {rank}")
        self._writer.start()
        self._finisher: threading.Thread | None = None
        if rank == 0:
            self._finisher = threading.Thread(target=self._run, args=(self._finish,), name="checkpoint")
            self._finisher.start()

    def done(self) -> bool:
        """Whether this rank's work has ended."""
        return not self._writer.is_alive() and not (self._finisher and self._finisher.is_alive())

    def wait(self) -> None:
        """Wait until the checkpoint is complete on all ranks.

        Raises:
            FileError: a rank could not write its part; the checkpoint before it is still there.
        """
        if self._done:
            return
        self._writer.join()
        barrier()
        if self._finisher is not None:
            self._finisher.join()
        self._done = True
        _PENDING.pop((self._target, self._rank), None)
        failed = all_reduce(Tensor(np.array([self._error is not None], np.int32)), "max").item()
        if self._error is not None:
            raise self._error
        if failed:
            raise FileError(f"another rank could not save the checkpoint {self._target}", location=self._place)

    def _run(self, work: Any) -> None:
        try:
            work()
        except Exception as error:
            self._error = self._error or FileError(
                f"cannot write the checkpoint {self._target}: {error}", location=self._place
            )
            try:
                (self._partial / FAILED).touch()
            except OSError:
                pass  # the other ranks find that the folder is missing

    def _write(self) -> None:
        write_parts(self._partial, self._leaves, self._mesh, self._rank)

    def _finish(self) -> None:
        """Make the folder complete when all ranks have written."""
        end = time.monotonic() + WAIT_SECONDS
        wanted = [self._partial / f"rank-{r:05d}.sha256" for r in range(self._mesh.size)]
        while not all(path.exists() for path in wanted):
            if (self._partial / FAILED).exists() or not self._partial.is_dir() or time.monotonic() > end:
                raise OSError("a rank did not write its part")
            time.sleep(POLL_SECONDS)
        write_manifest(self._partial, self._leaves, self._mesh)
        replace_checkpoint(self._target, self._partial)


_PENDING: dict[tuple[Path, int], PendingSave] = {}


def save_checkpoint_async(folder: str | os.PathLike[str], tree: Any, specs: Any = None) -> PendingSave:
    """`save_checkpoint` that writes while this rank goes on; `wait()` of the result says that it is complete.

    The elements are copied first: what training does to the tensors afterwards is not saved. A save to a folder waits
    for the one before it. A program that ends completes what it began.

    Raises:
        ArgumentError: the specs do not fit, or the caller is not a rank.
        FileError: the folder cannot be made; a file that cannot be written is an error of `wait`.
    """
    context, target = require_rank("save_checkpoint_async"), Path(folder).absolute()
    if (earlier := _PENDING.get((target, context.rank))) is not None:
        earlier.wait()
    copied = flatten(tree, empty=True)
    copies = [Tensor(np.array(as_tensor(x).numpy(), order="C")) for _, x in copied[0]]
    leaves = match_specs(copied[1].build(iter(copies)), specs, "")
    partial = target.with_name(target.name + ".partial")
    problem = ""
    if context.rank == 0:
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    if all_reduce(Tensor(np.array([bool(problem)], np.int32)), "max").item():
        raise FileError(f"cannot make the folder of the checkpoint {target}: {problem}", location=user_location())
    saving = _PENDING[target, context.rank] = PendingSave(target, leaves, context.mesh, context.rank)
    return saving
