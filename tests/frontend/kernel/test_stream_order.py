"""Random programs of streams, events and waits: reported exactly where a search through their graph finds no order."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts

STREAMS, ARRAYS = 3, 2


@ts.kernel
def read(x, out):
    out[0] = x[0]


@ts.kernel
def write(x, out):
    x[0] = 1.0
    out[0] = 1.0


STEPS = st.one_of(
    st.tuples(st.just("launch"), st.integers(0, STREAMS - 1), st.integers(0, ARRAYS - 1), st.booleans()),
    st.tuples(st.just("host"), st.integers(0, ARRAYS - 1), st.booleans()),
    st.tuples(st.just("record"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 5)),
    st.tuples(st.just("sync"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("meet"), st.integers(0, 5)),
)


class Graph:
    """Launches and what is known to come before each: a node is (place, array, writes)."""

    def __init__(self):
        self.before = {}
        self.last = {"host": set(), **{s: set() for s in range(STREAMS)}}

    def unordered(self, where, array, writes):
        """Add a launch; whether an earlier one meets it that does not come before."""
        known = self.last[where] | self.last["host"]
        met = any(a == array and (w or writes) and n not in known for n, (a, w) in self.before.items())
        number = len(self.before)
        self.before[number] = (array, writes)
        self.last[where] = known | {number}
        return met


def run(steps):
    """The steps that are reported, by the streams and by the graph."""
    streams, arrays, events, graph = [ts.Stream() for _ in range(STREAMS)], np.zeros((ARRAYS, 1), "f4"), [], Graph()
    found, wanted = [], []
    with ts.debug.checked(collect=True) as report:
        for number, (kind, *given) in enumerate(steps):
            count = len(report.findings)
            if kind == "launch":
                stream, array, writes = given
                with streams[stream]:
                    (write if writes else read)[1](arrays[array], np.zeros(1, "f4"))
                wanted += [number] if graph.unordered(stream, array, writes) else []
            elif kind == "host":
                array, writes = given
                (write if writes else read)[1](arrays[array], np.zeros(1, "f4"))
                wanted += [number] if graph.unordered("host", array, writes) else []
            elif kind == "record":
                events.append((streams[given[0]].record(), set(graph.last[given[0]])))
            elif kind == "wait" and events:
                event, known = events[given[1] % len(events)]
                streams[given[0]].wait(event)
                graph.last[given[0]] |= known
            elif kind == "sync":
                streams[given[0]].synchronize()
                graph.last["host"] |= graph.last[given[0]]
            elif kind == "meet" and events:
                event, known = events[given[0] % len(events)]
                event.synchronize()
                graph.last["host"] |= known
            found += [number] if len(report.findings) > count else []
        ts.synchronize()
    return found, wanted


@given(st.lists(STEPS, max_size=14))
@settings(max_examples=60, deadline=None)
def test_reports_are_those_of_the_graph(steps):
    found, wanted = run(steps)
    assert found == wanted


def test_programs_of_both_kinds_are_made():
    assert run([("launch", 0, 0, True), ("launch", 1, 0, False)]) == ([1], [1])
    ordered = [("launch", 0, 0, True), ("record", 0), ("wait", 1, 0), ("launch", 1, 0, True)]
    assert run(ordered) == ([], [])
