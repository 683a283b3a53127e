"""The training loop: runs, metrics, checkpoints that resume bit for bit, and NaNs that name their op."""

import csv

import numpy as np
import pytest

import tessera as ts
from tessera import nn, optim

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 6)).astype(np.float32)
Y = (X @ RNG.standard_normal((6, 1)).astype(np.float32)).astype(np.float32)


def make_model():
    ts.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def loss(model, x, y):
    return ts.mse_loss(model(x), y)


def make_loop(folder, target="interp", **options):
    """A loop; what it does between steps does not depend on how a step is compiled."""
    return ts.train.Loop(make_model(), optim.Adam(lr=0.05), loss, target=target, progress=False, **options)


def data():
    return ts.train.Batches(X, Y, size=8, seed=1)


def test_the_loss_falls_and_statistics_are_kept(tmp_path):
    loop = make_loop(tmp_path, "cpu")
    history = loop.run(data(), epochs=8)
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]
    assert loop.model[1].num_batches_tracked.item() == 40 == loop.step
    assert all(0 < row["examples/s"] < 1e8 for row in history)  # a step takes more than 80 ns


def test_resume_continues_bit_for_bit(tmp_path):
    whole = make_loop(tmp_path, "cpu", csv=tmp_path / "a.csv")
    whole.run(data(), epochs=3)
    first = make_loop(tmp_path, "cpu", checkpoint=tmp_path / "c", csv=tmp_path / "b.csv")
    first.run(data(), steps=7)  # in the middle of the second epoch
    second = make_loop(tmp_path, "cpu", checkpoint=tmp_path / "c", csv=tmp_path / "b.csv")
    ts.manual_seed(99)
    assert second.resume() == 7
    second.run(data(), epochs=3)
    for name, tensor in whole.model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), second.model.state_dict()[name].numpy(), err_msg=name)
    texts = [(tmp_path / f"{n}.csv").read_text().splitlines() for n in "ab"]
    rows = [[(r["step"], r["loss"]) for r in csv.DictReader(text)] for text in texts]
    assert rows[0] == rows[1]


def test_checkpoints_are_pruned_and_checked(tmp_path):
    loop = make_loop(tmp_path, checkpoint=tmp_path, checkpoint_every=2, keep=2)
    loop.run(data(), steps=6)
    files = sorted(tmp_path.glob("step-*"))
    assert [f.name for f in files] == ["step-00000004.safetensors", "step-00000006.safetensors"]
    files[-1].write_bytes(files[-1].read_bytes()[:-9])
    with pytest.raises(ts.errors.FileError, match="step-00000006"):
        make_loop(tmp_path, checkpoint=tmp_path).resume()
    other = ts.train.Loop(nn.Linear(6, 1), optim.Adam(), loss)
    with pytest.raises(ts.errors.StateDictError, match=r"model\.weight is missing"):
        other.resume(files[0])
    assert make_loop(tmp_path).resume(files[0]) == 4


def test_a_nan_names_its_op_and_keeps_the_model():
    model = nn.Linear(6, 1)
    loop = ts.train.Loop(model, optim.SGD(lr=0.1), lambda m, x: ts.log(m(x) * 0.0).mean(), target="cpu", progress=False)
    with pytest.raises(ts.errors.NonFiniteError, match=r"in step 1: ts\.log"):
        loop.run([X])
    assert loop.step == 0
    for before, after in zip(model.parameters(), loop.model.parameters(), strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())
    with pytest.raises(ts.errors.NonFiniteError, match=r"array 0 of the batch holds NaN"):
        ts.train.Loop(model, optim.SGD(lr=0.1), lambda m, x: m(x).mean(), progress=False).run([X * np.nan])


def test_a_nan_gradient_names_its_op():
    model = nn.Linear(6, 1, bias=False)
    loop = ts.train.Loop(
        model, optim.SGD(lr=0.1), lambda m, x: ts.sqrt(m(x) * 0.0).mean(), target="cpu", progress=False
    )
    with pytest.raises(ts.errors.NonFiniteError, match=r"norm of the gradients is nan in step 1: ts\.") as caught:
        loop.run([X])
    assert "ts.sqrt" in str(caught.value)  # the line of the loss
    np.testing.assert_array_equal(loop.model.weight.numpy(), model.weight.numpy())
    rates = ts.train.Loop(model, optim.SGD(lr=lambda t: t * float("nan")), lambda m, x: m(x).mean(), progress=False)
    with pytest.raises(ts.errors.NonFiniteError, match="the learning rate is nan in step 1"):
        rates.run([X])


