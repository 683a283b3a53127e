"""The ptx pipeline as data: each module verifies, parses back, and runs in the interpreter as the Tile module does."""

import dataclasses
import inspect

import numpy as np
import pytest
from tilekernels import Kernel

import tessera as ts
from conformance.case import all_cases
from tessera.codegen.contract import CompilerPass, PassPipeline, get_backend, run_passes
from tessera.codegen.ptx import BACKEND, emission, pipeline
from tessera.codegen.ptx import ops as ptx_ops
from tessera.codegen.ptx.ops import PREFETCHING, UNIFORM, WARP_SPECIALISED, get_fact
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import ExecutionError, ParseError, VerifyError
from tessera.core.types import bf16
from tessera.frontend.kernel import kernel
from tessera.interp.sanitizer.report import Checks
from tessera.interp.tile import interpreter
from tessera.interp.tile.op_rules import expansion_rules
from tessera.ir.builder import make_copier, rebuild_function
from tessera.ir.levels import TARGET_OPS
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.ops.dialects import tile
from tessera.runtime.program import prepare


@kernel
def normalised(x, out, *, N: int):
    """Rows of `x` by their sums."""
    row = ts.tile.program_id(0)
    values = ts.tile.load(x[row, 0:N])
    ts.tile.store(out[row, 0:N], values * ts.tile.sum(values, axis=-1) / N)


CASES = [case for case in all_cases() if case.rejects is None and case.name.startswith("tile")][::9]
ROUNDING = {1: 0.0, 2: 2e-2, 4: 1e-4, 8: 1e-4}  # by bytes of an element, as a share of the largest


def tile_module(program):
    return program.levels["tile"]


def executed(program, module, debug=None):
    """What a module gives and writes."""
    arrays = [np.copy(a) if isinstance(a, np.ndarray) else a for a in program.arrays]
    outputs = interpreter.run(module, arrays, debug=debug)
    return [np.asarray(a) for a in (*outputs, *(arrays[i] for i in program.written))]


def agree(ours, theirs):
    """Whether results differ by rounding alone: passes contract multiply-adds and split products."""
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = np.abs(b[np.isfinite(b)]).max(initial=1e-6)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=ROUNDING[theirs[0].dtype.itemsize] * scale)


def passes_applied(module, arch):
    """The name of each pass with the module after it."""
    for each in BACKEND.passes(module, {"arch": arch}):
        module = each.run(module)
        yield each.name, module


def multiplied(m=256, n=256, k=256):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32).astype(bf16.numpy) for shape in ((m, k), (k, n)))
    return prepare(ts.jit(lambda x, w: ts.tanh(x @ w)), (x, w), "ptx")


def attention(rows=512):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, rows, 64), np.float32).astype(bf16.numpy) for _ in range(3))
    return prepare(ts.jit(lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, causal=True)), (q, k, v), "ptx")


