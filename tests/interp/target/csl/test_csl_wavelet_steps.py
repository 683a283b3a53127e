"""Single steps of wavelets: into the arguments and the order of tasks, out of memory, through queues."""

from types import SimpleNamespace

import numpy as np
import pytest

from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, RAMP, WEST
from tessera.interp.target.csl.pe import scheduler
from tessera.interp.target.csl.pe.dsd_operations import DSD_OPS
from tessera.interp.target.csl.pe.microthreads import stream_operation
from tessera.interp.target.csl.pe.pe_state import EventQueue, unpack_arguments
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ColorConfig, Fabout, Mem1d


def test_arguments_of_a_task_are_the_halves_of_a_word():
    assert unpack_arguments((t.U16, t.I16), 0xFFFE0007) == (7, -2)
    assert unpack_arguments((t.U32,), 0xFFFE0007) == (0xFFFE0007,)
    assert unpack_arguments((t.F32,), 0x3FC00000) == (np.float32(1.5),)
    assert unpack_arguments((t.F16, t.U16), 0x00013E00) == (np.float16(1.5), 1)


@pytest.mark.parametrize(("wide", "high", "first"), [(1, 2, 5), (0, 5, 5), (1, 5, 8), (1, 8, 8)])
def test_the_priority_of_a_wavelets_task_is_that_of_its_queue_on_wse3(wide, high, first):
    pe = SimpleNamespace(wide=wide, in_colors={2: 5}, high_priority={high}, overtaken={}, events=EventQueue())
    ready = [(8, scheduler._take_active_task, 8), (5, scheduler._take_data_task, 5)]
    assert scheduler._select_ready(pe, ready)[2] == first


@pytest.mark.parametrize(("wide", "cycles"), [(0, 3), (1, 2)])
def test_a_vector_leaves_memory_in_whole_cycles(wide, cycles):
    sent = []
    fabric = SimpleNamespace(push=lambda color, words: sent.extend(words) or len(words), is_settled=lambda color: True)
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
