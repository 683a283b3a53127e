"""Random uses of streams, events and waits: debug mode reports those launches that nothing orders, and no others.

What is expected follows from the transitive closure of a graph: on a stream operations follow each other, a wait
follows what it waits for, and the host queues after all that it has waited for.
"""

from random import Random

import numpy as np
import pytest

import tessera as ts
from tessera import tile

STREAMS, ARRAYS = 3, 2


@ts.kernel
def move(x, y):
    y[tile.program_id(0)] += x[tile.program_id(0)]


@ts.kernel
def change(x):
    x[tile.program_id(0)] += 1.0


class Order:
    """What happens before what: for each stream and the host, the set of operations that are over by then."""

    def __init__(self):
        self.host, self.streams = frozenset(), [frozenset()] * STREAMS
        self.launches = []  # (number, what happened before it, arrays read, arrays written)

    def launch(self, where, read, written):
        before = self.host | (self.streams[where] if where is not None else frozenset())
        number = len(self.launches)
        self.launches.append((number, before, read, written))
        if where is None:
            self.host |= {number}  # it is over when the call returns
        else:
            self.streams[where] = before | {number}

    def races(self):
        """Whether the last launch meets one that uses its memory, of which one writes, and that is not before it."""
        number, before, read, written = self.launches[-1]
        return any(n not in before and (w & (read | written) or written & r) for n, _, r, w in self.launches[:number])


def act(random, order, streams, events, arrays):
    """One random action of the host."""
    kind = random.choice(("launch", "launch", "launch", "record", "wait", "host", "synchronize", "event", "all"))
    at = random.randrange(STREAMS)
    if kind in ("launch", "host"):
        use = random.choice(({"read": {0}, "written": {1}}, {"read": set(), "written": {random.randrange(ARRAYS)}}))
        place = next(iter(use["written"]))
        call = (lambda: move[4](*arrays)) if use["read"] else (lambda: change[4](arrays[place]))
        if kind == "host":
            call()
        else:
            with streams[at]:
                call()
        order.launch(None if kind == "host" else at, **use)
    elif kind == "record":
        events.append((streams[at].record(), order.streams[at] | order.host))
    elif kind == "synchronize":
        streams[at].synchronize()
        order.host |= order.streams[at]
    elif kind == "all":
        ts.synchronize()
        order.host = order.host.union(*order.streams)
    elif events:
        event, before = random.choice(events)
        if kind == "event":
            event.synchronize()
            order.host |= before
        else:
            streams[at].wait(event)
            order.streams[at] |= before | order.host


@pytest.mark.parametrize("seed", range(24))
def test_the_launches_that_nothing_orders(seed):
    random, order = Random(seed), Order()
    streams, arrays = [ts.Stream() for _ in range(STREAMS)], [np.zeros(4, "f4") for _ in range(ARRAYS)]
    events = [(stream.record(), frozenset()) for stream in streams]  # too early: they order nothing
    raced = 0
    for _ in range(20):
        count = len(order.launches)
        with ts.debug.checked(collect=True) as report:
            act(random, order, streams, events, arrays)
        expected = len(order.launches) > count and order.races()
        assert any(f.kind == "stream race" for f in report) == expected
        raced += expected
    ts.synchronize()
    assert raced < len(order.launches)