IN_TURN = [(case, ("sm_80", "sm_90a")[i % 2]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("case", "arch"), IN_TURN, ids=lambda x: getattr(x, "name", x))
def test_every_pass_keeps_what_a_case_does(case, arch, capsys):
    entry, arguments = case.entry()
    program = prepare(entry, arguments, "ptx", case.grid, case.group)
    module = tile_module(program)
    text = BACKEND.emit(module, {"arch": arch}).text(TEXT_FILE)
    want, before = executed(program, module), module
    for _, after in passes_applied(module, arch):
        if after == before:  # checked after the pass before
            continue
        verify(after)
        printed = print_module(after)
        again = parse_module(printed)
        assert again == after and print_module(again) == printed
        if [f.body for f in after.functions] != [f.body for f in before.functions]:
            agree(executed(program, again), want)
        before = after
    assert BACKEND.emit(again, {}).text(TEXT_FILE) == text  # the text needs nothing but the printed module


@pytest.mark.parametrize(
    "make", [multiplied, lambda: multiplied(1024, 1024, 512), attention], ids="mma wgmma flash".split()
)
def test_products_run_after_each_pass(make):
    program, seen = make(), set()
    module = before = tile_module(program)
    want = executed(program, module)
    for _, after in passes_applied(module, "sm_90a"):
        if after != before:
            agree(executed(program, verify(after)), want)
        seen |= {n.op for f in after.functions[1:] for n in f.body.walk()}
        before = after
    kinds = {get_fact(f, "kernel") for f in after.functions[1:]}
    if make is multiplied:
        assert kinds == {UNIFORM} and {ptx_ops.smem_slots, ptx_ops.smem_operand} <= seen
    else:
        assert WARP_SPECIALISED in kinds and seen & {ptx_ops.gemm_mainloop, ptx_ops.async_mma}


def test_a_prefetching_kernel_runs_after_each_pass(monkeypatch):
    monkeypatch.setattr(emission, "MIN_PREFETCHED_PROGRAMS", 1)
    rng = np.random.default_rng(0)
    x, out = (rng.standard_normal((17, 13000), np.float32) for _ in range(2))
    monkeypatch.setattr(emission, "MIN_PREFETCHED_THREADS", 512)
    program = prepare(normalised, {"x": x, "out": out, "N": 13000}, "ptx", (17,))
    want, after = executed(program, tile_module(program)), dict(passes_applied(tile_module(program), "sm_90a"))
    for module in after.values():
        agree(executed(program, verify(module)), want)
    chosen = after["kernel selection"]
    assert get_fact(chosen.functions[1], "kernel") == PREFETCHING and "ptx.stages" in print_module(chosen)
    assert "ptx.prefetched_load" in print_module(after["persistent prefetching"])
    assert "ptx.layouts" not in print_module(after["thread mapping"])
    assert "ptx.layouts" in print_module(after["layout assignment"])


def without(module, op):
    """A module without the uses of an op that has no results."""

    def meaning_of(builder):
        copy = make_copier(builder)
        return lambda node, args, run: () if node.op is op else copy(node, args, run)

    return module.replace(module.main, *(rebuild_function(f, meaning_of) for f in module.functions[1:]))


def test_debug_mode_finds_a_lost_wait():
    program = multiplied()
    after = dict(passes_applied(tile_module(program), "sm_80"))
    for name in ("multistage pipelining", "ldmatrix selection", "layout assignment"):
        executed(program, after[name], debug=True)
        wrong = without(after[name], tile.async_wait)
        agree(executed(program, wrong), executed(program, after[name]))  # copies are done at once in value mode
        with pytest.raises(ExecutionError, match="async"):
            executed(program, wrong, debug=True)


def test_debug_mode_finds_a_lost_copy():
    program = multiplied()
    module = dict(passes_applied(tile_module(program), "sm_80"))["ldmatrix selection"]
    with pytest.raises(ExecutionError, match="is read before anything is written"):
        executed(program, without(module, tile.async_copy), debug=True)


def test_ops_of_a_target_are_illegal_at_the_tile_level():
    program = multiplied()
    module = dict(passes_applied(tile_module(program), "sm_80"))["accumulator fusion"]
    with pytest.raises(VerifyError, match="illegal in a tile function"):
        verify(dataclasses.replace(module, level="tile"))
    with pytest.raises(ParseError, match="is not an op"):
        parse_module(print_module(module).replace("ptx.matmul_accumulate", "ptx.nothing"))


def test_each_op_of_the_target_has_a_meaning():
    """Either it expands into Tile ops, or it is elementwise, or NumPy does it to whole blocks."""
    ours = [op for name, op in TARGET_OPS.items() if name.startswith("ptx.")]
    whole = {ptx_ops.pack_pairs, ptx_ops.unpack_pairs}
    assert len(ours) >= 17 and all(op in expansion_rules or op.pointwise or op in whole for op in ours)


@pytest.mark.parametrize("debug", [None, Checks()])
def test_words_of_a_block_that_is_the_same_everywhere(debug):
    out = np.zeros((4, 8), bf16.numpy)
    k = Kernel(out)
    words = k(ptx_ops.pack_pairs, k.broadcast(k.const(1.5, bf16), 4, 8))
    k.store(k.params[0], k(ptx_ops.unpack_pairs, words, dtype=bf16))
    interpreter.run(k.module((1,)), [out], debug=debug)
    assert (out == 1.5).all()


def test_modules_are_verified_on_demand(monkeypatch):
    wrong = CompilerPass("wrong", lambda module: dataclasses.replace(module, level="tile"))
    module = tile_module(multiplied())
    pipeline_and_wrong = [*BACKEND.passes(module, {"arch": "sm_80"}), wrong]
    run_passes(pipeline_and_wrong, module)
    monkeypatch.setenv("TESSERA_VERIFY", "1")
    with pytest.raises(VerifyError, match="illegal in a tile function"):
        run_passes(pipeline_and_wrong, module)


def test_the_pipeline_is_data():
    names = [each.name for each in BACKEND.passes(tile_module(multiplied()), {"arch": "sm_80"})]
    assert names == ["launch analysis", *(name for name, _ in pipeline.FUNCTION_PASSES)]
    assert len(names) >= 10 and len(set(names)) == len(names)
    assert isinstance(get_backend("ptx"), PassPipeline)
    assert BACKEND.passes(list(dict(passes_applied(tile_module(multiplied()), "sm_80")).values())[-1], {}) == ()
    assert len(inspect.getsource(pipeline).splitlines()) < 160