def test_a_second_run_adds_to_the_metrics(tmp_path):
    loop = make_loop(tmp_path, csv=tmp_path / "a.csv")
    loop.run([(X, Y)], epochs=1)
    loop.run([(X, Y)], epochs=3)
    assert [r["step"] for r in csv.DictReader((tmp_path / "a.csv").read_text().splitlines())] == ["1", "2", "3"]


def test_batches_of_other_libraries(tmp_path):
    torch = pytest.importorskip("torch")
    np.save(tmp_path / "x.npy", X)
    held = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    ways = [
        torch.utils.data.DataLoader(held, batch_size=20),
        ts.train.Batches(np.load(tmp_path / "x.npy", mmap_mode="r"), Y, size=20, shuffle=False),
        [{"x": X[:20], "y": Y[:20]}, {"y": Y[20:], "x": X[20:]}],
        ((X[i : i + 20], ts.Tensor(Y[i : i + 20])) for i in (0, 20)),
    ]
    layer = nn.Linear(6, 1)
    runs = [
        ts.train.Loop(layer, optim.SGD(lr=0.1), lambda model, x, y: loss(model, x, y), progress=False).run(way)
        for way in ways
    ]
    assert len({tuple(row["loss"] for row in run) for run in runs}) == 1


@pytest.mark.parametrize(
    "wrong",
    [lambda m, x, y: 3, lambda m, x, y: (loss(m, x, y), 3.0), lambda m, x, y: m(x)],
    ids=["int", "pair", "vector"],
)
def test_a_loss_that_is_none_is_a_typed_error(wrong):
    with pytest.raises(ts.errors.TesseraError):
        ts.train.Loop(make_model(), optim.SGD(), wrong, progress=False).run(data())


def test_tensorboard_reads_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loop = make_loop(tmp_path, tensorboard=tmp_path)
    history = loop.run(data(), epochs=1)
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    np.testing.assert_allclose([e.value for e in read.Scalars("loss")], [r["loss"] for r in history], rtol=1e-6)


@pytest.mark.parametrize(
    "batches", [[[1.0]], iter([]), 3, [{"x": X[:4], "z": Y[:4]}]], ids=["rank", "empty", "number", "name"]
)
def test_bad_data_is_a_typed_error(batches, tmp_path):
    with pytest.raises(ts.errors.TesseraError):
        make_loop(tmp_path).run(batches)


def test_a_loss_scale_skips_steps_that_overflow():
    model = nn.Linear(6, 1).to(ts.f16)
    scaler = ts.LossScaler(scale=2.0**30, interval=1000)
    loop = ts.train.Loop(
        model, optim.SGD(lr=0.01), lambda m, x: (m(x) * m(x)).mean(), scaler=scaler, target="cpu", progress=False
    )
    history = loop.run([X.astype(np.float16)] * 20, epochs=1)
    assert history[-1]["scale"] < 2.0**30
    assert history[-1]["loss"] < history[0]["loss"]
    assert loop.state["step"].item() < 20


def test_a_batch_that_does_not_fit_the_loss_is_named(tmp_path):
    for batch, text in (((X,), "missing a required argument: 'y'"), ({"x": X, "z": Y}, "missing a required argument")):
        with pytest.raises(ts.errors.ArgumentError, match=text):
            make_loop(tmp_path).run([batch])
        with pytest.raises(ts.errors.ArgumentError, match=text):
            ts.train.evaluate(loss, make_model(), [batch])


@pytest.mark.parametrize("options", [{"epochs": -1}, {"epochs": 1.5}, {"steps": -3}, {"steps": "all"}])
def test_a_run_of_no_count_is_a_typed_error(options, tmp_path):
    with pytest.raises(ts.errors.ArgumentError, match=f"{next(iter(options))} is"):
        make_loop(tmp_path).run(data(), **options)


