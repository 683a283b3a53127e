"""Soak test: many calls from many threads with flat memory, kill -9 and full disks during builds (`make soak`).

python scripts/soak.py [--calls 100000] [--kills 50] [--limits 40] [--report soak.json]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts

THREADS = 8
GROWTH_BYTES = 24 << 20  # memory that may be added after the first quarter of the calls
BUILD = """
import resource, signal, sys
if int(sys.argv[3]):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
import numpy as np, tessera as ts
def model(x, w):
    return ts.softmax(ts.tanh(x @ w) * float(sys.argv[2]), axis=-1)
x = np.ones((8, 16), np.float32)
print("begin", flush=True)
ts.build(ts.jit(model), x, w=np.ones((16, 16), np.float32), weights=["w"], out=sys.argv[1])
print("built", flush=True)
"""


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
    grown = measure_resident() - marks[min(1, len(marks) - 1)]
    return {"calls": calls, "seconds": time.perf_counter() - start, "wrong": wrong, "grown": grown,
            "ok": not wrong and grown < GROWTH_BYTES}  # fmt: skip


def _start_build(folder: Path, factor: float, limit: int = 0) -> subprocess.Popen[str]:
    """A build in a process of its own; with a limit, its files may not grow beyond so many bytes."""
    # The child limits itself: a function between fork and exec is unsafe where threads run.
    command = [sys.executable, "-B", "-c", BUILD, str(folder), str(factor), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_artifact(folder: Path) -> bool:
    """Run the program of an artifact folder; False without a folder. A torn one raises."""
    if not folder.exists():
        return False
    found = np.asarray(ts.load(folder)(np.ones((8, 16), np.float32)))
    assert found.shape == (8, 16) and np.allclose(found, 1 / 16, atol=1e-5)  # softmax of equal values
    return True


def is_refused(status: int, said: str) -> bool:
    """Whether a process ended with a typed error of Tessera."""
    return status == 1 and "\ntessera.errors." in said


def soak_kills(count: int) -> dict[str, Any]:
    """Kill builds at random moments: the folder is absent or whole, and the next build succeeds."""
    draw, torn = random.Random(0), []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "artifact"
        for number in range(count):
            process = _start_build(folder, number + 1)
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.uniform(0.0, 0.6))
            process.kill()
            process.communicate()
            try:
                run_artifact(folder)
            except Exception as error:
                torn.append(f"kill {number}: {type(error).__name__}: {error}")
        process = _start_build(folder, 1.0)
        _, said = process.communicate()
        if process.returncode:
            torn.append(f"the build after all kills: {said[-300:]}")
    return {"kills": count, "torn": torn, "ok": not torn}


def soak_full_disk(count: int) -> dict[str, Any]:
    """Builds whose files may not grow beyond a limit: a typed error, and the artifact before it stays whole."""
    bad = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "artifact"
        with _start_build(folder, 1.0) as first:
            first.communicate()
        assert first.returncode == 0
        for number in range(count):
            limit = 1 << (number % 16)
            process = _start_build(folder, 2.0, limit)
            _, said = process.communicate()
            if process.returncode and not is_refused(process.returncode, said):
                bad.append(f"limit {limit}: {said[-300:]}")
            try:
                if not run_artifact(folder):
                    bad.append(f"limit {limit}: the artifact is gone")
            except Exception as error:
                bad.append(f"limit {limit}: {type(error).__name__}: {error}")
    return {"builds": count, "bad": bad, "ok": not bad}


def main() -> int:
    """Run each part; status 0 only if all hold."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=100_000)
    options.add_argument("--kills", type=int, default=50)
    options.add_argument("--limits", type=int, default=40)
    options.add_argument("--report")
    given = options.parse_args()
    results = {
        "calls": soak_calls(given.calls),
        "kills": soak_kills(given.kills),
        "full disk": soak_full_disk(given.limits),
    }
    for name, result in results.items():
        print(f"{name}: {json.dumps(result)}")
    if given.report:
        Path(given.report).write_text(json.dumps(results, indent=1))
    return 0 if all(r["ok"] for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
