"""Operations that write files, each repeated while its first, second, ... call of the system fails (tests/faults.c).

    LD_PRELOAD=faults.so FAULT_FOLDER=FOLDER python fault_programs.py FOLDER

It prints a JSON object: for each operation how many calls it makes, and what went wrong: an error that is not
Tessera's, a wrong result, or a file that is neither the old one nor the new one, or a temporary file that stays.
"""

import ctypes
import errno
import json
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tessera as ts
from tessera import nn
from tessera.core.io import write_array
from tessera.core.schedule import Schedule
from tessera.dist import load_checkpoint, save_checkpoint
from tessera.monitoring.drift import DriftDetector
from tessera.runtime.launch.tuner import TuningCache
from tessera.train.metrics import CsvLog

LIBRARY = ctypes.CDLL(None)
LIMIT = 400  # calls of one operation
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ENTRY = {"config": {"B": 1}, "latency_ms": 1.0, "trials": []}


@dataclass
class Operation:
    """What writes, and what must hold after it, whether it failed or not."""

    name: str
    write: object
    check: object
    quiet: bool = False  # no error at all: what is written is a cache


def model(x):
    """A program to build."""
    return ts.softmax(x * 2.0, axis=-1)


def list_operations(folder):
    """Each with a folder of its own, in which an earlier version of the file is."""
    build = lambda target: ts.build(ts.jit(model), X, target="llvm", out=target)  # noqa: E731
    built, fresh = folder / "built" / "artifact", folder / "fresh" / "artifact"
    saved, array = folder / "saved" / "w.safetensors", folder / "array" / "x.npy"
    tuning, schedule = TuningCache(folder / "tuning" / "autotune.json"), folder / "schedule" / "s.json"
    results, drift = folder / "results" / "cache.sqlite", folder / "drift" / "d.json"
    bundle, bundled = folder / "bundle" / "m.bundle", ts.bundle(ts.jit(model), X, targets=["llvm"])
    for path in (built, fresh, saved, array, tuning.path, schedule, results, drift, bundle):
        path.parent.mkdir(parents=True, exist_ok=True)
    build(built)
    ts.save({"w": X}, saved)
    write_array(array, X)
    tuning.put("a", ENTRY)
    Schedule(tile_m=32).save(schedule)
    ts.save(bundled, bundle)
    detector = DriftDetector(edges=[0.0, 0.5, 1.0], baseline=[3.0, 4.0])
    detector.save(drift)
    calls, log = [], CsvLog(folder / "metrics.csv")
    log.write({"step": 0, "loss": 1.0})
    rows = folder / "profile"
    loop = ts.train.Loop(nn.Linear(3, 2), ts.optim.SGD(0.1), loss, checkpoint=folder / "training", keep=2)
    loop.save_checkpoint()
    sharded = folder / "sharded" / "c"
    save = ts.spmd(lambda: save_checkpoint(sharded, {"w": ts.ones((3,))}), mesh=ts.Mesh(1))
    save()
    rows.mkdir()
    with ts.profile() as session:
        ts.jit(model)(X)

    def add_row():
        calls.append(1)
        log.write({"step": len(calls), "loss": 0.5})

    def remember():
        calls.append(1)
        cached = ts.persistent_cache(results)(double)
        return np.testing.assert_array_equal(cached(ts.Tensor(X + len(calls))).numpy(), 2 * (X + len(calls)))

    return [
        Operation("build over", lambda: build(built), lambda: run(built)),
        Operation("build", lambda: build(fresh), lambda: fresh.exists() and run(fresh)),
        Operation(
            "save", lambda: ts.save({"w": X}, saved), lambda: np.testing.assert_array_equal(ts.load(saved)["w"], X)
        ),
        Operation("bundle", lambda: ts.save(bundled, bundle), lambda: run(bundle)),
        Operation("array", lambda: write_array(array, X), lambda: np.testing.assert_array_equal(np.load(array), X)),
        Operation("tuning", lambda: tuning.put("b", ENTRY), lambda: check(tuning.get("a") == ENTRY), quiet=True),
        Operation("schedule", lambda: Schedule(tile_m=32).save(schedule), lambda: Schedule.load(schedule)),
        Operation("drift", lambda: detector.save(drift), lambda: DriftDetector.load(drift)),
        Operation("metrics", add_row, lambda: check("0,1.0" in log.path.read_text())),
        Operation("metrics kept", lambda: log.keep_until(0), lambda: check("0,1.0" in log.path.read_text())),
        Operation("training", loop.save_checkpoint, lambda: loop.resume()),
        Operation("sharded", save, lambda: load_checkpoint(sharded, {"w": ts.zeros((3,))})),
        Operation("profile", lambda: session.save(rows / "p.json"), lambda: None),
        Operation(
            "new folder",
            lambda: Schedule(tile_m=32).save(folder / f"n{len(calls)}" / "s.json"),
            lambda: calls.append(1),
        ),
        Operation("results", remember, lambda: None, quiet=True),
        Operation("object code", compile_anew, lambda: None, quiet=True),
    ]


def loss(layer, x):
    """The loss of a training loop."""
    return layer(x).sum()


def double(x):
    """A function whose results are kept."""
    return x * 2.0


SEEN = []


def compile_anew():
    """Compile a program that is not in the cache of object code."""
    SEEN.append(1)
    number = float(len(SEEN))
    found = ts.jit(lambda x: x * number, target="llvm")(X)
    np.testing.assert_array_equal(np.asarray(found), X * np.float32(number))


def check(truth):
    """Fail loudly."""
    if not truth:
        raise AssertionError("what was there before is lost")


def run(path):
    """Run a program that was written."""
    np.testing.assert_allclose(np.asarray(ts.load(path)(X)).sum(axis=1), 1.0, rtol=1e-5)


def try_once(operation, number):
    """What went wrong with `number` calls that succeed, and whether all calls did."""
    LIBRARY.fault_arm(ctypes.c_long(number))
    problem, failed = "", False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            operation.write()
    except ts.TesseraError as error:
        failed, problem = True, f"{type(error).__name__}: {error}" if operation.quiet else ""
    except Exception as error:
        failed, problem = True, f"{type(error).__module__}.{type(error).__name__}: {error}"
    reached = LIBRARY.fault_disarm()
    if reached > number and not failed and not operation.quiet:
        problem = "no error"
    try:
        operation.check()
    except Exception as error:
        problem = f"afterwards {type(error).__name__}: {error}"
    return problem, reached <= number


def list_left(folder):
    """Temporary files and folders that an operation left."""
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.name.startswith((".", "tmp"))]


def main():
    """Every operation, until all of its calls succeed."""
    folder, found = Path(sys.argv[1]), {}
    LIBRARY.fault_set(getattr(errno, os.environ.get("FAULT", "ENOSPC")))
    for operation in list_operations(folder):
        problems, number, done = [], 0, False
        while not done and number < LIMIT:
            problem, done = try_once(operation, number)
            problems += [f"call {number}: {problem[:300]}"] if problem else []
            number += 1
        left = list_left(folder)
        found[operation.name] = {"calls": number - 1, "problems": problems + [f"left: {name}" for name in left]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
