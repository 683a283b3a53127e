"""Streams and events: order within and between streams, failures, and launches that nothing orders."""

import threading

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ExecutionError, RaceError
from tessera.runtime.launch.streams import HOST_STREAM, LaunchOrder


@ts.kernel
def double(x):
    x[tile.program_id(0)] *= 2.0


@ts.kernel
def add(x, y):
    i = tile.program_id(0)
    y[i] += x[i]


@ts.kernel
def fails(x):
    tile.assert_(x[tile.program_id(0)] < 0.0, "never")


def waiting(stream):
    """A stream whose queue is held up until the flag is set."""
    gate = threading.Event()
    stream.run(gate.wait, 10)
    return gate


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_in_order_and_beside_the_program(target):
    entry, stream, x = ts.kernel(target=target)(double.kernel_function), ts.Stream(), np.ones(4, "f4")
    gate = waiting(stream)
    with stream:
        queued = [entry[4](x) for _ in range(5)]
    assert x.tolist() == [1] * 4 and not queued[-1].done()
    gate.set()
    stream.synchronize()
    assert x.tolist() == [32] * 4 and queued[-1].done()


def test_events_order_streams():
    first, second, x, y = ts.Stream(), ts.Stream(), np.ones(4, "f4"), np.zeros(4, "f4")
    gate = waiting(first)
    with ts.debug.checked():
        with first:
            double[4](x)
            ready = ts.Event().record()
        second.wait(ready)
        with second:
            add[4](x, y)
        assert not ready.done()
        gate.set()
        ts.synchronize()
    assert y.tolist() == [2] * 4 and ready.done()
    later = first.record()
    later.synchronize()
    assert ready.elapsed_ms(later) == -later.elapsed_ms(ready) >= 0 == later.elapsed_ms(later)


def test_an_event_after_a_failed_launch_raises_its_error():
    stream = ts.Stream()
    with stream:
        fails[4](np.ones(4, "f4"))
        after = stream.record()
    with pytest.raises(ExecutionError, match="never"):
        after.synchronize()
    assert after.done()
    with pytest.raises(ExecutionError, match="never"):  # the stream keeps it for whoever waits next
        stream.synchronize()


def test_what_a_kernel_returns():
    @ts.kernel
    def total(x: ts.Tensor[4, ts.f32]) -> ts.f32:
        return tile.sum(x[0:4])

    with ts.Stream():
        queued = total[1](np.ones(4, "f4"))
    assert float(np.asarray(queued.wait()).reshape(-1)[0]) == 4.0


@pytest.mark.parametrize("second", [double, add])
def test_launches_that_nothing_orders(second):
    one, two, x = ts.Stream(), ts.Stream(), np.ones(4, "f4")
    arguments = (x,) if second is double else (x, np.zeros(4, "f4"))
    with pytest.raises(RaceError, match=f"{second.__name__} on stream {two.number}.* meets double on stream"):
        with ts.debug.checked():
            with one:
                double[4](x)
            with two:
                second[4](*arguments)
    ts.synchronize()


def test_the_host_does_not_wait_by_itself():
    stream, x = ts.Stream(), np.ones(4, "f4")
    with ts.debug.checked(collect=True) as report:
        with stream:
            double[4](x)
        double[2](x[2:])  # a view of what the stream writes
        stream.synchronize()
        double[4](x)
    assert [(f.kind, "on no stream" in f.message) for f in report] == [("stream race", True)]
    assert "(rule M15)" in str(report) and "synchronize()" in str(report)


def test_what_is_ordered_is_not_reported():
    """Order follows through events of events, through the host that waited, and for two that only read."""
    streams, x = [ts.Stream() for _ in range(4)], np.ones(4, "f4")
    outs = [np.zeros(4, "f4") for _ in range(2)]
    with ts.debug.checked():
        with streams[0]:
            double[4](x)
        for before, after in zip(streams, streams[1:3], strict=False):
            after.wait(before.record())
        for stream, out in zip(streams[1:3], outs, strict=True):
            with stream:
                add[4](x, out)  # both read x
        streams[2].record().synchronize()
        streams[1].synchronize()
        with streams[3]:
            double[4](x)
        ts.synchronize()
    assert x.tolist() == [4] * 4 and [o.tolist() for o in outs] == [[2] * 4] * 2


def test_no_stream_has_the_number_of_the_host():
    assert HOST_STREAM not in [LaunchOrder().stream() for _ in range(3)]


def test_an_event_too_early_orders_nothing():
    one, two, x = ts.Stream(), ts.Stream(), np.ones(4, "f4")
    with pytest.raises(RaceError, match="nothing orders the two launches"), ts.debug.checked():
        early = one.record()
        with one:
            double[4](x)
        two.wait(early)
        with two:
            double[4](x)
    ts.synchronize()


def test_a_failure_ends_what_follows():
    one, two, x = ts.Stream(), ts.Stream(), np.ones(4, "f4")
    with one:
        fails[4](x)
        double[4](x)
    two.wait(one.record())
    with two:
        double[4](x)
    for stream in (two, one):
        with pytest.raises(ExecutionError, match="assertion failed: never"):
            stream.synchronize()
    assert x.tolist() == [1] * 4
    with one:
        double[4](x)
    one.synchronize()
    assert x.tolist() == [2] * 4  # it can be used again


def test_arguments_are_checked_where_they_are_given():
    stream = ts.Stream()
    with pytest.raises(ArgumentError, match="double"), stream:
        double[4](np.ones(4, "f4"), 1, 2)
    stream.synchronize()


def test_events_without_a_stream():
    with pytest.raises(ArgumentError, match="no stream to record"):
        ts.Event().record()
    with pytest.raises(ArgumentError, match="never recorded"):
        ts.Stream().wait(ts.Event())
    with pytest.raises(ExecutionError, match="is not complete"):
        ts.Event().elapsed_ms(ts.Event())


def test_streams_run_beside_each_other():
    one, two, meeting = ts.Stream(), ts.Stream(), threading.Barrier(2)
    queued = [s.run(meeting.wait, 10) for s in (one, two)]
    assert sorted(q.wait() for q in queued) == [0, 1]  # each waited for the other


def test_wait_raises_what_the_launch_or_one_before_it_did_wrong():
    def fail():
        raise ExecutionError("it went wrong")

    stream = ts.Stream()
    with pytest.raises(ExecutionError, match="it went wrong"):
        stream.run(fail).wait()
    stream.run(fail)
    behind = stream.run(lambda: 3)
    with pytest.raises(ExecutionError, match="it went wrong"):
        behind.wait()
    assert stream.run(lambda: 3).wait() == 3
