"""Emitted text compiles in both language versions, on both architectures, with every 16-bit format."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.codegen.csl.text.program_files import make_compile_options
from tessera.interp.target.csl.host import cslc
from tessera.runtime import driver


def block(x, a, b, k):
    hidden = ts.layer_norm(ts.gelu(x @ a + b))
    scores = ts.softmax(hidden @ ts.transpose(k), axis=-1) @ k
    return ts.concatenate([scores, ts.mesh_shift(scores, axis=0, shift=1)], axis=0), ts.argmax(scores, axis=1)


def r(*shape, dtype):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.in_turn("sdk")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("sdk", ["1.4", "2.10"])
def test_compiles(tmp_path, sdk, arch, dtype):
    args = [r(6, 8, dtype=dtype), r(8, 6, dtype=dtype), r(6, dtype=dtype), r(5, 6, dtype=dtype)]
    traced = ts.jit(block).trace(*args).function
    artifact = Csl((2, 3)).emit(driver.lower(traced, "csl:2x3")["tile"], {"arch": arch})
    for name in ("layout.csl", "pe_program.csl"):
        (tmp_path / name).write_text(artifact.text(name))
    flags = make_compile_options(arch, (2, 3), artifact.manifest["options"]["bfloat"])
    flags[1] = str(tmp_path / "layout.csl")
    options = [*flags, "-o", str(tmp_path / "out"), f"--sdk={sdk}"]
    assert cslc.compile_settings(cslc.collect_settings(cslc.make_parser().parse_args(options)))
