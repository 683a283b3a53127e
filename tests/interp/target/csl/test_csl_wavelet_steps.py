"""Single steps of wavelets: into the arguments and the order of tasks, out of memory, through queues."""

from types import SimpleNamespace

import numpy as np
import pytest

from tessera.interp.target.csl.fabric.output_queue import OutputQueue
from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, RAMP, WEST
from tessera.interp.target.csl.pe import scheduler
from tessera.interp.target.csl.pe.dsd_operations import count_cycles
from tessera.interp.target.csl.pe.dsd_table import DSD_OPS
from tessera.interp.target.csl.pe.microthreads import stream_operation
from tessera.interp.target.csl.pe.pe_state import EventQueue, PeState, unpack_arguments
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ColorConfig, Fabout, Mem1d, Mem4d


def test_arguments_of_a_task_are_the_halves_of_a_word():
    assert unpack_arguments((t.U16, t.I16), 0xFFFE0007) == (7, -2)
    assert unpack_arguments((t.U32,), 0xFFFE0007) == (0xFFFE0007,)
    assert unpack_arguments((t.F32,), 0x3FC00000) == (np.float32(1.5),)
    assert unpack_arguments((t.F16, t.U16), 0x00013E00) == (np.float16(1.5), 1)


@pytest.mark.parametrize(("wide", "high", "first"), [(1, 2, 5), (0, 5, 5), (1, 5, 8), (1, 8, 8)])
def test_the_priority_of_a_wavelets_task_is_that_of_its_queue_on_wse3(wide, high, first):
    pe = PeState(
        SimpleNamespace(
            unit=SimpleNamespace(options=SimpleNamespace(arch="wse3" if wide else "wse2", late=False)),
            memory_used=0,
            tables=SimpleNamespace(fifos=[], queues_in={2: 5}, queues_out={}, tasks={}, activated=[], blocked=[]),
        ),
        0,
        0,
        EventQueue(),
    )
    pe.high_priority.add(high)
    queue = SimpleNamespace(words=SimpleNamespace(runs=[(0, [7])]))
    pe.data[5], pe.ready_colors[5] = SimpleNamespace(number=5), None
    ready = [(8, scheduler._take_active_task, 8), scheduler._find_wavelet_task(pe, 5, queue)]
    assert scheduler._select_ready(pe, ready) is ready[first == 5]


@pytest.mark.parametrize(("wide", "cycles"), [(0, 3), (1, 2)])
def test_a_vector_leaves_memory_in_whole_cycles(wide, cycles):
    sent = []
    fabric = SimpleNamespace(push=lambda color, words: sent.extend(words) or len(words), is_settled=lambda color: True)
    fabric.find_written = lambda color: 0
    pe = SimpleNamespace(wide=wide, fabric=fabric, events=SimpleNamespace(now=10))
    source = Mem1d(np.arange(8, dtype=np.float32), 4, 1, 5)
    steps = stream_operation(pe, DSD_OPS["fmovs"], (Fabout(0, 5, 0), source), {})
    assert list(steps) == [10 + cycles]
    assert np.array(sent, np.uint32).view(np.float32).tolist() == [1, 2, 3, 4, 5]


def test_words_that_arrive_together_follow_one_another():
    fabric = Fabric(EventQueue(), 1, 1, {(0, 0): {0: ColorConfig(("WEST",), ("RAMP",))}})
    channel = fabric.nodes[0, 0].channels[0]
    channel.extend(WEST, [(5, [1, 2])], 2)
    channel.extend(WEST, [(4, [3]), (9, [4])], 2)
    assert list(channel.inputs[WEST]) == [(5, 1), (6, 2), (7, 3), (9, 4)]


def test_an_output_queue_counts_the_words_with_flags():
    fabric = Fabric(EventQueue(), 1, 1, {(0, 0): {0: ColorConfig(("RAMP",), ("RAMP",))}})
    queue = fabric.nodes[0, 0].get_output(0)
    queue.offer([1, CONTROL_FLAG | 2, 3])
    assert queue.marked == 0 and not queue.words
    words = [word for _, word in fabric.nodes[0, 0].channels[0].inputs[RAMP]]
    assert words == [1, CONTROL_FLAG | 2, 3] and fabric.nodes[0, 0].channels[0].marked == 1


