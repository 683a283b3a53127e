"""`ts.testing.bench`: what it counts, what it returns, and what it refuses."""

import numpy as np
import pytest

import tessera as ts


class Clock:
    """A clock that only calls of `work` advance."""

    def __init__(self, *milliseconds):
        self.now, self.cost, self.calls = 0.0, list(milliseconds), 0

    def work(self, x, *, scale=1):
        self.calls += 1
        self.now += (self.cost.pop(0) if len(self.cost) > 1 else self.cost[0]) / 1e3
        return x * scale


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(1000.0, 2.0)  # the first call compiles
    monkeypatch.setattr("tessera.testing.time.perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize("mode", ["mean", "median", "min", "max"])
def test_the_first_call_is_not_counted(clock, mode):
    assert ts.testing.bench(clock.work, 3, scale=2, return_mode=mode) == pytest.approx(2.0)


def test_warmup_and_rep_say_how_long(clock):
    clock.cost = [10.0, 2.0]
    times = ts.testing.bench(clock.work, 3, warmup=20, rep=40, return_mode="all")
    assert len(times) == 20 and clock.calls == 2 + 5 + 10 + 20


def test_a_long_call_is_measured_once_more(clock):
    clock.cost = [1000.0, 900.0]
    assert ts.testing.bench(clock.work, 3, return_mode="all") == pytest.approx([900.0]) and clock.calls == 3


def test_quantiles(clock):
    clock.cost = [9.0, *[4.0] * 6, 1.0, 3.0, 2.0]
    assert ts.testing.bench(clock.work, 3, warmup=0, rep=12, quantiles=[0.0, 0.5, 1.0]) == pytest.approx([1, 2, 3])


def test_a_kernel_launch_is_measured():
    @ts.kernel
    def twice(x: ts.Tensor["N"]):
        ts.tile.store(x[0:8], x[0:8] * 2.0)

    x = np.ones(8, np.float32)
    assert ts.testing.bench(twice[(1,)], x, warmup=0, rep=0) > 0 and x[0] >= 4


@pytest.mark.parametrize(
    "args, named, said",
    [((np.ones(2),), {}, "calls of a function"), ((len, "x"), {"return_mode": "best"}, "'best' is not a statistic"),
     ((len, "x"), {"quantiles": [2]}, "outside [0, 1]")],
)  # fmt: skip
def test_bad_requests_are_refused_at_the_user_s_line(args, named, said):
    with pytest.raises(ts.errors.ArgumentError) as caught:
        ts.testing.bench(*args, **named)
    assert said in caught.value.message and caught.value.location.file == __file__
