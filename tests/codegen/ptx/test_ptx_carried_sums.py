"""Sums of asynchronous products that a loop carries: drawn loops in the PTX emulator's debug mode, against NumPy."""

import importlib.util
import random

import numpy as np
import pytest

from tessera.codegen.contract import get_backend
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import bf16
from tessera.runtime.program import prepare

HEAD = """
import tessera as ts
from tessera import tile

@ts.kernel
def add_products(a, b, c, out):
    rows = tile.load(a[0:64, 0:64])
    x, y = tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, b.shape[0], 64):
"""
TAIL = """
    tile.store(out[0:64, 0:64], x)
    tile.store(out[64:128, 0:64], y)
"""
LOAD = "tile.load({}[k : k + 64, 0:64])"


def draw_round(draw):
    """The statements of a round: products that add to sums of this round, to those of the one before, or to none."""
    held, lines = ["x", "y"], []
    for number in range(draw.choice([1, 2, 2, 3])):
        name, product = f"v{number}", f"tile.dot(rows, {LOAD.format(draw.choice('bc'))})"
        before = draw.choice(["x", "y", *held, None])
        form = draw.choice(["{} + {}"] * 5 + ["{} * 0.5 + {}"])
        lines.append(f"{name} = {product if before is None else form.format(before, product)}")
        held.append(name)
        if draw.random() < 0.2:
            lines.append(f"u{number} = {name} + {draw.choice(held)} * 0.25")
            held.append(f"u{number}")
    made = [name for name in held if name not in "xy"]
    return [*lines, f"x, y = {draw.choice(made)}, {draw.choice([*made, draw.choice(held)])}"]


class Tile:
    """The functions of a round on arrays of NumPy."""

    dot, load = staticmethod(np.matmul), staticmethod(np.asarray)


def expect(lines, a, b, c):
    names = {"rows": a, "b": b, "c": c, "x": np.zeros((64, 64)), "y": np.zeros((64, 64)), "tile": Tile}
    for names["k"] in range(0, b.shape[0], 64):
        exec("\n".join(lines), names)
    return np.concatenate([names["x"], names["y"]])


# `y` gets the registers of `x`, to which a product is added, while the product of the round before is in flight.
HALVED = [
    f"v = x + tile.dot(rows, {LOAD.format('b')})",
    f"w = x + tile.dot(rows, {LOAD.format('c')})",
    "x, y = v * 0.5, w",
]


@pytest.mark.parametrize("seed", (*range(12), 47, 75, 142, 159))
def test_sums_keep_their_registers_until_they_are_read(seed, tmp_path):
    draw = random.Random(seed)
    check(draw_round(draw), draw.choice([64, 128, 192]), seed, tmp_path)


def test_a_sum_that_begins_with_another_one_waits_for_its_registers(tmp_path):
    check(HALVED, 192, 0, tmp_path)


def check(lines, length, seed, tmp_path):
    """A loop in the emulator's debug mode, against NumPy."""
    numbers = np.random.default_rng(seed)
    file = tmp_path / "program.py"
    file.write_text(HEAD + "".join(f"        {line}\n" for line in lines) + TAIL)
    spec = importlib.util.spec_from_file_location("program", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    shapes = {"a": (64, 64), "b": (length, 64), "c": (length, 64)}
    given = {name: numbers.integers(-1, 2, shape).astype(bf16.numpy) for name, shape in shapes.items()}
    program = prepare(module.add_products, given | {"out": np.zeros((128, 64), np.float32)}, "ptx", (1,))
    generator = get_backend("ptx:sm_90a")
    artifact = generator.emit(program.levels["tile"], {})
    assert "wgmma.mma_async" in artifact.text(TEXT_FILE)
    generator.sanitized(artifact)(program.arrays)
    np.testing.assert_allclose(program.arrays[-1], expect(lines, *(x.astype("f8") for x in given.values())), rtol=1e-6)
