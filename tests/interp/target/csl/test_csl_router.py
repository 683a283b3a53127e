"""Router: wavelets over routes to a recording PE: backpressure, switches, filters, swaps, teardown, faults."""

import pytest

from tessera.interp.target.csl.fabric.router_grid import QUEUE_DEPTH, Fabric
from tessera.interp.target.csl.fabric.routing import WEST, Opcode, encode_payload
from tessera.interp.target.csl.pe.pe_state import EventQueue
from tessera.interp.target.csl.sema.values import ColorConfig, FilterConfig, SwitchPosition
from tessera.interp.target.csl.text.diagnostics import CslFault

ADVANCE = encode_payload([(Opcode.SWITCH_ADV, True)])


class Recorder:
    """A PE that reads every word at once, unless it is closed."""

    def __init__(self, view):
        self.view, self.open, self.got, self.torn = view, True, [], []

    def receive_wavelet(self, color):
        while self.open and (head := self.view.peek(color)):
            word = self.view.pop_control(color) if head[1] else self.view.pop(color, 1)[0]
            self.got.append((self.view.node.fabric.events.now, color, word))

    def resume_senders(self, color):
        self.got.append("drained")

    def handle_teardown(self, color):
        self.torn.append(color)

    @property
    def words(self):
        return [item[2] for item in self.got if item != "drained"]


def grid(width, colors, height=1, seed=None, arch=""):
    fabric = Fabric(EventQueue(), width, height, colors, seed=seed, arch=arch)
    for (x, y), node in fabric.nodes.items():
        node.pe = Recorder(fabric.view(x, y))
    return fabric, [fabric.nodes[x, 0].pe for x in range(width)]


def line(width, **options):
    """Color 0 from PE 0 east to the last PE; the PEs between forward it and keep a copy."""
    ends = {0: ColorConfig(("RAMP",), ("EAST",)), width - 1: ColorConfig(("WEST",), ("RAMP",), **options)}
    middle = ColorConfig(("WEST",), ("RAMP", "EAST"), **options)
    return {(x, 0): {0: ends.get(x, middle)} for x in range(width)}


def test_one_word_per_cycle_and_one_cycle_per_hop():
    fabric, pes = grid(4, line(4))
    assert pes[0].view.push(0, [7, 8, 9]) == 3
    fabric.events.run()
    first = [pe.got[0][0] for pe in pes[1:]]
    assert [b - a for a, b in zip(first, first[1:], strict=False)] == [1, 1]
    assert first[0] == 3 + 4 == 3 + fabric.injection  # to the router, over the link, down the ramp
    assert [time - first[2] for time, _, _ in pes[3].got] == [0, 1, 2]
    assert all(pe.words == [7, 8, 9] for pe in pes[1:])
    assert fabric.nodes[1, 0].traffic == [0, 3, 0, 0, 3, 0]


@pytest.mark.parametrize(("arch", "hop"), [("wse2", 1), ("wse3", 2)])
@pytest.mark.parametrize("words", [[7], [7, 8, 9], [7, 1 << 32 | encode_payload([(Opcode.NOP, False)]), 9]])
def test_a_hop_takes_two_cycles_on_wse3(words, arch, hop):
    fabric, pes = grid(4, line(4), arch=arch)
    for pe in pes:
        pe.open = False
    assert pes[0].view.push(0, words) == len(words)
    fabric.events.run()
    near, far = ([time for time, _ in fabric.nodes[x, 0].get_input(0).words] for x in (1, 3))
    assert near and [b - a for a, b in zip(near, far, strict=True)] == [2 * hop] * len(words)


@pytest.mark.parametrize("closed", [False, True])
def test_a_burst_passes_a_clear_way_as_a_whole(closed):
    fabric, pes = grid(6, line(6))
    for x in range(1, 6 - closed):
        pes[x].view.await_stream(0, 64)
    pes[5].open = not closed
    assert pes[0].view.push(0, range(64)) == 64
    fabric.events.run()
    if closed:  # the last PE reads nothing: queue and routers hold what they have room for
        held = [len(queue.words) for queue in fabric.nodes[5, 0].inputs.values()]
        assert held == [fabric.depth] and fabric.describe_stuck()
    else:
        assert [word for word, _ in zip(pes[5].words, range(64), strict=True)] == list(range(64))
        assert fabric.events._count < 20  # bursts of eight words would make 67


