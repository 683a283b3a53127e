"""Going back: what the history says memory held at each step is what it held."""

import numpy as np
import pytest
from stepped import exchanged, ramp, rows

import tessera as ts
from tessera import tile
from tessera.interp.observers import OBSERVERS
from tessera.interp.tile.memory import InstanceMemory
from tessera.tools.debug import history
from tessera.tools.debug.console import Console


@ts.kernel
def updated(x, out):
    me = tile.local_id()
    i = tile.program_id(0)
    row = tile.alloc_shared((4,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    for j in tile.range(0, 3):
        tile.atomic_add(out[i], row[me] * j)
        if me > j:
            x[4 + i * 4 + me] = row[3 - me] * 2.0


class Witness:
    """An observer that copies all memory that each op is given, just before it runs."""

    def __init__(self):
        self.seen = []

    def enter(self, started):
        pass

    def leave(self):
        pass

    def meaning(self, machine, inner):
        def mean(node, args, walk):
            self.seen.append([(a, a.array.copy()) for a in args if isinstance(a, InstanceMemory)])
            return inner(node, args, walk)

        return mean


def recorded(launch, *args):
    console, witness = Console(["continue"]), Witness()
    console.write = lambda text: None
    console.stepper.goal = lambda step: False
    token = OBSERVERS.set((witness, console.stepper))
    try:
        launch(*args)
    finally:
        OBSERVERS.reset(token)
    return console.stepper.history, witness.seen


@pytest.mark.parametrize("launch", [rows[(4,)], exchanged[(2,), 4], updated[(2,), 4]], ids=["rows", "tiles", "atomics"])
def test_memory_at_each_step(launch):
    past, seen = recorded(launch, *ramp(16))
    assert len(past.steps) == len(seen) > 10
    changed = 0
    for step, memories in zip(past.steps, seen, strict=True):
        for memory, copy in memories:
            assert past.memory(memory, step).tobytes() == copy.tobytes()
            changed += memory.array.tobytes() != copy.tobytes()
    assert changed


def test_the_oldest_steps_are_forgotten(monkeypatch):
    monkeypatch.setattr(history, "BYTES", 5_000)
    past, seen = recorded(rows[(4,)], *ramp(16))
    assert past.forgotten > 0 and past.forgotten + len(past.steps) == len(seen)
    assert [s.number for s in past.steps] == list(range(past.forgotten, len(seen)))
    last = past.steps[-1]
    assert next(past.before(last)) is past.steps[-2] and list(past.after(past.steps[0])) == past.steps[1:]
    assert np.array_equal(past.memory(seen[-1][0][0], last), seen[-1][0][1])