@pytest.mark.parametrize("name", ["loss", "lr", "norm", "step"])
def test_a_metric_does_not_hide_one_of_the_loop(name):
    loop = ts.train.Loop(
        make_model(), optim.SGD(lr=0.1), lambda m, x, y: (loss(m, x, y), {name: x.mean()}), progress=False
    )
    with pytest.raises(ts.errors.ArgumentError, match=f"'{name}' has a name of the loop"):
        loop.run(data())


def test_resume_without_a_folder_says_so(tmp_path):
    with pytest.raises(ts.errors.ArgumentError, match="no folder for checkpoints"):
        make_loop(tmp_path).resume()


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"keep": 1.0}, {"checkpoint_every": -1}])
def test_checkpoints_of_no_count_are_refused(options, tmp_path):
    with pytest.raises(ts.errors.ArgumentError, match=f"{next(iter(options))} is"):
        make_loop(tmp_path, checkpoint=tmp_path, **options)


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_a_step_that_is_left_out_scales_no_rows(target):
    """`max_norm` and batch norm renew what a step holds; of a step that overflows or is NaN nothing stays."""
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(np.full((4, 3), 2.0, np.float32))
    before = {name: x.numpy().copy() for name, x in model.state_dict().items()}
    batch = [(np.array([0, 2, 2]), np.float32(np.inf))]
    for scaler in (None, ts.LossScaler(scale=4.0)):
        loop = ts.train.Loop(model, optim.AdamW(lr=0.1), lambda m, x, by: (m(x) * by).sum(), scaler=scaler,
                             target=target, progress=False)  # fmt: skip
        with pytest.raises(ts.errors.NonFiniteError):
            loop.run(batch)
        for name, x in loop.model.state_dict().items():
            np.testing.assert_array_equal(x.numpy(), before[name], name)
    loop.run([(np.array([0, 2, 2]), np.float32(1.0))])
    sizes = np.linalg.norm(loop.model[0].weight.numpy(), axis=1)
    assert (sizes[[0, 2]] < 1.5).all() and (sizes[[1, 3]] > 3.0).all()


@pytest.mark.parametrize("at", [2, 3, 6])
def test_a_run_goes_on_from_within_and_from_the_end_of_an_epoch(at, tmp_path):
    def make(folder):
        ts.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        return ts.train.Loop(model, optim.Adam(lr=0.1), lambda m, x, y: ts.mse_loss(m(x), y), checkpoint=folder,
                             checkpoint_every=1, keep=9, progress=False)  # fmt: skip

    batches = ts.train.Batches(X[:24], Y[:24], size=8)  # three to an epoch
    whole = make(tmp_path).run(batches, epochs=9, steps=8)
    loop = make(None)
    assert loop.resume(tmp_path / f"step-{at:08d}.safetensors") == at
    rest = loop.run(batches, epochs=9, steps=8)
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[at:]]


def test_a_folder_of_another_run(tmp_path):
    """A new run beside the checkpoints of a longer one would be lost: `resume` takes the latest."""
    make_loop(tmp_path, checkpoint=tmp_path / "c").run(data(), steps=4)
    again = make_loop(tmp_path, checkpoint=tmp_path / "c")
    with pytest.raises(ts.errors.ArgumentError, match="has a checkpoint of step 4, and this run is at step 0") as error:
        again.run(data(), steps=2)
    assert "loop.resume()" in error.value.suggestion and again.step == 0
    assert again.resume() == 4 and len(again.run(data(), steps=5)) == 1


def test_the_module_that_makes_nan_is_named_once():
    class Root(nn.Module):
        def forward(self, x):
            return ts.sqrt(x)

    class Model(nn.Module):
        def __init__(self):
            self.weight, self.blocks = nn.Parameter([1.0]), [Root(), Root()]

        def forward(self, x):
            return (self.blocks[1](self.blocks[0](x * self.weight) - 4.0)).sum()

    loop = ts.train.Loop(Model(), optim.SGD(0.1), lambda model, x: model(x), target="cpu", progress=False)
    with pytest.raises(ts.errors.NonFiniteError, match=r"sqrt makes nan .*\(in blocks\.1: Root\)") as found:
        loop.run([(np.float32([9.0]),)])
    assert str(found.value).count("(in ") == 1
