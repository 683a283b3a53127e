"""Work stealing on threads and processes: results in order, no task twice, unequal tasks shared, errors kept."""

import math
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

import tessera as ts
from tessera.errors import ArgumentError


@pytest.mark.parametrize("count", [0, 1, 5, 40])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_results_in_order(workers, count):
    ran = []
    tasks = [lambda i=i: ran.append(i) or i * i for i in range(count)]
    scheduler = ts.WorkStealingScheduler(workers)
    assert scheduler.schedule(tasks) == [i * i for i in range(count)]
    assert sorted(ran) == list(range(count)) and sum(scheduler.executed) == count


def test_a_worker_that_is_idle_steals():
    """Worker 0 has a task that waits for all others: they are done by the other worker."""
    rest, left = threading.Event(), [7]

    def short():
        left[0] -= 1
        if not left[0]:
            rest.set()

    scheduler = ts.WorkStealingScheduler(2)
    assert scheduler.schedule([lambda: rest.wait(20), *[short] * 7])[0] is True
    assert scheduler.executed == [1, 7] and scheduler.stolen == [0, 3]


def test_processes():
    with ProcessPoolExecutor(2) as executor:
        found = ts.WorkStealingScheduler(2, executor).schedule([(math.factorial, n) for n in range(6)])
    assert found == [math.factorial(n) for n in range(6)]


def test_an_error_stops_what_has_not_begun():
    began = []

    def task(number):
        began.append(number)
        time.sleep(0.01)
        if number == 1:
            raise KeyError("task 1")

    with ThreadPoolExecutor(2) as executor:
        scheduler = ts.WorkStealingScheduler(2, executor)
        with pytest.raises(KeyError, match="task 1"):
            scheduler.schedule([(task, i) for i in range(50)])
        assert len(began) < 10
        assert scheduler.schedule([lambda: "again"]) == ["again"]


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_refusals(workers):
    with pytest.raises(ArgumentError, match="needs workers"):
        ts.WorkStealingScheduler(workers)
    with pytest.raises(ArgumentError, match="no executor"):
        ts.WorkStealingScheduler(2, executor=3)
    with pytest.raises(ArgumentError, match="no function"):
        ts.WorkStealingScheduler(2).schedule([3])
