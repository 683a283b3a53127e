"""Tail duplication: nodes after a divergent branch move into its sides, up to the last arrival or group op."""

import numpy as np

import tessera as ts
from tessera import tile
from tessera.lower.passes.tail_duplication import duplicate_tails
from tessera.ops.dialects import control_flow, mbarrier
from tessera.runtime.program import prepare


@ts.kernel
def behind(x, out):
    me = tile.local_id()
    done = tile.mbarrier(1, 4)
    tile.barrier()
    if me > 0:
        done[me - 1].wait(0)
    value = x[me] * 2.0
    done[me].arrive()
    out[me] = value


@ts.kernel
def alike(x, out):
    me, done = tile.local_id(), tile.mbarrier(4)
    for k in tile.range(0, 3):
        if k > 0:
            done.wait((k - 1) % 2)
        done.arrive()
    out[me] = x[me]


@ts.kernel
def parted(x, out):
    me, done = tile.local_id(), tile.mbarrier(4)
    tile.barrier()
    done.arrive()
    if me > 1:
        done.wait(0)
    tile.barrier()
    done.arrive()
    out[me] = x[me]


@ts.kernel
def in_a_row(x, out):
    me, done = tile.local_id(), tile.mbarrier(1, 4)
    tile.barrier()
    value = x[me]
    if me == 1:
        done[0].wait(0)
        value = 3.0
    if value == 3.0:
        done[1].wait(0)
    done[me].arrive()
    out[me] = value


def moved(entry):
    given = {"x": np.ones(4, "f4"), "out": np.zeros(4, "f4")}
    (function,) = prepare(entry, given, group=4).levels["tile"].functions[1:]
    return function, duplicate_tails(function)


def test_both_sides_hold_the_same_nodes_and_hand_on_what_is_used_later():
    function, after = moved(behind)
    (branch,) = (n for n in after.body.nodes if n.op is control_flow.if_)
    assert after.body is duplicate_tails(function).body is not function.body
    arrivals = [[n for n in side.nodes if n.op is mbarrier.mbarrier_arrive] for side in branch.regions]
    assert arrivals[0] == arrivals[1] and len(arrivals[0]) == 1
    assert mbarrier.mbarrier_arrive not in {n.op for n in after.body.nodes}
    assert branch.results and any(branch.results[0] in n.args for n in after.body.nodes)


def test_several_in_a_row_are_not_multiplied():
    function, after = moved(in_a_row)
    (branch,) = (n for n in after.body.nodes if n.op is control_flow.if_)
    assert branch.attrs["apart"] and len(list(after.body.walk())) < 8 + len(list(function.body.walk()))


def test_left_as_they_are():
    for entry in (alike, parted):
        function, after = moved(entry)
        assert after is function
