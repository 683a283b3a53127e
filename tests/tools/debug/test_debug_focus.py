"""Under `--checked` the debugger stands at the program and tile that the finding names, in jit functions too."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import NonFiniteError, TesseraError


@ts.kernel
def outside(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    p = tile.program_id(0)
    i = p * 8 + 32 * (p == 5)
    tile.store(out[p * 8 : p * 8 + 8], tile.load(x[i : i + 8]))


@ts.kernel
def race(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    p = tile.program_id(0)
    q = p - 1 * (p == 6)
    tile.store(out[q * 8 : q * 8 + 8], x[p * 8 : p * 8 + 8])


@ts.kernel
def infinite(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    p = tile.program_id(0) * 8 + tile.local_id()
    out[p] = 1.0 / (x[p] - 37.0)


@ts.kernel
def unwritten(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    t = tile.local_id()
    s = tile.alloc_shared((8,), ts.f32)
    if t != 3:
        s[t] = x[t]
    out[t] = s[t]


@ts.kernel
def divergent(x: ts.Tensor["N"], out: ts.Tensor["N"]):
    p, t = tile.program_id(0), tile.local_id()
    if (p == 2) & (t > 5):
        tile.barrier()
    out[p * 8 + t] = x[t]


WRONG = {
    "outside": (outside, 8, 1, (5,)),
    "race": (race, 8, 1, (5,)),
    "infinite": (infinite, 8, 8, (4, 5)),
    "unwritten": (unwritten, 1, 8, (0, 3)),
    "divergent": (divergent, 8, 8, (2, 6)),
}


@pytest.mark.parametrize(("kernel", "grid", "group", "instance"), WRONG.values(), ids=WRONG)
def test_focus_goes_to_what_the_finding_names(kernel, grid, group, instance):
    x, said = np.arange(64, dtype=np.float32), []
    with pytest.raises(TesseraError) as caught, ts.debug.checked(nan=True):
        with ts.debug.session("continue; print p", write=said.append):
            kernel[(grid,), group](x, np.zeros_like(x))
    assert caught.value.instance == instance
    where = f"program ({instance[0]},)" + (f", tile {instance[1]}" if group > 1 else "")
    position = next(line for line in said[2:] if line.startswith(">"))
    assert f", {where} (" in position


@ts.jit
def logarithm(x):
    y = x - 4.0
    return ts.log(y) + 1.0


def test_the_graph_of_a_jit_function_is_checked():
    x, said = np.float32([8, 9, 3]), []
    with pytest.raises(NonFiniteError, match=r"ts.log makes nan of finite operands: element \(2,\)") as caught:
        with ts.debug.checked(nan=True), ts.debug.session("continue; print y[2]", write=said.append):
            logarithm.stepped(x)
    assert caught.value.location.line == logarithm.location.line + 3
    assert any("y[2] = -1" in text for text in said)
    with ts.debug.checked(nan=True, collect=True) as report:
        logarithm(x)
    assert report.kinds == ["non-finite"]
    with ts.debug.checked():
        assert np.isnan(np.asarray(logarithm(x))[2])
