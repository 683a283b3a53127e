"""Blocks fetched ahead by cp.async: the pass in the Tile interpreter, the text in the PTX emulator's debug mode."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.context import choose_row_layout
from tessera.codegen.ptx.ops import smem_operand, smem_slots
from tessera.codegen.ptx.passes.instruction_selection import fuse_accumulation
from tessera.codegen.ptx.passes.multistage_pipelining import find_loop_fetches, insert_prefetch, read_operands_in_place
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import AsyncCopyError, ResourceError, TesseraError
from tessera.core.types import bf16, f16, f32, fp8_e4m3, int8
from tessera.frontend.kernel import kernel
from tessera.interp.target.ptx import PtxModule
from tessera.interp.tile import interpreter
from tessera.ir.core import Attrs, Block, Function
from tessera.ir.core import Module as Program
from tessera.ops.dialects import tile as tile_ops
from tessera.runtime.program import prepare
from tessera.stdlib.attention import attend


@kernel
def product(a, b, out, *, BM: int, BN: int, BK: int, left: bool = False, right: bool = False):
    """`left` and `right` say which side is given turned around."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), a.type.accumulate)
    for k in tile.range(0, a.shape[0] if left else a.shape[1], BK):
        if left:
            x = tile.transpose(tile.load(a[k : k + BK, m : m + BM], edge="clip"))
        else:
            x = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if right:
            y = tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip"))
        else:
            y = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(x, y)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


def arguments(dtype, m, n, k, block=(32, 32, 32), seed=0, **turned):
    random, scale = np.random.default_rng(seed), 30 if dtype == int8 else 1
    a, b = ((random.standard_normal(s) * scale).astype(dtype.numpy) for s in ((m, k), (k, n)))
    sides = [np.ascontiguousarray(x.T) if turned.get(name) else x for x, name in ((a, "left"), (b, "right"))]
    out = np.full((m, n), -1, np.int32 if dtype == int8 else np.float32)
    constants = dict(zip(("BM", "BN", "BK"), block, strict=True))
    return {"a": sides[0], "b": sides[1], "out": out, **constants, **turned}, a.astype("f8") @ b.astype("f8")


