"""Word buffers and the event queue agree with models that hold one word, and one call, at a time."""

import gc
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.interp.target.csl.fabric.output_queue import split_runs
from tessera.interp.target.csl.fabric.word_buffer import WordBuffer
from tessera.interp.target.csl.pe import pe_state
from tessera.interp.target.csl.pe.pe_state import EventQueue, without_collection

CONTROL = 1 << 32
# The gap before a word, and whether it is a control word.
WORDS = st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=12)


def fill(words):
    """A buffer of words whose cycles have these gaps, and the same words as pairs."""
    buffer, pairs, time = WordBuffer(), [], 0
    run: list[int] = []
    for number, (gap, control) in enumerate(words):
        time += gap
        pairs.append((time, number + control * CONTROL))
        run = [*run, pairs[-1][1]] if gap == 1 else run
        if gap > 1 or number == 0:
            run = [pairs[-1][1]]
        if number + 1 == len(words) or words[number + 1][0] > 1:
            buffer.extend(split_runs(time - len(run) + 1, run), len(run))
    return buffer, pairs


@given(words=WORDS)
def test_the_words_of_a_buffer(words):
    buffer, pairs = fill(words)
    assert list(buffer) == pairs and len(buffer) == len(pairs) and buffer.last == pairs[-1][0]
    assert [buffer.find_time(n + 1) for n in range(len(pairs))] == [time for time, _ in pairs]


@given(words=WORDS, now=st.integers(0, 20))
def test_arrived_words(words, now):
    buffer, pairs = fill(words)
    arrived = [word for time, word in pairs if time <= now]
    assert buffer.count_until(now, False) == len(arrived)
    plain = next((n for n, word in enumerate(arrived) if word >= CONTROL), len(arrived))
    assert buffer.count_until(now, True) == plain
    assert buffer.take(plain) == arrived[:plain] and list(buffer) == pairs[plain:] and len(buffer) == len(pairs) - plain
    rest = [buffer.pop() for _ in range(len(buffer))]
    assert rest == [word for _, word in pairs[plain:]]


@given(words=WORDS, count=st.integers(1, 12), ready=st.integers(0, 20))
def test_words_leave_at_one_a_cycle(words, count, ready):
    buffer, pairs = fill(words)
    expected, last = [], ready
    while pairs and len(expected) < count and pairs[0][1] < CONTROL:
        time, word = pairs.pop(0)
        last = max(time, last + 1)
        expected.append((last + 1, word))
    runs, sent, end = buffer.pop_paced(count, ready)
    assert [pair for time, run in runs for pair in enumerate(run, time)] == expected
    assert (sent, end) == (len(expected), last) and list(buffer) == pairs and len(buffer) == len(pairs)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_calls_run_in_the_order_of_a_heap(seed):
    events, seen = EventQueue(seed), []
    for number, time in enumerate([5, 2, 5, 0, 2, 9, 5]):
        events.at(time, lambda number=number: seen.append((events.now, number)))
    events.at(2, lambda: events.at(1, lambda: seen.append((events.now, "late"))))  # a past cycle: at once
    assert events.pending == 8
    events.run(limit=5)
    heap = [(time, number) for number, time in enumerate([5, 2, 5, 0, 2, 9, 5]) if time <= 5]
    heapq.heapify(heap)
    ordered = [heapq.heappop(heap) for _ in range(len(heap))]
    expected = [*ordered[:3], (2, "late"), *ordered[3:]]
    assert sorted(map(str, seen)) == sorted(map(str, expected)) and [time for time, _ in seen] == [0, 2, 2, 2, 5, 5, 5]
    assert seen == expected or seed is not None
    assert events.now == 5 and events.pending == 1


def test_a_run_stops_within_a_cycle_and_goes_on():
    events, seen, awaited = EventQueue(), [], {1}
    for number in range(4):
        events.at(3, lambda number=number: (seen.append(number), awaited.discard(number)))
    events.run(awaited=awaited)
    assert seen == [0, 1] and events.now == 3 and events.pending == 2
    events.run()
    assert seen == [0, 1, 2, 3] and events.pending == 0


def test_a_run_stops_when_nothing_is_awaited():
    events, awaited = EventQueue(), {1, 2}
    for number in (1, 2, 3):
        events.at(number, lambda number=number: awaited.discard(number))
    events.run(awaited=awaited)
    assert not awaited and events.now == 2 and events.pending == 1


def test_a_run_ends_when_the_last_pe_is_free():
    events = EventQueue()
    events.at(3, lambda: setattr(events, "end", 7))
    events.run(limit=5)
    assert events.now == 3  # the limit comes first
    events.run()
    assert events.now == 7


def test_the_collector_does_not_walk_through_the_words_of_a_run(monkeypatch):
    monkeypatch.setattr(pe_state, "FOUND_FROZEN", [])
    kept, collected, frozen = [], [], gc.get_freeze_count()
    gc.unfreeze()  # what the tests of this process hold
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
    try:
        with without_collection():
            kept += [[number] for number in range(200_000)]
            assert not gc.isenabled()
        kept += [[] for _ in range(10)]
        assert gc.isenabled() and not gc.get_freeze_count() and not collected
    finally:
        gc.callbacks.pop()
        if frozen:
            gc.freeze()


def test_frozen_objects_are_counted_once(monkeypatch):
    """The count walks through all of them, and runs are many."""
    counts = []
    monkeypatch.setattr(pe_state, "FOUND_FROZEN", [])
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(7) or 7)
    kept = []
    for _ in range(3):
        with without_collection():
            kept += [[number] for number in range(20_000)]
    assert len(counts) == 1
