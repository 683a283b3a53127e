"""Soak test: many calls from many threads with flat memory, kill -9 and full disks during builds (`make soak`).

python scripts/soak.py [--calls 1000000] [--kills 500] [--limits 160] [--report soak.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts

THREADS = 8
GROWTH_BYTES = 24 << 20  # memory that may be added after the first quarter of the calls
# A process that has the package loaded, and forks a child for each build: "factor limit" in a line, then "wait".
BUILDER = """
import os, resource, signal, sys
import numpy as np, tessera as ts
def build(folder, factor, limit):
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    def model(x, w):
        return ts.softmax(ts.tanh(x @ w) * factor, axis=-1)
    x = np.ones((8, 16), np.float32)
    ts.build(ts.jit(model), x, w=np.ones((16, 16), np.float32), weights=["w"], out=folder)
while line := sys.stdin.readline():
    factor, limit = line.split()
    child = os.fork()
    if child == 0:
        try:
            build(sys.argv[1], float(factor), int(limit))
        except ts.TesseraError as error:
            os._exit(3)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(4)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()  # until then the number of an ended child is not another's
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
BUILT, REFUSED = 0, 3  # the statuses of a build


def measure_resident() -> int:
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak_calls(calls: int) -> dict[str, Any]:
    """Call one program from several threads with several sizes: equal results, flat memory."""
    function = ts.jit(lambda x, y: ts.softmax(x @ y, axis=-1).sum(axis=0), target="llvm")
    sizes = (1, 3, 8, 17)
    data = {n: (np.random.default_rng(n).standard_normal((n, 6)).astype("f4"), np.ones((6, 5), "f4")) for n in sizes}
    wanted = {n: function(*arrays).numpy() for n, arrays in data.items()}
    wrong: list[str] = []
    marks: list[int] = []

    def run(worker: int) -> None:
        for i in range(calls // THREADS):
            n = sizes[(i + worker) % len(sizes)]
            if not np.array_equal(function(*data[n]).numpy(), wanted[n]):
                wrong.append(f"thread {worker}, call {i}, size {n}")
                return
            if worker == 0 and i % max(1, calls // THREADS // 4) == 0:
                marks.append(measure_resident())

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marks.append(measure_resident())
    grown = marks[-1] - marks[min(1, len(marks) - 2)]
    return {"calls": calls, "seconds": time.perf_counter() - start, "wrong": wrong, "resident": marks, "grown": grown,
            "ok": not wrong and grown < GROWTH_BYTES}  # fmt: skip


class Builder:
    """Builds into a folder, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-B", "-c", BUILDER, str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *error: object) -> None:
        self.said = self.process.communicate()[1]

    def build(self, factor: float, limit: int = 0, delay: float | None = None) -> int:
        """The status of a build: its files may not grow beyond `limit` bytes if any; after a `delay` it is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(factor, limit, file=self.process.stdin, flush=True)
        child = int(self.process.stdout.readline())
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        print("wait", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


def run_artifact(folder: Path) -> bool:
    """Run the program of an artifact folder; False without a folder. A torn one raises."""
    if not folder.exists():
        return False
    found = np.asarray(ts.load(folder)(np.ones((8, 16), np.float32)))
    assert found.shape == (8, 16) and np.allclose(found, 1 / 16, atol=1e-5)  # softmax of equal values
    return True


def find_torn(folder: Path, what: str) -> list[str]:
    """What is wrong with the artifact of a folder."""
    try:
        return [] if run_artifact(folder) else [f"{what}: the artifact is gone"]
    except Exception as error:
        return [f"{what}: {type(error).__name__}: {error}"]


def soak_kills(count: int) -> dict[str, Any]:
    """Kill builds at random moments: the artifact before or the new one is whole, and the next build succeeds."""
    draw, torn, killed = random.Random(0), [], 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "artifact"
        with Builder(folder) as builder:
            start = time.perf_counter()
            assert builder.build(0.5) == BUILT
            seconds = time.perf_counter() - start
            for number in range(count):
                status = builder.build(number + 1.0, delay=draw.uniform(0.0, 1.1 * seconds))
                killed += status == -signal.SIGKILL
                torn += [] if status in (BUILT, -signal.SIGKILL) else [f"kill {number}: the build ended with {status}"]
                torn += find_torn(folder, f"kill {number}")
            if builder.build(0.25) != BUILT:
                torn.append("the build after all kills fails")
        torn += [builder.said[-300:]] if torn else []
        left = sorted(p.name for p in Path(place).iterdir() if p != folder)
    return {"kills": count, "before the end": killed, "torn": torn, "left": left[:9], "ok": not torn and killed > 0}


def soak_full_disk(count: int) -> dict[str, Any]:
    """Builds whose files may not grow beyond a limit: a typed error, and the artifact before it stays whole."""
    bad: list[str] = []
    found: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "artifact"
        with Builder(folder) as builder:
            assert builder.build(0.5) == BUILT
            for number in range(count):
                limit = 1 << (number % 16)
                status = builder.build(2.0 + number, limit)
                found[status] += 1
                bad += find_torn(folder, f"limit {limit}")
        bad += [builder.said[-300:]] if set(found) - {BUILT, REFUSED} else []
    return {"builds": count, "refused": found[REFUSED], "bad": bad, "ok": not bad and found[REFUSED] > 0}


def main() -> int:
    """Run each part; status 0 only if all hold."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=1_000_000)
    options.add_argument("--kills", type=int, default=500)
    options.add_argument("--limits", type=int, default=160)
    options.add_argument("--report")
    given = options.parse_args()
    parts = {"kills": (soak_kills, given.kills), "full disk": (soak_full_disk, given.limits),
             "calls": (soak_calls, given.calls)}  # fmt: skip
    results = {}
    for name, (part, count) in parts.items():
        if count:
            results[name] = part(count)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if given.report:
        Path(given.report).write_text(json.dumps(results, indent=1))
    return 0 if all(r["ok"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