@pytest.mark.parametrize(("number", "cycles"), [(2, [1, 2, 3, 4, 5, 6]), (4, [1, 2, 6, 7, 11, 12])])
def test_a_queue_of_two_words_sends_two_words_in_five_cycles(number, cycles):
    """Published counts: a vector takes 2.5 cycles a word through a queue of 2 words, and 1 through one of 6."""
    colors = {(0, 0): {0: ColorConfig(("RAMP",), ("EAST",))}, (1, 0): {0: ColorConfig(("WEST",), ("RAMP",))}}
    fabric = Fabric(EventQueue(), 2, 1, colors, arch="wse2")
    for node in fabric.nodes.values():
        node.pe = SimpleNamespace(receive_wavelet=lambda color: None, resume_senders=lambda color: None)
    view, queue = fabric.view(0, 0), fabric.nodes[1, 0].get_input(0)
    view.use_queue(0, number)
    assert view.push(0, [1, 2, 3, 4, 5, 6]) == 6 and view.is_settled(0) == (number == 2)
    fabric.events.run()
    arrivals = queue.list_arrivals(6)
    assert [time - arrivals[0] + 1 for time in arrivals] == cycles
    assert view.is_settled(0) and view.push(0, [7]) == 1


def test_a_send_ends_when_its_last_word_has_a_place_in_the_queue():
    fabric = Fabric(EventQueue(), 1, 1, {(0, 0): {0: ColorConfig(("RAMP",), ("RAMP",))}})
    view = fabric.view(0, 0)
    fabric.nodes[0, 0].get_input(0).await_stream(100, True)
    assert view.push(0, list(range(100))) == 100 and view.is_settled(0)
    assert view.find_written(0) == 100 - fabric.nodes[0, 0].get_output(0).depth


# Cycles of an iteration on WSE-3 by the side of its square tiles (Jorineg/cerebras, radius 1): two products, four sums.
TILES = {4: 131, 8: 356, 20: 1788, 40: 6748, 64: 16924}


@pytest.mark.parametrize("side", [8, 20, 40, 64])
def test_tensors_take_the_cycles_that_a_stencil_recorded(side):
    def count(side):
        tile = Mem4d(np.zeros(side * side, np.float32), 0, (side, 1), (side, side))
        sums, products = (
            count_cycles(DSD_OPS[name], (tile, tile, by), 1) for name, by in (("fadds", tile), ("fmuls", 2.0))
        )
        return 4 * sums + 2 * products

    before = list(TILES)[list(TILES).index(side) - 1]
    assert count(side) - count(before) == pytest.approx(TILES[side] - TILES[before], rel=0.01)


def test_tensors_of_wse2_take_a_cycle_for_an_element():
    tile = Mem4d(np.zeros(64, np.float32), 0, (8, 1), (6, 6))
    assert count_cycles(DSD_OPS["fadds"], (tile, tile, tile), 0) == 1 + 36


PACED = 9  # cycles to the router, more than a queue of WSE-3 has slots


def send_through_a_paced_queue(
    count: int, reads: list[tuple[int, int]], controls: tuple[int, ...] = (), beside: tuple[int, int] = (25, 3),
    delay: int = 0,
) -> tuple[list[tuple[int, int]], list[int], int, list[int]]:  # fmt: skip
    """Two colors of a PE of WSE-3 send, the second from a cycle, in a call that was added `delay` cycles before.

    The receiver reads `(cycle, words)`: the arrivals that it saw, and those of words that it left. `controls` are the
    places of control wavelets; the other color sends `beside` `(cycle, words)`.
    """
    east = {n: ColorConfig(("RAMP",), ("EAST",)) for n in (0, 1)}
    ends = {n: ColorConfig(("WEST",), ("RAMP",)) for n in (0, 1)}
    fabric = Fabric(EventQueue(), 2, 1, {(0, 0): east, (1, 0): ends}, arch="wse3")
    fabric.injection = PACED
    for node in fabric.nodes.values():
        node.pe = SimpleNamespace(receive_wavelet=lambda color: None, resume_senders=lambda color: None)
    view, queue, seen = fabric.view(0, 0), fabric.nodes[1, 0].get_input(0), []
    for time, words in reads:
        fabric.events.at(
            time,
            lambda words=words: seen.extend((fabric.events.now, word) for word in queue.take(fabric.events.now, words)),
        )
    sent = [n | CONTROL_FLAG if n in controls else n for n in range(count)]
    fabric.events.at(0, lambda: view.push(0, sent))
    push = lambda: view.push(1, list(range(beside[1])))  # noqa: E731
    fabric.events.at(beside[0] - delay, lambda: fabric.events.at(beside[0], push))
    fabric.events.run()
    left = [time for time, _ in fabric.nodes[1, 0].get_input(1).words]
    return seen, fabric.nodes[0, 0].links, fabric.nodes[0, 0].ramp, left