def tiles(given, stages=None):
    """The Tile program of a product."""
    entry = product if stages is None else product.with_schedule(ts.Schedule(stages=stages))
    grid = tuple(-(-n // given[b]) for n, b in zip(given["out"].shape, ("BM", "BN"), strict=True))
    return prepare(entry, given, "ptx", grid).levels["tile"]


def run(module, given, arch="sm_80", change=lambda text: text, debug=True):
    """The text in the PTX emulator, in debug mode by default; the result."""
    artifact = emit_checked(module, arch)
    (launch,), (entry,) = artifact.manifest["plan"]["launches"], artifact.manifest["plan"]["entries"].values()
    arrays = [given[name] for name in ("a", "b", "out")]
    text = change(artifact.text(TEXT_FILE))
    grid = tuple(launch["grid"][: launch["rank"]][::-1])
    PtxModule(text).launch(launch["kernel"], grid, entry["threads"], arrays, entry["shared"], debug=debug)
    return given["out"].astype("f8"), text


def close(out, want, dtype):
    limit = {int8: 0, fp8_e4m3: 1e-5, f32: 1e-5}.get(dtype, 1e-4)
    assert np.abs(out - want).max() <= limit * np.abs(want).max()


def ahead(module, stages, room=tile_ops.alloc):
    """The pass's result."""
    function = fuse_accumulation(module.functions[1])
    return insert_prefetch(function, stages, find_loop_fetches(function, True, ()), room)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_pass_gives_tile_ir_that_debug_mode_takes(stages):
    given, want = arguments(bf16, 40, 50, 100)
    module = tiles(given)
    done = ahead(module, stages)
    ops = [n.op for n in done.body.walk()]
    assert ops.count(tile_ops.async_copy) == 2 * stages and tile_ops.barrier in ops
    interpreter.run(Program("tile", (module.main, done)), [given[n] for n in ("a", "b", "out")], debug=True)
    close(given["out"].astype("f8"), want, bf16)


@pytest.mark.parametrize("turned", [{}, {"left": True, "right": True}])
@pytest.mark.parametrize(("block", "sizes"), [((128, 224, 64), (256, 224, 300)), ((80, 96, 48), (160, 96, 100))])
def test_slots_of_blocks_that_are_no_powers_of_two_are_read_within_shared_memory(block, sizes, turned):
    """Layouts have powers of two of rows: reads of the last slot end past its block (it was an illegal address).

    In debug mode those of another slot, which nothing uses, are findings.
    """
    given, want = arguments(bf16, *sizes, block, **turned)
    out, text = run(tiles(given), given, debug=False)
    assert "cp.async" in text and "ldmatrix" in text
    close(out, want, bf16)


def without(block, op):
    """A block without some nodes at any depth."""
    nodes = (n for n in block.nodes if n.op is not op)
    return Block(block.params, tuple(_replaced(n, op) for n in nodes), block.results)


def _replaced(node, op):
    return replace(node, regions=tuple(without(r, op) for r in node.regions))


def test_debug_mode_finds_a_missing_wait_in_the_pass_s_result():
    given, _ = arguments(bf16, 32, 32, 100)
    module = tiles(given)
    done = ahead(module, 3)
    wrong = Function(done.name, without(done.body, tile_ops.async_wait), Attrs(done.attrs), done.loc)
    with pytest.raises(TesseraError, match="asynchronous copy"):
        interpreter.run(Program("tile", (module.main, wrong)), [given[n] for n in ("a", "b", "out")], debug=True)


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("dtype", "turned"),
    [(bf16, {}), (f16, {"left": True}), (bf16, {"right": True}), (int8, {"right": True}), (int8, {"left": True}),
     (fp8_e4m3, {"left": True, "right": True})],
)  # fmt: skip
def test_types_and_orientations(dtype, turned, arch):
    given, want = arguments(dtype, 72, 88, 104, (32, 64, 32), **turned)
    out, text = run(tiles(given), given, arch)
    assert "cp.async.c" in text and "wgmma" not in text
    close(out, want, dtype)


def test_what_is_read_before_its_wait_is_an_error():
    given, _ = arguments(bf16, 64, 64, 200)
    module = tiles(given, stages=3)
    with pytest.raises(AsyncCopyError, match="nothing has waited for"):
        run(module, given, change=lambda text: text.replace("cp.async.wait_group 1", "cp.async.wait_group 2"))
    with pytest.raises(AsyncCopyError):  # the other threads' copies
        run(module, given, change=lambda text: re.sub(r"(wait_group 1;\n(.*\n)?)\tbar.sync 0;", r"\1", text))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *[st.integers(1, 300)] * 3, st.sampled_from([bf16, f16, int8, fp8_e4m3]), st.booleans(), st.booleans(),
    st.sampled_from([1, 2, 3, 4, None]), st.sampled_from(["sm_80", "sm_90a"]),
)  # fmt: skip
def test_any_size(m, n, k, dtype, left, right, stages, arch):
    given, want = arguments(dtype, m, n, k, (64, 32, 64), seed=m, left=left, right=right)
    BACKEND.interpreter(emit_checked(tiles(given, stages), arch))([given[name] for name in ("a", "b", "out")])
    close(given["out"].astype("f8"), want, dtype)


def test_a_schedule_says_how_many_stages():
    given, want = arguments(bf16, 64, 64, 512, (64, 64, 64))
    shared = {}
    for stages in (1, 2, 3):
        artifact = emit_checked(tiles(given, stages))
        (entry,) = artifact.manifest["plan"]["entries"].values()
        shared[stages] = entry["shared"], artifact.text(TEXT_FILE).count("cp.async.wait_group")
    assert shared[3][0] - shared[2][0] == 2 * 64 * 64 * 2 and shared[1][1] == 0 and shared[2][1] == 2
    with pytest.raises(ResourceError, match="fewer stages"):
        emit_checked(tiles(given, 40))


