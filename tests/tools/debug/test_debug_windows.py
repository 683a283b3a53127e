"""Regular accesses: what is proven apart is apart, and what is found does not depend on the proof."""

import itertools

import numpy as np
import pytest
from tiles import kernel

import tessera as ts
from conformance.tile.debug import counted, rings
from tessera.core.types import f32
from tessera.interp.sanitizer import disjointness
from tessera.interp.sanitizer import disjointness as debug_apart
from tessera.interp.sanitizer.report import Checks
from tessera.interp.sanitizer.shadow_memory import RaceDomain
from tessera.interp.tile import interpreter
from tessera.interp.tile.memory import BlockAccess, InstanceMemory
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic

MEMORY = InstanceMemory(np.zeros((64, 64), np.float32), "x")


def random_window(rng, steps):
    first, count = tuple(rng.integers(0, 3, 2).tolist()), tuple(rng.integers(1, 5, 2).tolist())
    lines = tuple((int(rng.integers(0, 9)), s, int(rng.integers(1, 5))) for s in steps)
    return disjointness.AffineAccess(
        None, "write", lines, first, count, None, 0, None, BlockAccess(MEMORY, [], (), ()), None, False
    )


def random_steps(rng):
    return [tuple(int(s) for s in rng.choice([0, 0, 1, 2, 4, 16, -3], 2)) for _ in range(2)]


def meet(one, other, domain, tile_axis):
    """Whether two instances that the domain tells apart touch one element, by trying all."""
    boxes = [itertools.product(*(range(f, f + c) for f, c in zip(w.first, w.count, strict=True))) for w in (one, other)]
    for i, j in itertools.product(*boxes):
        programs = [x[:tile_axis] if tile_axis is not None else x for x in (i, j)]
        told = programs[0] != programs[1] if domain.timeless else programs[0] == programs[1] and i != j
        starts = [
            [o + sum(s * c for s, c in zip(ss, x, strict=True)) for o, ss, _ in w.lines]
            for w, x in ((one, i), (other, j))
        ]
        lengths = [(a[2], b[2]) for a, b in zip(one.lines, other.lines, strict=True)]
        if told and all(-n < a - b < m for a, b, (n, m) in zip(*starts, lengths, strict=True)):
            return True
    return False


@pytest.mark.parametrize(
    ("domain", "tile_axis"),
    [
        (RaceDomain("program race", 1, True), None),
        (RaceDomain("program race", 4, True), 1),
        (RaceDomain("race", 1, False), 1),
    ],
)
def test_what_is_proven_apart_is_apart(domain, tile_axis, rng):
    proven = truly = 0
    for _ in range(1500):
        steps = random_steps(rng)
        one, other = random_window(rng, steps), random_window(rng, steps if rng.random() < 0.8 else random_steps(rng))
        apart, together = debug_apart.are_disjoint(domain, one, other, tile_axis), meet(one, other, domain, tile_axis)
        assert not (apart and together), (one.lines, other.lines, one.first, one.count, other.first, other.count)
        proven, truly = proven + apart, truly + (not together)
    assert proven > 0.7 * truly


def random_kernel(seed, group):
    """Loads, stores and copies of blocks at affine places, rarely outside or clipped, with barriers now and then."""
    rng = np.random.default_rng(seed)
    with kernel(group=group, x=((64,), f32)) as k:
        me, program = k.op(tile.local_id), k.op(tile.program_id)
        row = k.op(tile.alloc, shape=(32,), dtype=f32, space="shared")
        value = k.op(basic.full, shape=(2,), value=1.0, dtype=f32)
        if rng.random() < 0.5:
            k.op(tile.store, row, k.op(basic.full, shape=(32 // group,), value=0.5, dtype=f32), me * (32 // group))
            k.op(tile.barrier)
        for _ in range(8):
            memory, room = (k.refs["x"], 64) if rng.random() < 0.5 else (row, 32)
            by_tile, by_program = (int(rng.choice(c)) for c in ([0, 1, 2, 4], [0, 2, 8, 16]))
            start = me * by_tile + program * (by_program if room == 64 else 0) + int(rng.integers(0, 4))
            start = start + int(rng.choice([0, room - 4, -4], p=[0.92, 0.04, 0.04]))
            edge = str(rng.choice(["error", "clip"], p=[0.8, 0.2]))
            what = rng.choice(["store", "load", "copy", "wait"], p=[0.3, 0.3, 0.3, 0.1])
            if what == "store":
                k.op(tile.store, memory, value, start, edge=edge)
            elif what == "copy":
                own = me * by_tile + int(rng.integers(0, 4))
                sides = [(row, own), (memory, start)] if rng.random() < 0.5 else [(memory, start), (row, own)]
                (to, first), (source, other) = sides
                k.op(tile.async_copy, to, source, first, other, shape=(2,), edge=edge)
                k.op(tile.async_commit)
            elif what == "wait":
                k.op(tile.async_wait, pending=int(rng.integers(0, 2)))
            else:
                value = value + k.op(tile.load, memory, start, shape=(2,), edge=edge)
            if rng.random() < 0.4:
                k.op(tile.barrier)
    return k.module(2)


@pytest.mark.parametrize("group", [1, 4])
def test_findings_are_those_of_the_shadow(group, monkeypatch):
    kinds = set()
    for seed in range(60):
        module, reports = random_kernel(seed, group), []
        for longest in (disjointness.MAX_LOG, 0):
            monkeypatch.setattr(disjointness, "MAX_LOG", longest)
            checks = Checks(collect=True)
            interpreter.run(module, [np.zeros(64, np.float32)], debug=checks)  # a place outside is a finding, no error
            reports.append(
                {(f.kind, f.location, f.message if f.kind == "uninitialized" else "") for f in checks.report}
            )
            kinds |= set(checks.report.kinds)
        assert {f[0] for f in reports[0]} == {f[0] for f in reports[1]}, seed
    assert {"program race", "uninitialized", "async", "bounds", *(["race"] if group > 1 else [])} <= kinds


@pytest.mark.parametrize("name", [*rings.PAIRS, *counted.PAIRS])
def test_mbarriers_order_accesses_seen_as_a_whole_as_they_do_elements(name, monkeypatch):
    pair, found = {**rings.PAIRS, **counted.PAIRS}[name], []
    launch = ((1,), pair.group) if pair.group else pair.grid
    for longest in (disjointness.MAX_LOG, 0):
        monkeypatch.setattr(disjointness, "MAX_LOG", longest)
        found.append([ts.debug.check(k[launch], **pair.arguments()).kinds for k in (pair.broken, pair.repaired)])
    assert found[0] == found[1] and found[0][0] and not found[0][1]


@ts.kernel
def sums_of_neighbours(x, out):
    i, total = ts.tile.program_id(0), 0.0
    for k in ts.tile.range(0, 2):  # one op that reads elsewhere in each round
        total += out[i + k]
    x[i] = total
    out[i] = total


@ts.kernel
def own_sums(x, out):
    i, total = ts.tile.program_id(0), 0.0
    for k in ts.tile.range(0, 2):
        total += x[i + k]
    out[i] = total


def test_each_round_of_a_loop_has_accesses_of_its_own():
    arrays = np.ones(5, np.float32), np.ones(5, np.float32)
    (found,) = ts.debug.check(sums_of_neighbours[(4,)], *arrays)
    assert found.kind == "program race" and "total += out[i + k]" in str(found)
    assert not ts.debug.check(own_sums[(4,)], *arrays)
