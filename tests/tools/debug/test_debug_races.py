"""Races found are those that there are: against a list of all accesses, each compared with each."""

import itertools

import numpy as np
import pytest
from tiles import kernel

import tessera as ts
from tessera.core.errors import RaceError
from tessera.core.types import f32, int64
from tessera.interp.sanitizer import op_checks as debug
from tessera.interp.tile import interpreter
from tessera.ir.rules import REGISTRY
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.tools.debug import Checks

TILES, CELLS, STEPS = 4, 6, 5


def random_program(seed):
    """Steps of (op, cell of each tile, barrier after it); a tile whose cell is -1 is masked off."""
    rng = np.random.default_rng(seed)
    ops = rng.choice(["load", "store", "atomic"], STEPS, p=[0.5, 0.3, 0.2])
    cells = np.stack([rng.permutation(CELLS)[:TILES] for _ in range(STEPS)])
    cells[rng.random(cells.shape) < 0.3] = -1
    return list(zip(ops, cells, rng.random(STEPS) < 0.6, strict=True))


def races(steps):
    """Whether two tiles meet at a cell in one epoch, at least one writing and not both by atomics."""
    accesses, epoch = [], 0
    for op, cells, barrier in steps:
        accesses += [(cell, epoch, me, op) for me, cell in enumerate(cells) if cell >= 0]
        epoch += barrier
    pairs = itertools.combinations(accesses, 2)
    meeting = ({a[3], b[3]} for a, b in pairs if a[:2] == b[:2] and a[2] != b[2])
    return any(kinds not in ({"load"}, {"atomic"}) for kinds in meeting)


def build(steps):
    with kernel(group=TILES, cells=((STEPS, TILES), int64), out=((TILES,), f32)) as k:
        me = k.op(tile.local_id)
        shared = k.op(tile.alloc, shape=(CELLS,), dtype=f32, space="shared")
        for number in range(CELLS):  # every tile writes the same: one write (M6)
            k.op(tile.scatter, shared, k.op(basic.full, shape=(), value=0.0, dtype=f32), k.index(number))
        k.op(tile.barrier)
        total = k.op(basic.cast, me, dtype=f32)
        for number, (op, _, barrier) in enumerate(steps):
            cell = k.op(tile.gather, k.refs["cells"], k.index(number), me)
            if op == "load":
                total = total + k.op(tile.gather, shared, cell, cell >= 0)
            elif op == "store":
                k.op(tile.scatter, shared, total, cell, cell >= 0)
            else:
                k.op(tile.atomic, shared, total, cell, cell >= 0, kind="add")
            if barrier:
                k.op(tile.barrier)
    return k.module(2)


@pytest.mark.parametrize("seeds", [range(n, n + 30) for n in range(0, 120, 30)], ids=str)
def test_found_exactly_where_they_are(seeds):
    verdicts = set()
    for seed in seeds:
        steps, checks = random_program(seed), Checks(collect=True)
        cells = np.stack([c for _, c, _ in steps]).astype(np.int64)
        interpreter.run(build(steps), [cells, np.zeros(TILES, np.float32)], debug=checks)
        assert ("race" in checks.report.kinds) == races(steps), f"seed {seed}: {checks.report}"
        verdicts.add(races(steps))
    assert verdicts == {True, False}


@ts.kernel
def shift(x):
    i = ts.tile.program_id(0)
    x[i] = x[i + 1]


@pytest.mark.parametrize("chunk", [8, 64, 1 << 20])
def test_chunks_of_the_grid_do_not_hide_races(chunk, monkeypatch):
    monkeypatch.setattr(interpreter, "CHUNK_BYTES", chunk)
    assert ts.debug.check(shift[(40,)], np.zeros(41, np.float32)).kinds == ["program race"]


def test_both_lines_are_shown():
    with pytest.raises(RaceError) as caught, ts.debug.checked():
        shift[(3,)](np.zeros(4, np.float32))
    text = str(caught.value)
    assert text.count("x[i] = x[i + 1]") == 2 and "program (1,) writes it, program (0,) reads it" in text
    assert text.count("test_debug_races.py:") == 2


@ts.kernel
def halves(a, b):
    i = ts.tile.program_id(0)
    a[i] = b[i]


def test_two_names_for_one_memory():
    x = np.zeros(9, np.float32)
    assert ts.debug.check(halves[(8,)], x[1:], x[:8]).kinds == ["program race"]
    assert not ts.debug.check(halves[(8,)], x[:8].copy(), x[:8])


def test_every_op_that_touches_memory_is_watched():
    touching = {o for n, o in REGISTRY.items() if n.startswith("tile.") and o.effects & {"read", "write", "async"}}
    assert touching and not touching - set(debug.checked_rules)