@pytest.mark.parametrize(("shape", "turned"), [((64, 77, 333), {}), ((65, 64, 133), {"left": True, "right": True})])
def test_rows_that_begin_anywhere_come_through_registers(shape, turned):
    given, want = arguments(bf16, *shape, (64, 64, 32), **turned)
    out, text = run(tiles(given), given)
    assert "cp.async" not in text and "ldmatrix" in text and text.count("bar.sync") == 1
    close(out, want, bf16)


def test_one_side_is_copied_and_the_other_held():
    given, want = arguments(bf16, 64, 80, 133, (32, 32, 32))
    out, text = run(tiles(given, 4), given)
    assert "cp.async.wait_group 2" in text and "ld.global.u16" in text
    close(out, want, bf16)


@kernel
def heads(q, k, out, *, B: int = 32):
    """Heads stand after positions: a block of them has axes of size 1 in its middle."""
    head, rows = tile.program_id(0), q.shape[0]
    acc = tile.zeros((B, B), ts.f32)
    for i in tile.range(0, rows, B):
        left = tile.load(q[i : i + B, head, :], edge="clip")
        acc = acc + tile.dot(tile.transpose(left), tile.load(k[i : i + B, head, :], edge="clip"))
    tile.store(out[head, :, :], acc)


def test_rows_that_are_not_neighbours():
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((70, 2, 32)).astype(bf16.numpy) for _ in range(2))
    given = {"q": q, "k": k, "out": np.zeros((2, 32, 32), np.float32)}
    artifact = emit_checked(prepare(heads, given, "ptx", (2,)).levels["tile"])
    (entry,), text = artifact.manifest["plan"]["entries"].values(), artifact.text(TEXT_FILE)
    PtxModule(text).launch("heads", 2, entry["threads"], list(given.values()), entry["shared"], debug=True)
    want = np.einsum("ihd,ihe->hde", q.astype("f8"), k.astype("f8"))
    assert "cp.async.cg" in text and np.abs(given["out"] - want).max() < 1e-4


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_masked_blocks_are_loaded_a_round_ahead(arch):
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 1, n, 64)).astype(bf16.numpy) for n in (70, 200, 200))
    lengths = np.array([200, 130])
    k[1, :, 130:] = v[1, :, 130:] = np.nan  # behind a cache's end there may be anything
    given = {"q": q, "k": k, "v": v, "mask": None, "lengths": lengths, "causal": True, "scale": 0.125, "narrow": True}
    found = []
    for schedule in (ts.Schedule(), ts.Schedule(stages=1)):
        out = np.full(q.shape, np.nan, bf16.numpy)
        entry, arguments = attend.with_schedule(schedule), {**given, "out": out, "BM": 64, "BN": 64}
        artifact = emit_checked(prepare(entry, arguments, "ptx", (2, 1, 2)).levels["tile"], arch)
        (entry,) = artifact.manifest["plan"]["entries"].values()
        text = artifact.text(TEXT_FILE)
        PtxModule(text).launch(
            "attend", (2, 1, 2), entry["threads"], [q, k, v, lengths, out], entry["shared"], debug=True
        )
        found.append((out, text.count("bar.sync")))
    np.testing.assert_array_equal(*(out.view(np.uint16) for out, _ in found))
    assert found[0][1] < found[1][1] and not np.isnan(found[0][0].astype("f4")).any()


@kernel
def running(a, out, *, B: int = 32):
    """Rows that a round writes are read by the next one: nothing may be fetched ahead."""
    acc = tile.zeros((B, B), ts.f32)
    for i in tile.range(0, a.shape[0] - B, B):
        block = tile.load(a[i : i + B, 0:B])
        acc = acc + tile.dot(block, block)
        tile.store(a[i + B : i + 2 * B, 0:B], tile.cast(acc * 0.01, a.dtype))
    tile.store(out[0:B, 0:B], acc)


