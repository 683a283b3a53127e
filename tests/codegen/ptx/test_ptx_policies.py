"""Results stored under a policy: the bits that the interpreter gives, for every clause, type and source."""

import itertools

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, run_both

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import TensorType, as_dtype
from tessera.ir.core import Function, Module
from tessera.ir.numerics.conversion import FINITE_ONLY
from tessera.lower.passes.type_conversion import convert_types
from tessera.runtime.program import prepare

TYPES = ("f64", "f32", "tf32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp6", "fp6_e2m3", "fp4")
POLICIES = [
    {"rounding": r, "saturate": s, "denormals": d}
    for r, s, d in itertools.product(("nearest", "toward_zero", "stochastic"), (False, True), ("preserve", "flush"))
][1:]


def numbers(source):
    """Powers of two with their neighbours, steps of the narrow types, the largest numbers, infinity and NaN."""
    powers = 2.0 ** np.array([-160, -150, -149, -127, -126, -125, *range(-28, 18), 127, 128], np.float64)
    fine = np.random.default_rng(0).uniform(-20, 20, 120) * 2.0 ** np.arange(-30, 30).repeat(2)
    found = np.concatenate([powers, powers * 1.0000001, powers * 1.37, powers * 1.9999, fine, [0.0, np.inf]])
    found = np.concatenate([found, -found, [np.nan]])
    with np.errstate(all="ignore"):
        return found.astype(source) if source.kind == "f" else np.clip(found, -(2.0**62), 2.0**62).astype(source)


def casts(source, to):
    """A kernel that casts to a type under each policy, with its arrays."""
    policies = [ts.Policy(as_dtype(to), **clauses) for clauses in POLICIES]

    @ts.kernel
    def cast(x, out):
        at = tile.program_id(0) * 32
        block = tile.load(x[at : at + 32])
        for i in tile.static_range(len(policies)):
            out[i, at : at + 32] = tile.cast(tile.cast(block, policies[i]), as_dtype(out.dtype))

    x = numbers(np.dtype(source))
    if as_dtype(to) in FINITE_ONLY:  # which number stands for NaN is open there
        x = x[~np.isnan(x)]
    x = np.resize(x, -(-len(x) // 32) * 32)
    return cast, [x, np.zeros((len(policies), len(x)), as_dtype(to).numpy)]


@pytest.mark.parametrize("to", TYPES)
@pytest.mark.parametrize("source", ["f4", "f8", "i4"])
def test_casts(source, to):
    entry, arrays = casts(source, to)
    for ours, theirs in run_both(prepare(entry, arrays, grid=(len(arrays[0]) // 32,)).levels["tile"], arrays):
        np.testing.assert_array_equal(ours.astype("f8"), theirs.astype("f8"))
        np.testing.assert_array_equal(np.signbit(ours.astype("f8")), np.signbit(theirs.astype("f8")))


@ts.kernel
def narrow(x: ts.Tensor["M", "K", ts.bf16], y, out, total, most, POLICY: ts.constexpr):
    a, b = tile.cast(tile.load(x), POLICY), tile.cast(tile.load(y), POLICY)
    tile.store(out, tile.cast(tile.dot(a, b), ts.bf16))
    tile.store(total, tile.cast(tile.sum(a * 1.7 + a, axis=1), ts.bf16))
    tile.store(most, tile.cast(tile.max(a, axis=0), ts.bf16))


@pytest.mark.in_turn("arch")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("clauses", [POLICIES[1], POLICIES[3], POLICIES[7]], ids=str)
def test_arithmetic(clauses, arch, rng):
    policy = ts.Policy(ts.bf16, **clauses)
    x, y = (rng.integers(-8, 9, s).astype(ts.bf16.numpy) for s in ((32, 64), (64, 48)))
    arrays = [x, y, np.zeros((32, 48), x.dtype), np.zeros(32, x.dtype), np.zeros(64, x.dtype)]
    module = prepare(narrow, [*arrays, policy]).levels["tile"]
    for ours, theirs in run_both(module, arrays, arch):  # small whole numbers: every order of sums gives the same
        np.testing.assert_array_equal(ours.view(np.uint16), theirs.view(np.uint16))


def test_rounding_by_chance_that_no_pass_made_explicit_is_refused():
    entry, arrays = casts("f4", "f16")
    module = prepare(entry, arrays, grid=(22,)).levels["tile"]
    policy = ts.Policy(ts.f16, rounding="stochastic")

    def chance(type):
        return TensorType(type.shape, type.dtype, policy) if type.dtype is ts.f16 else type

    found = Module("tile", (module.main, *(_changed(f, chance) for f in module.functions[1:])))
    with pytest.raises(UnsupportedOpError, match="ptx does not round by the policy rounding=stochastic"):
        BACKEND.emit(found, {})


def _changed(function: Function, chance) -> Function:
    kept = {v.type for v in function.params}
    return convert_types(function, lambda type: type if type in kept else chance(type))


def test_draws_differ_between_programs_and_not_between_engines(rng):
    policy = ts.f16 @ ts.stochastic_round

    @ts.kernel
    def rounded(x, out):
        i = tile.program_id(0)
        out[i, :] = tile.cast(tile.cast(tile.load(x), policy), ts.f16)

    x = rng.random(50, dtype="f4")
    arrays = [x, np.zeros((40, 50), "f2")]
    module = prepare(rounded, arrays, grid=(40,)).levels["tile"]
    ((_, _), (ours, theirs)) = run_both(module, arrays)
    assert np.array_equal(ours, theirs) and len(np.unique(ours, axis=0)) == 40
    assert abs(ours.astype("f8").mean() - x.mean()) < 1e-5
    assert emit_checked(module, "sm_90a")
