"""Every instruction of a kernel that synchronises is needed: without it the PTX emulator's debug mode finds a fault."""

import re
from functools import cache

import numpy as np
import pytest

import tessera as ts
from conformance.tile.products.cases import cases
from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import get_backend
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.errors import ArgumentError, AsyncCopyError, BarrierError, RaceError, UninitializedError
from tessera.core.types import bf16
from tessera.runtime.program import prepare

SYNCHRONISES = re.compile(
    r"\t(@\S+ )?(bar\.|mbarrier|fence|wgmma\.(wait|fence|commit)|cp\.async\.(bulk\.)?(wait|commit))"
)
# The initialisation of mbarriers is published to other CTAs, of which this kernel has none; the consumers' barrier
# before the results leave orders no access of this kernel; copies that nothing reads any more are drained.
UNNEEDED = {"sm_90a": {"fence.mbarrier_init.release.cluster;", "bar.sync 1, 128;"}, "sm_80": {"cp.async.wait_group 0;"}}
KERNELS = {"sm_90a": "stored-bf16-64x64-264x64x136", "sm_80": "bf16-plain-40x72x144"}
FOUND = (AsyncCopyError, BarrierError, RaceError, UninitializedError)


@cache
def compiled(arch, name):
    (case,) = (c for c in cases() if c.name.endswith(f"/{name}"))
    entry, arguments = case.entry()
    program = prepare(entry, arguments, "ptx", case.grid)
    generator = get_backend(f"ptx:{arch}")
    return program, generator, generator.emit(program.levels["tile"], {})


def run(arch, name, without=None):
    program, generator, artifact = compiled(arch, name)
    lines = artifact.text(TEXT_FILE).split("\n")
    text = "\n".join(line for number, line in enumerate(lines) if number != without)
    arrays = [np.copy(a) if isinstance(a, np.ndarray) else a for a in program.arrays]
    generator.sanitized(Artifact(artifact.manifest, {TEXT_FILE: text}))(arrays)
    return arrays


def find_unnoticed(arch, name):
    """The instructions without which nothing is found, by their text."""
    run(arch, name)
    unnoticed = {}
    lines = compiled(arch, name)[2].text(TEXT_FILE).split("\n")
    for number in (n for n, line in enumerate(lines) if SYNCHRONISES.match(line)):
        try:
            run(arch, name, without=number)
        except FOUND:
            continue
        unnoticed[number] = lines[number].strip()
    return unnoticed


@pytest.mark.parametrize("arch", KERNELS)
def test_without_any_of_them_an_error_is_found(arch):
    assert set(find_unnoticed(arch, KERNELS[arch]).values()) <= UNNEEDED[arch]


@pytest.mark.parametrize(("keys", "values", "length"), [(128, 64, 128), (64, 128, 256)])
def test_a_stage_holds_the_larger_of_the_blocks_that_pass_through_it(keys, values, length):
    """Blocks of keys and of values take turns in the stages of attention; none lies in two of them."""
    rng, generator = np.random.default_rng(0), get_backend("ptx:sm_90a")
    sizes = ((1, 1, 64, keys), (1, 1, length, keys), (1, 1, length, values))
    q, k, v = (rng.standard_normal(s).astype(bf16.numpy) for s in sizes)
    attend = ts.jit(lambda q, k, v: ts.scaled_dot_product_attention(q, k, v))
    artifact = generator.emit(prepare(attend, (q, k, v), "ptx").levels["tile"], {})
    assert "wgmma" in artifact.text(TEXT_FILE)
    (found,) = generator.sanitized(artifact)([q, k, v])
    a, b, c = (x.astype(np.float64) for x in (q, k, v))
    weights = np.exp(a @ b.swapaxes(2, 3) / np.sqrt(keys))
    np.testing.assert_allclose(found.astype(np.float64), weights @ c / weights.sum(-1, keepdims=True), atol=5e-3)


def test_an_architecture_after_a_colon():
    _, generator, artifact = compiled("sm_90a", KERNELS["sm_90a"])
    assert ".target sm_90a" in artifact.text(TEXT_FILE) and artifact.manifest["target"] == generator.name == "ptx"
    with pytest.raises(ArgumentError, match="no architecture sm_10"):
        get_backend("ptx:sm_10")