@kernel
def met(a, out, *, B: int = 32):
    """Rounds that all programs begin together: what others wrote before is read after."""
    acc = tile.zeros((B, B), ts.f32)
    for i in tile.range(0, a.shape[0], B):
        tile.grid_barrier()
        block = tile.load(a[i : i + B, 0:B])
        acc = acc + tile.dot(block, block)
    tile.store(out[0:B, 0:B], acc)


def test_nothing_is_read_before_a_barrier_of_the_loop():
    given = {"a": np.zeros((128, 32), bf16.numpy), "out": np.zeros((32, 32), np.float32)}
    assert find_loop_fetches(prepare(met, given, "ptx", (1,)).levels["tile"].functions[1], True, ()) == {}


def test_memory_that_the_loop_writes_is_not_fetched_ahead():
    a = np.random.default_rng(0).standard_normal((128, 32)).astype(bf16.numpy)
    given = {"a": a, "out": np.zeros((32, 32), np.float32)}
    module = prepare(running, given, "ptx", (1,)).levels["tile"]
    assert find_loop_fetches(module.functions[1], True, ()) == {}


def test_both_sides_stay_where_they_lie():
    given, _ = arguments(bf16, 64, 64, 100)
    done = read_operands_in_place(ahead(tiles(given), 3, smem_slots))
    ops = [n.op for n in done.body.walk()]
    assert ops.count(smem_operand) == 2 and tile_ops.load not in ops
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    assert (smem_operand.ref(x, 1, flipped=True) == x[1].T).all() and (
        smem_operand.ref(x, 0, flipped=False) == x[0]
    ).all()


@pytest.mark.parametrize("count", [32, 64, 96, 128, 160, 256, 512])
def test_rows_read_at_once_lie_in_different_banks(count):
    rows = choose_row_layout(count)
    for first in range(0, count, 16):
        places = [sum(rows.split_offset(r, first)) % 128 for r in range(8)]
        assert len(set(places)) == 8 and all(p % 16 == 0 for p in places)
    every = {sum(rows.split_offset(r, b)) for r in range(16) for b in range(0, count, 16)}
    assert len(every) == 16 * count // 16


@kernel
def twice(x, out, *, N: int = 32):
    """Two copies under way into memory of the kernel's own, read in the other order."""
    here, there = tile.alloc_shared((N, N), ts.f32), tile.alloc_shared((N, N), ts.f32)
    tile.cp_async(here, x[0:N, 0:N], edge="clip")
    tile.cp_commit_group()
    tile.cp_async(there, x[0:N, N : 2 * N], edge="clip")
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:N, 0:N], tile.load(there[0:N, 0:N]) - tile.transpose(tile.load(here[0:N, 0:N])))


def test_a_user_s_own_copies_are_asynchronous():
    x = np.random.default_rng(0).standard_normal((30, 60)).astype(np.float32)
    given = {"a": x, "b": np.zeros((32, 32), np.float32)}
    module = prepare(twice, {"x": x, "out": given["b"]}, "ptx", (1,)).levels["tile"]
    artifact = emit_checked(module)
    (entry,) = artifact.manifest["plan"]["entries"].values()
    text = artifact.text(TEXT_FILE)
    assert text.count("cp.async.commit_group") == 2 and "st.shared" in text  # the block is turned around
    PtxModule(text).launch("twice", 1, entry["threads"], list(given.values()), entry["shared"], debug=True)
    whole = np.zeros((32, 64), np.float32)
    whole[:30, :60] = x
    np.testing.assert_array_equal(given["b"], whole[:, 32:] - whole[:, :32].T)
    with pytest.raises(AsyncCopyError):
        wrong = text.replace("cp.async.wait_group 0", "cp.async.wait_group 1")
        PtxModule(wrong).launch("twice", 1, entry["threads"], list(given.values()), entry["shared"], debug=True)


def test_new_P3():
    given, _ = arguments(bf16, 64, 64, 512, (64, 64, 64))
    shared = {}
    for stages in (2, None):
        (entry,) = emit_checked(tiles(given, stages)).manifest["plan"]["entries"].values()
        shared[stages] = entry["shared"]
    assert shared[None] == shared[2]
