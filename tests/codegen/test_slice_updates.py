"""Updates of a slice of a donated argument (`ts.update_slice`): kernels write the elements of the slice alone."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.codegen.donation import find_loose_reads, overwrite_arguments
from tessera.core.types import TensorType
from tessera.ir.core import Attrs
from tessera.ops.dialects import host
from tessera.runtime import driver

CHECKED = {"llvm": "guarded", "ptx": "sanitized"}  # what runs a program and checks its accesses


def lower(function, target, *types):
    """The Tile module of a function whose only result takes the memory of its first argument."""
    traced = ts.jit(function).trace(*types).function
    module = driver.lower(traced, target, {"donated": frozenset({0})})["tile"]
    return overwrite_arguments(module, {0: 0}, (0,))


def list_launches(module):
    return [n for n in module.main.body.nodes if n.op is host.launch]


def write_apart(module):
    """The module as a kernel's, which writes its result to an array of its caller."""
    attrs = {k: v for k, v in module.main.attrs.items() if k != "reused"}
    main = module.main
    return module.replace(
        type(main)(main.name, main.body, Attrs({**attrs, "outputs": 0}), main.loc), *module.functions[1:]
    )


def run(module, engine, arrays):
    if engine == "tile":
        driver.compile_level({"tile": module}, "tile")(arrays)
    else:
        backend = get_backend(engine)
        getattr(backend, CHECKED[engine])(backend.emit(module, {}))(arrays)


def draw(rng, shape, dtype):
    numbers = rng.integers(1, 100, shape)
    return numbers.astype(dtype.numpy)


def select(start, sizes):
    return tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))


SLICES = {  # of arrays of a shape, the starts and the sizes
    "columns": ((36, 85), (0, 0), (36, 4)),
    "odd rows": ((7, 475), (0, 0), (5, 474)),
    "one column": ((9, 128), (0, 0), (9, 1)),
    "long rows, cut in tiles": ((3, 3000), (0, 0), (3, 2503)),
    "many rows of an odd size": ((1031, 8), (0, 0), (1031, 5)),
    "blocks": ((3, 4, 16, 33), (0, 0, 0, 0), (3, 3, 16, 16)),
    "inside": ((40, 50), (3, 7), (11, 13)),
    "inside, cut in tiles": ((3, 3000), (1, 300), (2, 2503)),
    "one element": ((5, 6), (2, 3), (1, 1)),
    "a row": ((5, 6), (4, 0), (1, 6)),
    "all": ((5, 6), (0, 0), (5, 6)),
}


@pytest.mark.parametrize("dtype", [ts.f16, ts.f32, ts.int64, ts.int8, ts.bool], ids=str)
@pytest.mark.parametrize("engine", ["tile", *CHECKED])
@pytest.mark.parametrize("name", SLICES)
def test_the_slice_alone_is_written(name, engine, dtype, rng):
    shape, start, sizes = SLICES[name]
    inside = select(start, sizes)

    def update(x, y):
        old = x[inside]
        return ts.update_slice(x, ts.where(y, y, old) if dtype is ts.bool else old + y, start=start)

    types = TensorType(shape, dtype), TensorType(sizes, dtype)
    module = lower(update, "llvm" if engine == "tile" else engine, *types)
    assert "reused" in module.main.attrs and len(list_launches(module)) == 1 and len(module.functions) == 2
    x, y = (draw(rng, t.shape, t.dtype) for t in types)
    out = np.zeros(shape, x.dtype)  # which has no element of x
    run(write_apart(module), engine, [x, y, out])
    want = np.zeros(shape, x.dtype)
    want[inside] = (y | x[inside]) if dtype is ts.bool else x[inside] + y
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("target", CHECKED)
@pytest.mark.parametrize("name", SLICES)
def test_a_donated_argument_is_updated_where_it_lies(name, target, rng):
    shape, start, sizes = SLICES[name]
    inside = select(start, sizes)
    step = ts.jit(lambda x, y: ts.update_slice(x, x[inside] * y, start=start), target=target, donate=("x",))
    want, y = draw(rng, shape, ts.f32), draw(rng, sizes, ts.f32)
    x, place = ts.tensor(want, device="ptx" if target == "ptx" else "cpu"), None
    for _ in range(3):
        x = step(x, y)
        want[inside] *= y
        found = getattr(x.data, "address", None) or x.data.ctypes.data
        assert place in (None, found)
        place = found
    np.testing.assert_array_equal(x.numpy(), want)


READS = {  # what reads other elements than those that it overwrites, or reads them in another program
    "shifted": lambda x: x[:, 1:1001] + x[:, :1000],
    "reversed": lambda x: ts.flip(x[:, :1000], 0),
    "turned": lambda x: x[:, :300].T,
    "scattered": lambda x: ts.flip(x[:, :1511], 1),
}


