"""Threads meet between a store by one of them and a load by all; accesses by threads of their own need no meeting."""

import numpy as np
import pytest
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.interp.target.ptx import PtxModule
from tessera.runtime.program import prepare


@ts.kernel
def total(x, out):
    i = tile.program_id(0)
    kept = tile.alloc_register((1,), ts.f32)
    kept[0] = 0.0
    kept[0] += x[i]
    out[i] = kept[0]


@ts.kernel
def doubled(x, out):
    kept = tile.alloc_shared((256,), ts.f32)
    tile.store(kept[0:256], tile.load(x[0:256]))
    tile.store(out[0:256], tile.load(kept[0:256]) * 2.0)


@pytest.mark.parametrize("kernel,size,meets", [(total, 4, True), (doubled, 256, False)])
def test_who_meets(kernel, size, meets):
    x, out = np.arange(size, dtype="f4"), np.zeros(size, "f4")
    artifact = emit_checked(prepare(kernel, (x, out), "interp", (4,) if meets else (1,), None).levels["tile"])
    entry = artifact.manifest["plan"]["entries"][kernel.__name__]
    text = artifact.text(TEXT_FILE)
    assert ("bar.sync" in text) == meets
    PtxModule(text).launch(kernel.__name__, 4 if meets else 1, entry["threads"], [x, out], entry["shared"], debug=True)
    assert (out == (x if meets else 2 * x)).all()
