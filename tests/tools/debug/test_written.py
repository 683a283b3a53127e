"""Bytes that hold a value: against a plain set of them."""

import numpy as np

from tessera.core.device import array_span
from tessera.interp.sanitizer.monitor import Monitor
from tessera.interp.sanitizer.report import Checks
from tessera.interp.sanitizer.shadow_memory import InitialisedBytes


def test_against_a_set_of_bytes(rng):
    for _ in range(200):
        written, want = InitialisedBytes(), set()
        for _ in range(8):
            unit = int(rng.choice([1, 2, 4]))
            low = int(rng.integers(0, 16)) * 4
            high = low + 4 * int(rng.integers(1, 8))
            what = rng.integers(0, 3)
            if what == 0:
                written.mark(low, high)
                want |= set(range(low, high))
            elif what == 1:
                view = written.view(low, high, unit)
                cells = np.flatnonzero(rng.random(view.size) < 0.5)
                view[cells] = True
                written.spread(low, high, unit)
                want |= {low + c * unit + b for c in cells.tolist() for b in range(unit)}
                # a cell whose first byte was written before counts whole
                want |= {low + c * unit + b for c in range(view.size) for b in range(unit) if low + c * unit in want}
            found = written.view(low, high, 1)
            assert [low + i in want for i in range(high - low)] == found.tolist()


def test_the_next_launch_may_read_smaller_elements(rng):
    """What a launch wrote as f32 holds a value for one that reads bytes."""
    x = rng.random(8, np.float32)
    monitor = Monitor(Checks(), ())
    region = monitor._region(*array_span(x), [x], True)
    region.ready[2:5] = True
    monitor.regions = [region]
    monitor.leave()
    after = monitor._region(*array_span(x), [x.view(np.uint8)], False)
    assert np.flatnonzero(after.ready).tolist() == list(range(8, 20))