@pytest.mark.parametrize("target", CHECKED)
@pytest.mark.parametrize("name", READS)
def test_what_is_read_elsewhere_is_not_overwritten(name, target, rng):
    compute = READS[name]

    def update(x):
        return ts.update_slice(x, compute(x), start=(0, 0))

    x = draw(rng, (300, 2000), ts.f32)
    want = x.copy()
    part = compute(ts.tensor(x)).numpy()
    want[select((0, 0), part.shape)] = part
    assert "reused" not in lower(update, target, TensorType(x.shape, ts.f32)).main.attrs
    for donate in ((), ("x",)):
        given = ts.tensor(x, device="ptx" if target == "ptx" else "cpu")
        np.testing.assert_allclose(ts.jit(update, target=target, donate=donate)(given).numpy(), want, rtol=1e-6)


def test_two_slices_are_updated_by_a_launch_each(rng):
    """The copies of their arrays, which are small and alike, are not joined: each is left out."""

    def update(x, y):
        a, b = x[:, :4], y[:, :3]
        return ts.update_slice(x, a + 1.0, start=(0, 0)), ts.update_slice(y, b * 2.0 + ts.sum(a), start=(0, 0))

    for target in CHECKED:
        traced = ts.jit(update).trace(*[TensorType((8, 8), ts.f32)] * 2).function
        module = driver.lower(traced, target, {"donated": frozenset({0, 1})})["tile"]
        module = overwrite_arguments(module, {0: 0, 1: 1}, (1,))
        kernels = {f.name for f in module.functions[1:]}
        assert {n.attrs["kernel"] for n in list_launches(module)} == kernels and (3, 1) in module.main.attrs["reused"]


def give_twice(x, new):
    """New elements that are a result, too."""
    return ts.update_slice(x, ts.reshape(new, shape=(8, 4)), start=(0, 0)), new, ts.sum(new)


SEVERAL = {  # updates of slices of two arguments: what they and other kernels read is overwritten after they have
    "swapped": lambda x, y: (ts.update_slice(x, y[:, :4], start=(0, 0)), ts.update_slice(y, x[:, :4], start=(0, 0))),
    "turned": lambda x, y: (
        ts.update_slice(x, y[:4].T, start=(0, 0)),
        ts.update_slice(y, x[:, :4] * 2.0, start=(0, 2)),
    ),
    "a result": lambda x, y: (ts.update_slice(x, x[:, :4] + 1.0, start=(0, 0)), y, ts.sum(x[1:3].T, axis=0)),
    "held in memory": lambda x, y: give_twice(x, ts.reshape(ts.flip(x[:, :4], 0), shape=(32,))),
}


@pytest.mark.parametrize("target", CHECKED)
@pytest.mark.parametrize("name", SEVERAL)
def test_all_reads_come_before_the_slice_is_overwritten(name, target, rng):
    compute, arrays = SEVERAL[name], [draw(rng, (8, 8), ts.f32) for _ in range(2)]
    want = [t.numpy() for t in compute(*map(ts.tensor, arrays))]
    traced = ts.jit(compute).trace(*arrays).function
    module = overwrite_arguments(driver.lower(traced, target, {"donated": frozenset({0, 1})})["tile"], {0: 0}, (0,))
    assert dict(module.main.attrs["reused"]) == {2: 0}
    assert len([n for n in list_launches(module) if module.main.params[2] in n.args]) == 1
    given = [ts.tensor(x, device="ptx" if target == "ptx" else "cpu") for x in arrays]
    for found, right in zip(ts.jit(compute, target=target, donate=("x",))(*given), want, strict=True):
        np.testing.assert_allclose(found.numpy(), right, rtol=1e-6)


def test_results_that_are_no_updates_are_no_parts():
    """A function that computes all of the array writes all of it."""
    traced = ts.jit(lambda x: x * 2.0).trace(TensorType((8, 8), ts.f32)).function
    module = driver.lower(traced, "llvm", {"donated": frozenset({0})})["tile"]
    assert "reused" in overwrite_arguments(module, {0: 0}).main.attrs
    assert "reused" not in overwrite_arguments(module, {0: 0}, (0,)).main.attrs


def test_reads_beyond_what_is_used():
    """Partial tiles read what is beside the slice; others read what their points need."""
    update = lambda x, y: ts.update_slice(x, x[:, : y.shape[1]] + y, start=(0, 0))  # noqa: E731
    for columns, loose in ((256, ()), (1511, (0,))):
        module = lower(update, "ptx", TensorType((70, 2000), ts.f32), TensorType((70, columns), ts.f32))
        assert find_loose_reads(module) & {0} == set(loose)
    fill = lambda x, y: ts.update_slice(x, ts.broadcast_to(y, shape=(70, 1511)), start=(0, 0))  # noqa: E731
    assert 0 not in find_loose_reads(lower(fill, "ptx", TensorType((70, 2000), ts.f32), TensorType((), ts.f32)))
