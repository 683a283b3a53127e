"""What meetings of stretches order: races are found just where no chain of meetings lies between two accesses."""

import importlib.util

import numpy as np
import pytest

import tessera as ts
from tessera.interp.sanitizer import vector_clocks as debug_clocks

TILES, CELLS, ACTIONS = 12, 4, 14
WIDTHS = ((2, 6), (3,), (4, 6), (2, 4))  # of the third neither lies within the other
CLASH = ({"store"}, {"load", "store"}, {"load", "atomic"}, {"store", "atomic"})
LINES = {
    "load": "keep[{n}] = cells[{at}]",
    "store": "cells[{at}] = {n}.0",
    "atomic": "tile.atomic_add(cells[{at}], 1.0)",
    "meet": "tile.cooperative_group({at}).sync()",
    "all": "tile.barrier()",
}


def random_program(seed):
    """(condition on `me`, the tiles it selects, what, cell or width), one after the other."""
    rng = np.random.default_rng(seed)
    widths = WIDTHS[seed % len(WIDTHS)]
    actions = []
    for _ in range(ACTIONS):
        what = str(rng.choice(list(LINES), p=[0.14, 0.12, 0.08, 0.5, 0.16]))
        if what in ("meet", "all"):
            width = int(rng.choice(widths)) if what == "meet" else TILES
            one = what == "meet" and rng.random() < 0.5
            first = int(rng.integers(TILES // width)) if one else None
            who = [t for t in range(TILES) if first in (None, t // width)]
            actions.append((f"me // {width} == {first}" if one else "True", who, what, width))
        else:
            me = int(rng.integers(TILES))
            actions.append((f"me == {me}", [me], what, int(rng.integers(CELLS))))
    return actions


def races(actions):
    """Whether two tiles meet at a cell, and what the later one knows does not have the earlier access."""
    known, done = [set() for _ in range(TILES)], []
    for n, (_, who, what, where) in enumerate(actions):
        if what in ("meet", "all"):
            for first in range(0, TILES, where):
                if first in who:
                    together = set().union(*known[first : first + where])
                    known[first : first + where] = [set(together) for _ in range(where)]
            continue
        if any(p not in known[who[0]] and w == where and {k, what} in CLASH for p, k, w in done):
            return True
        known[who[0]].add(n)
        done.append((n, what, where))
    return False


def kernel(actions, folder, name):
    """The program as a kernel, in a file of its own."""
    lines = ["import tessera as ts", "from tessera import tile", "", "@ts.kernel", "def entry(keep):"]
    lines += ["    me, cells = tile.local_id(), tile.alloc_shared((4,), ts.f32)"]
    lines += ["    if me < 4:", "        cells[me] = 0.0", "    tile.barrier()"]
    for n, (condition, _, what, at) in enumerate(actions):
        lines += [f"    if {condition}:", "        " + LINES[what].format(n=n, at=at)]
    path = folder / f"{name}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.entry, path


@pytest.mark.parametrize("seeds", [range(n, n + 16) for n in range(0, 64, 16)], ids=str)
def test_found_exactly_where_they_are(seeds, tmp_path):
    verdicts = set()
    for seed in seeds:
        actions = random_program(seed)
        entry, path = kernel(actions, tmp_path, f"stretches{seed}")
        found = ts.debug.check(entry[(2,), TILES], np.zeros(32, np.float32), nan=False)
        own = [f for f in found if f.kind == "race"]
        assert bool(own) == races(actions), f"seed {seed}: {path.read_text()}\n{found}"
        verdicts.add(bool(own))
    assert verdicts == {True, False}


def test_counts_of_meetings_are_enough_where_stretches_lie_within_one_another(tmp_path):
    entry, _ = kernel([("True", range(TILES), "meet", w) for w in (2, 6)], tmp_path, "nested")
    parted, _ = kernel([("True", range(TILES), "meet", w) for w in (4, 6)], tmp_path, "parted")
    body, other = (k.specialize({}, {"keep": np.zeros(2)}, (1,), TILES).functions[1].body for k in (entry, parted))
    assert debug_clocks.find_race_kind(body, TILES) is None and debug_clocks.find_barrier_widths(body, TILES) == (2, 6)
    assert debug_clocks.find_race_kind(other, TILES) == "race" and debug_clocks.find_barrier_widths(other, TILES) == ()