@pytest.mark.parametrize("reads", [[(200, 40)], [(t, 1) for t in range(12, 300, 3)], [(90, 5), (120, 9), (400, 40)]])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
def test_a_retry_of_a_paced_queue_equals_the_general_step(count, reads, monkeypatch):
    quick = send_through_a_paced_queue(count, reads)
    monkeypatch.setattr(OutputQueue, "_send_next", lambda self, now: False)
    assert quick == send_through_a_paced_queue(count, reads)
    assert quick[0]


@pytest.mark.parametrize(("controls", "beside"), [((8,), (25, 3)), ((1,), (8, 3)), ((), (12, 1)), ((), (8, 9))])
def test_a_retry_behind_words_that_a_run_does_not_hold_equals_the_general_step(controls, beside, monkeypatch):
    reads = [(t, 1) for t in range(12, 300, 3)]
    monkeypatch.setattr(OutputQueue, "_send_ahead", lambda self, now: False)
    quick = send_through_a_paced_queue(30, reads, controls, beside)
    monkeypatch.setattr(OutputQueue, "_send_next", lambda self, now: False)
    assert quick == send_through_a_paced_queue(30, reads, controls, beside)


def test_the_quick_retry_is_used(monkeypatch):
    calls, step = [], OutputQueue._send_next
    monkeypatch.setattr(OutputQueue, "_send_ahead", lambda self, now: False)
    monkeypatch.setattr(OutputQueue, "_send_next", lambda self, now: calls.append(step(self, now)) or calls[-1])
    send_through_a_paced_queue(30, [(200, 40)])
    assert calls.count(True) > 8


@pytest.mark.parametrize("delay", [0, 9])
def test_words_sent_ahead_are_retracted_for_another_color(delay, monkeypatch):
    counts, step = [], OutputQueue._send_ahead
    for second in range(8, 44):
        with monkeypatch.context() as patch:
            patch.setattr(OutputQueue, "_send_ahead", lambda self, now: False)
            expected = send_through_a_paced_queue(40, [(200, 40)], (), (second, 3), delay)
            patch.setattr(OutputQueue, "_send_ahead", lambda self, now: counts.append(step(self, now)) or counts[-1])
            assert send_through_a_paced_queue(40, [(200, 40)], (), (second, 3), delay) == expected
    assert sum(map(bool, counts)) > 20


def send_one_color(limit: int | None = None, early: int | None = None) -> list[object]:
    """A PE of WSE-3 sends 30 words; its router looks for words in the cycle `early`. What happens until the limit."""
    colors = {(0, 0): {0: ColorConfig(("RAMP",), ("EAST",))}, (1, 0): {0: ColorConfig(("WEST",), ("RAMP",))}}
    fabric = Fabric(EventQueue(), 2, 1, colors, arch="wse3")
    fabric.injection = PACED
    told, queue = [], fabric.nodes[1, 0].get_input(0)
    for node in fabric.nodes.values():
        node.pe = SimpleNamespace(
            receive_wavelet=lambda color: told.append((fabric.events.now, queue.take(fabric.events.now, 99))),
            resume_senders=lambda color: told.append((fabric.events.now, color)),
        )
    fabric.events.at(0, lambda: fabric.view(0, 0).push(0, list(range(30))))
    if early is not None:
        fabric.events.at(early, lambda: fabric.nodes[0, 0].channels[0].wake(early))
    fabric.events.run(limit=limit)
    return [*told, *fabric.describe_stuck()]


@pytest.mark.parametrize("name", ["limit", "early"])
def test_nobody_sees_words_of_later_cycles(name, monkeypatch):
    for cycle in range(8, 60):
        with monkeypatch.context() as patch:
            patch.setattr(OutputQueue, "_send_ahead", lambda self, now: False)
            expected = send_one_color(**{name: cycle})
        assert send_one_color(**{name: cycle}) == expected


@pytest.mark.parametrize("runs", [[(3, [7])], [(3, [7, 8])], [(3, [7]), (6, [8, 9])]])
def test_a_task_takes_its_word_as_other_readers_do(runs):
    left = []
    for take in (lambda queue: queue.take(5, 1), lambda queue: [queue.take_first(5)]):
        queue = Fabric(EventQueue(), 1, 1, {}).nodes[0, 0].get_input(0)
        queue.await_stream(3, False)
        queue.extend(RAMP, list(runs), sum(len(words) for _, words in runs))
        left.append((take(queue), list(queue.words), queue.words.count, queue.words.limit))
    assert left[0] == left[1]
