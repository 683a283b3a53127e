"""Planted bugs: each is found under its number, its repaired twin is clean; and advice comes where it is due."""

import numpy as np
import pytest

import tessera as ts
from conformance.case import all_cases
from conformance.tile.debug.advice import ADVICE, square
from conformance.tile.debug.cases import PAIRS
from tessera.interp.sanitizer.report import Checks
from tessera.interp.tile import interpreter
from tessera.runtime.program import prepare


def report(kernel, arguments, grid, group, **options):
    launch = kernel[grid] if group is None else kernel[grid, group]
    return ts.debug.check(launch, **arguments, **options)


def test_there_are_enough():
    assert len(PAIRS) >= 60 and len({p.broken.__name__ + p.broken.__module__ for p in PAIRS.values()}) == len(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_found_and_repaired(name):
    pair = PAIRS[name]
    grid = pair.grid or ((1,) if pair.group else (8,))
    found = report(pair.broken, pair.arguments(), grid, pair.group)
    hits = [f for f in found if f.rule == pair.rule or isinstance(f.error(), pair.error)]
    assert hits and any(all(w in str(f) for w in pair.says) for f in hits), str(found)
    assert all(f.location.line for f in found)
    assert str(report(pair.repaired, pair.arguments(), grid, pair.group)) == "no findings"


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name):
    each = ADVICE[name]
    found = report(each.plain, square(), (1,), each.group, lint=True)
    assert each.kind in found.kinds and all(f.is_advice for f in found)
    assert any(all(w in f.message for w in each.says) for f in found), str(found)
    assert each.kind not in report(each.better, square(), (1,), each.group, lint=True).kinds
    assert not report(each.plain, square(), (1,), each.group)


def test_advice_is_never_raised():
    each = ADVICE["transposed"]
    with ts.debug.checked(lint=True) as found:
        each.plain[(1,), 32](**square())
    assert found.kinds == ["bank conflict"]


@ts.kernel
def swizzled(x, out):
    me = ts.tile.local_id()
    rows = ts.tile.alloc_shared((32, 32), ts.f32, swizzle="xor")
    rows[me, 0] = x[0, me]
    ts.tile.barrier()
    out[0, me] = rows[me, 0]


def test_a_swizzle_spreads_a_column_over_the_banks():
    plain = report(ADVICE["transposed"].plain, square(), (1,), 32, lint=True)
    found = report(swizzled, square(), (1,), 32, lint=True)
    assert "up to 32 " in plain.findings[0].message and "up to 4 " in found.findings[0].message


def test_advice_keeps_the_bits_of_the_whole_suite():
    for case in [c for c in all_cases() if c.rejects is None and c.name.startswith("tile/")]:
        program = prepare(*case.entry(), "interp", case.grid, case.group)
        plain, watched = ([a.copy() for a in program.arrays] for _ in range(2))
        checks = Checks(collect=True, lint=True)
        plain += interpreter.run(program.levels["tile"], plain)
        watched += interpreter.run(program.levels["tile"], watched, debug=checks)
        assert [a.tobytes() for a in plain] == [a.tobytes() for a in watched], case.name
        assert all(f.is_advice for f in checks.report), case.name


def test_random_banks_against_counting():
    from tessera.interp.sanitizer.memory_transactions import count_bank_conflicts, count_sectors

    rng = np.random.default_rng(0)
    offset, active = rng.integers(0, 256, (20, 32)) * 4, rng.random((20, 32)) < 0.8
    turns, touched = 0, 0
    for row, here in zip(offset, active, strict=True):
        words = {int(o) // 4 for o, h in zip(row, here, strict=True) if h}
        turns += max(sum(w % 32 == bank for w in words) for bank in range(32))
        touched += len({int(o) // 32 for o, h in zip(row, here, strict=True) if h})
    assert count_bank_conflicts(offset, active, 4).taken == turns and count_sectors(offset, active, 4).taken == touched
