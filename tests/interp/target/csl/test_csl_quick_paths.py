"""The short paths of frequent events equal the general ones: on random programs, routers, queues and vectors."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from csl_random_generators import compiled, dsd_pipelines, observe, switched_routes, task_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.interp.target.csl.compiler import compile_program
from tessera.interp.target.csl.fabric.output_queue import OutputQueue
from tessera.interp.target.csl.fabric.queues import InputQueue
from tessera.interp.target.csl.fabric.router import RouterChannel
from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, RAMP, WEST
from tessera.interp.target.csl.pe import dsd_operations, program, scheduler
from tessera.interp.target.csl.pe.dsd_operations import compute, forget_views
from tessera.interp.target.csl.pe.dsd_table import DSD_OPS
from tessera.interp.target.csl.pe.pe_state import EventQueue
from tessera.interp.target.csl.sema.values import ColorConfig, Mem1d
from tessera.interp.target.csl.simulation import Simulation

SEARCH = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
LINES = Path(__file__).parent / "programs" / "lines" / "layout.csl"
PROGRAMS = {"tasks": task_graphs(), "routes": switched_routes(), "vectors": dsd_pipelines()}


def receive_and_select(pe, color):
    """`receive_wavelet` that lets the PE look for a task at each arrival."""
    pe.ready_colors[color] = None
    waiting = pe.waiters.pop(("in", color), None)
    scheduler.resume_at_once(pe, waiting)
    if not waiting or color in pe.data or pe.fabric.get_queue(color).controls:
        scheduler.wake(pe)


def use_general_paths(patch):
    patch.setattr(
        RouterChannel, "append", lambda self, buffer, run, count: self.extend(self.inputs.index(buffer), [run], count)
    )
    patch.setattr(InputQueue, "append", lambda self, words, run, count: self.extend(RAMP, [run], count))
    pass_on = OutputQueue._pass_on
    patch.setattr(OutputQueue, "_pass_on", lambda self, words, marked: not marked and pass_on(self, words, 0))
    patch.setattr(RouterChannel, "_is_blocked", lambda self, buffer: False)
    patch.setattr(RouterChannel, "_relay", lambda self, origin, now: False)
    patch.setattr("tessera.interp.target.csl.pe.processing_element.Pe.receive_wavelet", receive_and_select)
    patch.setattr(OutputQueue, "offer_command", lambda self, word: bool(self.offer([word])))
    patch.setattr(InputQueue, "relay", property(lambda self: None, lambda self, relay: None))
    patch.setattr(dsd_operations, "_accumulate_product", lambda op, operands: None)
    patch.setitem(program.NAMES, "accumulate_products", lambda *_: False)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_random_programs_take_the_same_cycles(kind, tmp_path):
    @SEARCH
    @given(
        program=PROGRAMS[kind], arch=st.sampled_from(["wse2", "wse3"]), seed=st.sampled_from([None, None, 1]),
        lockstep=st.booleans(),
    )  # fmt: skip
    def search(program, arch, seed, lockstep):
        layout = compiled(tmp_path, program, arch)
        quick = observe(layout, seed, lockstep)
        with pytest.MonkeyPatch.context() as patch:
            use_general_paths(patch)
            general = observe(layout, seed, lockstep)
        assert quick == general

    search()


def run_collectives(layout, seed: int | None, lockstep: bool) -> tuple:
    """The cycles, tasks, memory and traffic of each collective operation on both axes, with two roots."""
    run, rng = Simulation(layout, seed, lockstep=lockstep), np.random.default_rng(0)
    run.boot()
    shape = (len(run.pes), run.pes[0, 0].get_variable("send").size)
    run.copy_in("send", dict(zip(run.pes, rng.random(shape, np.float32), strict=True)))
    for axis, kind, root in product(("row", "column"), range(4), (0, 2)):
        run.launch(axis, kind, root)
    got = dict(zip(run.pes, np.zeros(shape, np.float32), strict=True))
    run.wait(run.copy_out("receive", got))
    traffic = [(node.traffic, node.links) for node in run.fabric.nodes.values()]
    return run.cycles, sorted(run.timeline), [row.tolist() for row in got.values()], traffic


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("count", [1, 5, 8, 19])
@pytest.mark.parametrize("arch", ["wse2", "wse3"])
def test_collective_operations_take_the_same_cycles(arch, count, seed):
    """Bursts that find room at once, commands that wait for it behind 8 words, and bursts longer than a queue."""
    params = {"width": 5, "height": 5, "n": count}
    layout = compile_program(str(LINES), params=params, arch=arch, fabric_dims=(12, 7), fabric_offsets=(4, 1))
    quick = [run_collectives(layout, seed, lockstep) for lockstep in (True, False)]
    with pytest.MonkeyPatch.context() as patch:
        use_general_paths(patch)
        assert run_collectives(layout, seed, True) == quick[0]
    assert quick[0] == quick[1]


def watch_bursts(depth: int, reads: list[tuple[int, int]]) -> tuple[list, list, list]:
    """Bursts and a control word go through two routers to a reader and to one that never reads."""
    colors = {
        (0, 0): {0: ColorConfig(("RAMP",), ("EAST",))},
        (1, 0): {0: ColorConfig(("WEST",), ("RAMP", "EAST"))},
        (2, 0): {0: ColorConfig(("WEST",), ("RAMP",))},
    }
    fabric = Fabric(EventQueue(), 3, 1, colors, depth=depth, arch="wse3")
    seen, told = [], []
    for place, node in fabric.nodes.items():
        told_at = lambda color, place=place: told.append((place, fabric.events.now))  # noqa: E731
        node.pe = SimpleNamespace(receive_wavelet=told_at, resume_senders=told_at)
    near, far = (fabric.nodes[x, 0].get_input(0) for x in (1, 2))
    far.await_stream(60, True)
    for time, count in reads:
        fabric.events.at(
            time, lambda count=count: seen.append((fabric.events.now, near.take(fabric.events.now, count)))
        )
    view = fabric.view(0, 0)
    for time in (0, 3, 40, 90):
        fabric.events.at(time, lambda time=time: seen.append(view.push(0, list(range(time, time + 11)))))
    fabric.events.at(140, lambda: view.push(0, [5, CONTROL_FLAG | 31 << 16, 6]))
    fabric.events.run()
    return seen, sorted(told), [node.links for node in fabric.nodes.values()] + [list(far.words)]


@pytest.mark.parametrize("reads", [[(t, 3) for t in range(10, 400, 7)], [(60, 40), (61, 1), (300, 40)], [(500, 99)]])
@pytest.mark.parametrize("depth", [2, 8])
def test_bursts_that_find_little_room_arrive_at_the_same_cycles(depth, reads):
    quick = watch_bursts(depth, reads)
    with pytest.MonkeyPatch.context() as patch:
        use_general_paths(patch)
        assert watch_bursts(depth, reads) == quick
    assert quick[0] and quick[2][-1]


def test_a_run_that_comes_early_waits_for_the_words_before_it():
    fabric = Fabric(EventQueue(), 1, 1, {(0, 0): {0: ColorConfig(("WEST",), ("RAMP",))}})
    channel, queue = fabric.nodes[0, 0].channels[0], fabric.nodes[0, 0].get_input(0)
    for target, words in ((channel, channel.inputs[WEST]), (queue, queue.words)):
        target.append(words, (5, [1, 2]), 2)
        target.append(words, (4, [3]), 1)
    assert list(channel.inputs[WEST]) == [(5, 1), (6, 2), (7, 3)]
    assert [word for _, word in queue.words] == [1, 2, 3]


@pytest.mark.parametrize(("needed", "runs", "told"), [
    (3, [(5, [1, 2]), (9, [3, 4, 5])], [9]), (4, [(5, [1, 2]), (9, [3, 4, 5])], [10]), (2, [(5, [1, 2])], [6]),
    (9, [(5, [1, 2, 3, 4, 5, 6]), (20, [7, 8, 9])], [21]), (1, [(5, [1]), (7, [2])], [5]),
])  # fmt: skip
@pytest.mark.parametrize("busy", [False, True])
def test_a_queue_tells_of_the_last_word_that_its_reader_needs(needed, runs, told, busy):
    """A reader that needs more words than the queue holds is told at the last one that fits: 8 of 9."""
    fabric, seen = Fabric(EventQueue(), 1, 1, {(0, 0): {0: ColorConfig(("WEST",), ("RAMP",))}}), []
    fabric.nodes[0, 0].pe = SimpleNamespace(receive_wavelet=lambda color: seen.append(fabric.events.now))
    queue = fabric.nodes[0, 0].get_input(0)
    for time in range(30 * busy):  # cycles that have calls take a short path
        fabric.events.at(time, lambda: None)
    queue.want(needed)
    for run in runs:
        queue.append(queue.words, run, len(run[1]))
    fabric.events.run()
    assert seen == told


def test_a_vector_accumulates_a_product_like_its_elements(monkeypatch):
    op, rng, found, step_at_once = DSD_OPS["fmacs"], np.random.default_rng(3), [], dsd_operations._accumulate_product
    monkeypatch.setattr(
        dsd_operations, "_accumulate_product", lambda *given: found.append(step_at_once(*given)) or found[-1]
    )
    number = np.float32(0.3)
    for _ in range(200):
        memory = [rng.random(12, np.float32) for _ in range(2)]
        expected = [m.copy() for m in memory]
        count, places = int(rng.integers(0, 5)), []
        for _ in range(2):
            stride = int(rng.choice([1, 2, -1, 0]))
            places.append((int(rng.integers(0, 2)), int(rng.integers(4, 8)) if stride < 0 else 1, stride))
        dest, factor = (Mem1d(memory[v], 4 * first, stride, count) for v, first, stride in places)
        compute(SimpleNamespace(wide=1, clock=0), op, (dest, dest, factor, number))
        (v, first, stride), (other, begin, step) = places
        for i in range(count):
            expected[v][first + i * stride] += number * expected[other][begin + i * step]
        assert all(np.array_equal(m, e) for m, e in zip(memory, expected, strict=True)), (places, count)
    assert 20 < sum(length is not None for length in found) < 150
    forget_views()
