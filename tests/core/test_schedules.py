"""Schedules: derived, merged, searched, saved, and bound to the constants of kernels."""

import subprocess
import sys

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, FileError
from tessera.core.schedule import Schedule, ScheduleSpace

BASE = Schedule(block=(128, 128), warps=8, stages=3, vector=8, swizzle="xor")


def test_the_specification_s_schedule():
    held = Schedule(tile_m=128, tile_n=128, tile_k=32, block_m=256, block_n=128, warps=8, stages=3, vector_width=8,
                    unroll_factor=4, prefetch_distance=2, swizzle_pattern="xor")  # fmt: skip
    assert (held.tile_k, held.block, held.vector, held.unroll, held.prefetch) == (32, (256, 128, 32), 8, 4, 2)
    specialized = Schedule(tile_m=64, tile_n=64).derive(tile_k=16, warps=4)
    assert specialized == Schedule(tile_m=64, tile_n=64, tile_k=16, warps=4)
    assert Schedule(tile_m=128) | Schedule(tile_n=128) == Schedule(tile_m=128, tile_n=128)


def test_what_is_derived_leaves_the_rest():
    assert BASE.with_block(64, 64) == BASE.derive(block=(64, 64)) != BASE
    assert BASE.with_warps(4).given == {**BASE.given, "warps": 4}
    assert BASE.with_stages(2).with_vector(4).with_swizzle("none").with_unroll(2).with_prefetch(1).block_m == 128
    assert BASE.with_cluster(2).cluster == 2
    assert BASE.with_tile(k=32).tile_k == 32 and BASE.derive(warps=None).warps is None
    with pytest.raises(AttributeError):
        BASE.warps = 4


def test_a_conflict_names_both():
    with pytest.raises(ArgumentError) as caught:
        BASE | Schedule(warps=4)
    assert "warps=8, as in Schedule(block_m=128" in str(caught.value) and "as in Schedule(warps=4)" in str(caught.value)
    assert BASE | Schedule(warps=8) == BASE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tile_q": 4}, "no field `tile_q`"),
        ({"warps": 0}, "warps=0 is no warps"),
        ({"warps": 2.0}, "2.0"),
        ({"swizzle": "zigzag"}, "'none' or 'xor'"),
        ({"block": (1, 2, 3, 4)}, "4 sizes"),
        ({"vector": 4, "vector_width": 8}, "given twice"),
    ],
)
def test_refusals(given, says):
    with pytest.raises(ArgumentError, match=says):
        Schedule(**given)


def test_printed_and_hashed_alike_in_every_process():
    assert eval(repr(BASE), {"Schedule": Schedule}) == BASE
    program = f"from tessera.core.schedule import Schedule; print(hash({BASE!r}), {BASE!r}.digest)"
    for seed in ("1", "2"):
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                               env={"PYTHONHASHSEED": seed}, check=True)  # fmt: skip
        assert found.stdout.split() == [str(hash(BASE)), BASE.digest]


def test_files(tmp_path):
    path = BASE.save(tmp_path / "deep" / "s.json")
    assert Schedule.load(path) == BASE and [p.name for p in path.parent.iterdir()] == ["s.json"]
    bad = {
        "": "is not JSON",
        "[]": "another schema",
        '{"schema": 99, "schedule": {}}': "another schema",
        '{"schema": 1}': "has no `schedule`",
        '{"schema": 1, "schedule": {"warp": 3}}': "no field `warp`",
        '{"schema": 1, "schedule": 3}': "no set of fields",
    }
    for text, says in bad.items():
        path.write_text(text)
        with pytest.raises(FileError, match=says):
            Schedule.load(path)
    with pytest.raises(FileError, match="cannot be read"):
        Schedule.load(tmp_path / "none.json")


def test_spaces():
    space = ScheduleSpace(Schedule(stages=2)).block(m=[64, 128], n=[64, 96, 128]).k(64).warps([4, 8]).vector([4, 8])
    assert len(space) == 24 and all(s.stages == 2 and s.block_k == 64 for s in space)
    held = space.where(lambda s: s.block_m * s.block_n <= 8192, lambda s: s.warps * 16 <= s.block_m)
    assert len(set(held)) == len(list(held)) == 10
    assert len(ScheduleSpace()) == 1 and len(space.swizzle(["xor"]).stages(range(1, 4)).tile(m=[8, 16])) == 144
    with pytest.raises(ArgumentError, match="no field `blok_m`"):
        space.over(blok_m=[1])
    with pytest.raises(ArgumentError, match="no value"):
        space.warps([])


@ts.kernel.with_schedule(Schedule(block=32, warps=2))
def blockwise(x, out, *, BM: int = 8, NUM_WARPS: int = 1):
    i = tile.program_id(0) * BM
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * 0.0 + BM * 100.0 + NUM_WARPS, edge="clip")


def launched(kernel, *args, **named):
    x, out = np.ones(40, "f4"), np.zeros(40, "f4")
    kernel[lambda c: (-(-40 // c["BM"]),)](x, out, *args, **named)
    assert (out == out[0]).all()
    return out[0]


def test_constants_come_from_the_schedule_unless_a_call_gives_them():
    assert launched(blockwise) == 3202.0 and launched(blockwise, BM=16) == 1602.0
    other = blockwise.with_schedule(Schedule(tile_m=4))
    assert launched(other) == 401.0 and launched(blockwise) == 3202.0
    assert other.schedule == Schedule(tile_m=4) and blockwise.options.num_warps == 2


@ts.kernel.schedule(BASE.with_block(4, 4))
@ts.kernel(target="llvm")
def of_the_tile(x, out):
    t = tile.context()
    tile.store(out, tile.load(x, shape=(t.M, t.N)) + 1.0)


def test_without_constants_the_block_is_the_tile_shape():
    x, out = np.zeros((8, 4), "f4"), np.zeros((8, 4), "f4")
    of_the_tile(x, out)
    assert (out == 1).all() and of_the_tile.options.tile_shape == (4, 4) and of_the_tile.options.target == "llvm"


def test_a_constant_given_by_place():
    @ts.kernel.with_schedule(Schedule(block=32))
    def placed(x, out, BM: ts.constexpr):
        i = tile.program_id(0) * BM
        tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * BM, edge="clip")

    assert launched(placed) == 32.0 and launched(placed, 20) == 20.0


def test_only_a_schedule_will_do():
    with pytest.raises(ArgumentError, match="is not a schedule"):
        blockwise.with_schedule({"warps": 4})
