"""Worker processes of a fuzzing campaign: a program that ends its process is a failure, and others follow."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tessera.tools.fuzz.campaign import GENERATORS, CampaignRequest, Summary, report, run_campaign
from tessera.tools.fuzz.choices import Choices, shrink
from tessera.tools.fuzz.oracle import Failure, examine, list_fuzz_engines

# The parent runs no program, so that its threads do not disturb a fork.
CONTEXT = multiprocessing.get_context("fork")
HANG_SECONDS = 120.0  # of the processor: a program that takes longer is a failure
DEADLOCK_SECONDS = 1800.0  # by the clock: it waits for what never comes
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
CRASH_SECONDS = 60.0  # for the reduction of a program that ends its process


def run_workers(request: CampaignRequest, jobs: int) -> Summary:
    """Run a campaign in several processes, each with its own seeds. However it ends, the processes end with it."""
    total, end = Summary(), time.perf_counter() + request.seconds
    gc.collect()
    gc.freeze()  # the package's own objects: collections in the processes leave them out
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder, _exit_on_sigterm():
        try:
            for number in range(jobs):
                workers.append(Worker(request, number, Path(folder) / f"{number}.json"))
            while any(w.process is not None for w in workers):
                for worker in workers:
                    worker.poll(total, end)
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.stop()
            gc.unfreeze()
    return total


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the processes and the folder of the campaign are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _follow_parent() -> None:
    """In a worker: the parent decides what signals do, and the system ends it with the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


class Worker:
    """One process of a campaign, started again after a crash."""

    def __init__(self, request: CampaignRequest, number: int, record: Path) -> None:
        self.request, self.number, self.record = request, number, record
        self.process: Any = None
        self._start(0, request.seconds)

    def _start(self, first: int, seconds: float) -> None:
        self.record.unlink(missing_ok=True)  # of the process before: its program has run
        self.seen = (-1, 0.0)  # the program that was seen to run, and the seconds of its process before it
        self.receiver, sender = CONTEXT.Pipe(duplex=False)
        request = replace(self.request, seconds=seconds)
        self.process = CONTEXT.Process(target=_work, args=(request, self.number, first, self.record, sender))
        self.process.start()
        sender.close()

    def poll(self, total: Summary, end: float) -> None:
        """Take what the process gives; a process that ended without, or hangs, is a failure of its program."""
        if self.process is None:
            return
        if self.receiver.poll():
            try:
                kind, content = self.receiver.recv()
            except EOFError:
                self._report_crash(total, end)
                return
            if kind == "error":
                raise content
            total.merge(content)
            if kind == "end":
                self.process.join()
                self.process = None
        elif self._hangs():
            self.process.kill()
            self.process.join()
            self._report_crash(total, end, "hangs")

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _hangs(self) -> bool:
        """Whether the program takes too long: of the processor, since other programs may have it, too."""
        try:
            changed = self.record.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        used = _count_seconds(self.process.pid)
        if self.seen[0] != changed:
            self.seen = (changed, used)
        waited = time.time() - changed / 1e9
        return waited > DEADLOCK_SECONDS or (waited > HANG_SECONDS and used - self.seen[1] > HANG_SECONDS)

    def _report_crash(self, total: Summary, end: float, how: str = "") -> None:
        self.process.join()
        how = how or _describe_exit(self.process.exitcode)
        self.process = None
        if not self.record.exists():
            raise RuntimeError(f"a worker ended before its first program: {how}")
        running = json.loads(self.record.read_text())
        failure = Failure("process", how)
        total.programs += 1
        if failure.key not in total.failures:
            values = running["choices"] if how == "hangs" else self._reduce(running, how)
            program = GENERATORS[running["kind"]](Choices(values), None)
            report(self.request, total, running["kind"], program, failure)
        if (left := end - time.perf_counter()) > 0:
            self._start(running["number"] + 1, left)

    def _reduce(self, running: dict[str, Any], how: str) -> Sequence[int]:
        """The smallest program that ends its process in the same way, each tried in a process of its own."""

        def replay(values: Sequence[int]) -> Choices | None:
            choices = Choices(values)
            try:
                GENERATORS[running["kind"]](choices, None)
            except Exception:  # a generator that fails is not this failure
                return None
            found = _try_in_process(lambda: _examine(running, choices.taken, self.request))
            return choices if found == how else None

        first = replay(running["choices"])
        return shrink(first, replay, CRASH_SECONDS) if first is not None else running["choices"]


def _count_seconds(pid: int) -> float:
    """The seconds of the processor that a process has used; where the system does not say, those of the clock."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.time()


def _work(request: CampaignRequest, number: int, first: int, record: Path, sender: Connection) -> None:
    _follow_parent()
    gc.set_threshold(20_000, 20, 50)  # a program makes many objects, which count references free
    try:
        summary = run_campaign(request, number, first, record, lambda part: sender.send(("part", part)))
        sender.send(("end", summary))
    except Exception as error:  # the parent raises it
        sender.send(("error", error))


def _examine(running: dict[str, Any], values: Sequence[int], request: CampaignRequest) -> None:
    _follow_parent()
    program = GENERATORS[running["kind"]](Choices(values), None)
    examine(program, list_fuzz_engines(request.targets), running["seed"], request.targets)


def _try_in_process(run: Callable[[], None]) -> str:
    """How a process ends that runs a function."""
    process = CONTEXT.Process(target=run)
    process.start()
    try:
        process.join(HANG_SECONDS)
    finally:
        if process.exitcode is None:
            process.kill()
            process.join()
    return _describe_exit(process.exitcode)


def _describe_exit(code: int | None) -> str:
    return f"the process ended with {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit {code}"
