"""Fixtures of all tests, and the choice of the quick ones."""

import atexit
import gc
import os
from functools import cache
from pathlib import Path

# Before NumPy and PyTorch: the threads of their libraries wait for each other in loops, which takes the processors from
# the tests beside this one.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

os.environ.setdefault("TESSERA_TRACEBACK", "full")  # a failing test shows where in the package it failed
# A loaded machine is slow: time fails no property. `@settings` of a test add to these.
settings.register_profile("tessera", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tessera")
# Hypothesis tries numbers that it reads in the source of all modules: 9 s for each worker of a fresh checkout, for tile
# sizes and error codes, which no test needs. It has no setting for this.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
# The compilers make many objects that live for one test: collected less often, most of them are gone by then.
gc.set_threshold(100_000, 20, 20)
atexit.register(gc.unfreeze)  # at exit libraries look for leaks, and everything is garbage
ROOT = Path(__file__).parents[1]
QUICK_SECONDS = 0.35  # the most that the tests of a quick file take together
QUICK_FOLDERS = ("core", "ir", "lower", "ops")  # where a file without a recorded duration counts as quick
DURATIONS = {
    ROOT / name: float(seconds)
    for seconds, name in (line.split() for line in (ROOT / "tests" / "durations.txt").read_text().splitlines())
}


@cache
def is_quick(file: Path) -> bool:
    """Whether the tests of a file are quick: by recorded duration (scripts/record_durations.py), else by folder."""
    folder = file.relative_to(ROOT / "tests").parts[0]
    return DURATIONS.get(file, 0.0 if folder in QUICK_FOLDERS else QUICK_SECONDS) < QUICK_SECONDS


def pytest_configure(config):
    """Every other worker collects the folders from the last to the first.

    Python compiles what a fresh machine imports: two workers then compile half of it each, and read the rest.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if number % 2 and [Path(each).resolve() for each in config.args] == [ROOT / "tests"]:
        parts = [each for each in (ROOT / "tests").iterdir() if each.is_dir() or each.match("test_*.py")]
        config.args = [str(each) for each in sorted(parts, reverse=True) if each.name != "__pycache__"]


def pytest_ignore_collect(collection_path, config):
    """Under `-m quick` other files are not even imported."""
    if config.getoption("markexpr") == "quick" and collection_path.name.startswith("test_"):
        return None if is_quick(collection_path) else True
    return None


def is_in_turn(item) -> bool:
    """Whether a test stays where one of its parameters is marked `in_turn`.

    Of three parameters, of which that one has the fewest values, each pair of values meets: faults seldom need more.
    """
    mark = item.get_closest_marker("in_turn")
    if mark is None:
        return True
    places, own = 0, (0, 1)
    for names, values, *_ in (each.args for each in item.iter_markers("parametrize")):
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        place = find_place([item.callspec.params[n] for n in names], values)
        if mark.args[0] in names:
            own = place, len(values)
        else:
            places += place
    return own[0] == places % own[1]


def find_place(chosen, values) -> int:
    """The place of what a test was given for some parameters among the values of `parametrize`."""
    rows = [[v] for v in values] if len(chosen) == 1 else values
    return next(i for i, row in enumerate(rows) if all(x is v for x, v in zip(chosen, row, strict=True)))


def pytest_collection_modifyitems(items):
    """Mark the quick tests; the longest come first, so that no worker waits for one at the end."""
    items[:] = [item for item in items if is_in_turn(item)]
    items.sort(key=lambda item: (item.path.name != "test_conformance.py", item.path))
    for item in items:
        if is_quick(item.path):
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish():
    """Modules and tests stay to the end: no collection walks over them again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """pytest collects twice before it ends: what lives now is no garbage of the tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_protocol(item, nextitem):
    """A worker reports the call of a test, and of its setup and teardown only what has not passed.

    Six messages for each test, to say that it started, passed three times and ended, took a fiftieth of all time.
    """
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(0)