def test_backpressure_stops_the_sender():
    fabric, pes = grid(2, line(2))
    pes[1].open = False
    assert pes[0].view.push(0, range(100)) == 100
    assert pes[0].view.push(0, [100]) == 0
    fabric.events.run()
    left = len(fabric.nodes[0, 0].outputs[0].words)
    assert left == 100 - 2 * fabric.depth - QUEUE_DEPTH  # a word on the ramp or in front of its router keeps its slot
    assert len(fabric.describe_stuck()) == 4
    pes[1].open = True
    pes[1].receive_wavelet(0)
    fabric.events.run()
    assert pes[1].words == list(range(100))
    assert pes[0].got == ["drained"]


@pytest.mark.parametrize("ring, want", [(False, [[], [1], [2], [3, 4, 5]]), (True, [[4], [1, 5], [2], [3]])])
def test_switches_advance_after_the_control_wavelet(ring, want):
    switches = tuple(SwitchPosition(tx=side) for side in ("WEST", "EAST", "SOUTH"))
    colors = {(x, y): {} for x in range(3) for y in range(3)}
    colors[1, 1] = {0: ColorConfig(("RAMP",), ("NORTH",), switches, ring=ring)}
    for place, side in (((1, 0), "SOUTH"), ((0, 1), "EAST"), ((2, 1), "WEST"), ((1, 2), "NORTH")):
        colors[place] = {0: ColorConfig((side,), ("RAMP",))}
    fabric, _ = grid(3, colors, 3)
    view = fabric.view(1, 1)
    for word in (1, 2, 3, 4, 5):
        view.push(0, [ADVANCE], control=True)
        view.push(0, [word])
        fabric.events.run()
    assert [fabric.nodes[p].pe.words for p in ((1, 0), (0, 1), (2, 1), (1, 2))] == want


def test_a_router_takes_no_words_from_a_side_that_its_switch_position_does_not():
    colors = line(3)
    colors[1, 0] = {0: ColorConfig(("RAMP",), ("EAST",), (SwitchPosition(rx="WEST"),))}
    fabric, pes = grid(3, colors)
    pes[0].view.push(0, range(30))
    fabric.events.run()
    assert not fabric.nodes[1, 0].channels[0].inputs[WEST].count
    assert len(fabric.nodes[0, 0].outputs[0].words) == 30 - QUEUE_DEPTH  # those that wait in the queue are all
    pes[1].view.push(0, [ADVANCE], control=True)
    fabric.events.run()
    assert pes[2].words == list(range(30))


def test_a_popped_command_reaches_only_one_router():
    switches = (SwitchPosition(tx="EAST"), SwitchPosition(rx="RAMP"))
    colors = line(4, switches=switches, pop_mode="pop_on_advance")
    fabric, pes = grid(4, colors)
    pes[0].view.push(0, [1, 2])
    pes[0].view.push(0, [ADVANCE, ADVANCE], control=True)
    fabric.events.run()
    pes[1].view.push(0, [3])  # PE 1 is at position 2 now: it sends, and does not receive its own word
    fabric.events.run()
    assert [pe.words for pe in pes[1:]] == [[1, 2], [1, 2, 3], [1, 2, 3]]


