"""Results in the memory of donated arguments: launches with branches, and what a later store still reads."""

import numpy as np
import pytest

import tessera as ts
from tessera import optim, tile
from tessera.codegen.donation import _EntryUses, _find_pairs, find_reusable
from tessera.ops.dialects import host
from tessera.runtime.program import prepare

SHAPES = [(2048,), (37,), (64, 96), (2100,), (4096, 3)]

OPTIMIZERS = [
    optim.AdamW(), optim.SGD(momentum=0.9, nesterov=True), optim.RMSprop(centered=True), optim.Adam(amsgrad=True),
    optim.Lion(), optim.Adagrad(lr_decay=0.1),
]  # fmt: skip


def address(tensor):
    return getattr(tensor.data, "address", None) or tensor.data.ctypes.data


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("target", ["cpu", "ptx"])
def test_a_multi_tensor_update_is_in_place(optimizer, target):
    rng = np.random.default_rng(0)
    device = "ptx" if target == "ptx" else "cpu"
    arrays = {str(i): rng.standard_normal(s).astype(np.float32) for i, s in enumerate(SHAPES)}
    make = lambda: {n: ts.tensor(a, device=device) for n, a in arrays.items()}  # noqa: E731
    params, grads, state = make(), make(), optimizer.init(make())
    plain, in_place = (ts.jit(optimizer.update, target=target, donate=d) for d in ((), ("params", "state")))
    want = make(), optimizer.init(make())
    places = None
    for _ in range(3):
        params, state = in_place(params, grads, state)
        want = plain(want[0], grads, want[1])
        held = [address(t) for t in ts.tree.leaves([params, state]) if t.ndim]
        assert places in (None, held)
        places = held
    for (path, a), b in zip(ts.tree.leaves_with_path([params, state]), ts.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=path)


@ts.kernel
def double_and_add(x, y, doubled, total, *, block: int = 32):
    i = tile.program_id(0) * block
    v, w = tile.load(x[i : i + block]), tile.load(y[i : i + block])
    tile.store(doubled[i : i + block], v * 2.0)
    tile.store(total[i : i + block], v + w)


@pytest.mark.parametrize("target", ["cpu", "ptx"])
def test_a_later_store_needs_what_is_overwritten(target):
    """The second result depends on the first argument, whose memory the first result takes."""
    x, y = np.arange(64, dtype=np.float32), np.ones(64, np.float32)
    device = "ptx" if target == "ptx" else "cpu"
    run = ts.jit(
        lambda x, y: ts.launch(double_and_add, (2,), x, y, ts.like(x), ts.like(x)), target=target, donate=("x", "y")
    )
    for _ in range(2):
        a, b = run(ts.tensor(x, device=device), ts.tensor(y, device=device))
        np.testing.assert_array_equal(a.numpy(), x * 2)
        np.testing.assert_array_equal(b.numpy(), x + y)


def test_an_argument_that_some_launch_writes_is_not_given_away():
    """No Graph function writes its arguments: the uses of its launches are changed."""
    arrays = [np.ones((8, 8), np.float32)] * 2
    module = prepare(ts.jit(lambda x, y: (ts.softmax(x) @ y, y)), arrays, "llvm").levels["tile"]
    uses = _EntryUses(module)
    assert len(uses.steps) > 1 and _find_pairs(uses, [0]) == {2: 0}
    node, read, written = uses.steps[0]
    uses.steps[0] = (node, read, {*written, 0})
    assert _find_pairs(uses, [0]) == {}


@pytest.mark.parametrize("read_beside", [False, True])
def test_a_collective_holds_its_memory_until_its_wait(read_beside):
    """Nothing is written where its operand is, and its result is not where something else is still read."""

    def function(x, y, w):
        total = ts.all_reduce(x)
        return (total, ts.sum(y @ w)) if read_beside else (total, ts.tanh(w @ w))

    def find():
        arrays = [np.ones((8, 8), np.float32)] * 3
        module = prepare(ts.jit(function), arrays, "llvm").levels["tile"]
        assert [n.op for n in module.main.body.nodes if n.op in (host.start, host.wait)] == [host.start, host.wait]
        return find_reusable(module, [1] if read_beside else [0])

    assert ts.spmd(find, mesh=ts.Mesh(2), out_specs="ranks")() == [{}, {}]