def test_filters():
    keep = FilterConfig("range", {"min_idx": 1, "max_idx": 2})
    fabric, pes = grid(3, line(3, filter=keep))
    pes[0].view.push(0, [i << 16 | 5 for i in range(4)])
    fabric.events.run()
    assert pes[1].words == pes[2].words == [1 << 16 | 5, 2 << 16 | 5]
    every = FilterConfig("counter", {"limit1": 2, "max_counter": 0, "count_data": 1}, init_counter=1)
    fabric, pes = grid(3, line(3, filter=every))
    pes[0].view.push(0, range(9))
    fabric.events.run()
    assert pes[2].words == [2, 5, 8]
    some = FilterConfig("sparse_counter", {"limit1": 1, "limit2": 3, "max_counter": 0, "count_data": 1})
    fabric, pes = grid(3, line(3, filter=some))
    pes[0].view.push(0, range(9))
    fabric.events.run()
    assert pes[2].words == [0, 2, 6, 7, 8]  # one of two, one of four, then all
    more = {"limit1": 1, "limit2": 3, "limit3": 2, "max_counter": 0, "count_data": 1}
    fabric, pes = grid(3, line(3, filter=FilterConfig("sparse_counter", more)))
    pes[0].view.push(0, range(12))
    fabric.events.run()
    assert pes[2].words == [0, 2, 6, 9, 10, 11]


def test_a_swap_changes_the_color_on_each_hop():
    ends = {0: (("RAMP",), ("EAST",)), 2: (("WEST",), ("RAMP",))}
    each = [ColorConfig(*ends.get(x, (("WEST",), ("RAMP", "EAST"))), swap_x=True) for x in range(3)]
    fabric, pes = grid(3, {(x, 0): {0: each[x], 1: each[x]} for x in range(3)})
    pes[0].view.push(0, [5])
    fabric.events.run()
    assert [color for _, color, _ in pes[1].got + pes[2].got] == [1, 0]


def test_teardown_blocks_the_color_until_its_exit():
    fabric, pes = grid(3, line(3))
    pes[0].view.push(0, [encode_payload([(Opcode.TEARDOWN, True)])], control=True)
    pes[0].view.push(0, [4])
    fabric.events.run()
    assert [pe.torn for pe in pes] == [[0]] * 3
    assert not pes[2].words
    assert fabric.view(1, 0).teardown_pending() == {0}
    fabric.view(1, 0).reset_routes(0, ("WEST",), ("RAMP",))
    for x in range(3):
        fabric.view(x, 0).teardown_exit(0)
    fabric.events.run()
    assert [pe.words for pe in pes] == [[], [4], []]


def test_a_route_with_two_inputs_accepts_both():
    colors = {
        (0, 0): {0: ColorConfig(("RAMP",), ("EAST",))},
        (1, 0): {0: ColorConfig(("WEST", "EAST"), ("RAMP",))},
        (2, 0): {0: ColorConfig(("RAMP",), ("WEST",))},
    }
    fabric, pes = grid(3, colors)
    pes[0].view.push(0, [1, 2])
    fabric.events.run()
    pes[2].view.push(0, [3])
    fabric.events.run()
    assert pes[1].words == [1, 2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_jitter_keeps_the_order(seed):
    fabric, pes = grid(5, line(5), seed=seed)
    pes[0].view.push(0, range(50))
    fabric.events.run()
    assert pes[4].words == list(range(50))


@pytest.mark.parametrize(
    "colors, message",
    [
        ({(0, 0): {0: ColorConfig(("RAMP",), ("EAST",))}}, "PE \\(1, 0\\), which has no route for that color"),
        (
            {(0, 0): {0: ColorConfig(("WEST",), ("RAMP",))}},
            "from RAMP into PE \\(0, 0\\), whose route takes it from WEST",
        ),
    ],
)
def test_faults(colors, message):
    fabric, pes = grid(2, colors)
    with pytest.raises(CslFault, match=message):
        pes[0].view.push(0, [1])
        fabric.events.run()


def test_wavelets_that_leave_the_rectangle_are_lost_and_reported():
    fabric, pes = grid(2, {(0, 0): {0: ColorConfig(("RAMP",), ("WEST",))}})
    pes[0].view.push(0, [1, 2])
    fabric.events.run()
    assert fabric.describe_stuck() == ["PE (0, 0): 2 wavelet(s) of color 0 left the rectangle and are lost"]
