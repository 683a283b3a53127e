"""Files and gradient clipping of PyFlame, clipping against PyTorch."""

import numpy as np
import pytest

import tessera as ts
import tessera.pyflame as pf
from tessera.errors import ArgumentError, DTypeError, FileError


def make_trained(steps):
    pf.manual_seed(3)
    model = pf.nn.Sequential([pf.nn.Linear(3, 4), pf.nn.BatchNorm1d(4), pf.nn.Linear(4, 2)])
    optimizer = pf.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    x = pf.tensor(np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32))
    for _ in range(steps):
        optimizer.zero_grad()
        pf.autograd.backward((model(x) * model(x)).sum())
        optimizer.step()


def test_training_goes_on_from_a_file_as_without_it(tmp_path):
    model, optimizer = make_trained(3)
    pf.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.safetensors")
    train(model, optimizer, 2)
    found = pf.load(tmp_path / "a.safetensors")
    other, again = make_trained(0)
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    train(other, again, 2)
    assert found["epoch"] == 3
    for name, x in model.state_dict().items():
        assert (other.state_dict()[name].numpy() == x.numpy()).all(), name


@pytest.mark.parametrize("dtype", list(pf.DType))
def test_every_type_and_container_comes_back(dtype, tmp_path):
    data = {"x": pf.tensor([1, 0, 1], dtype=dtype), "l": [(pf.ones([]), 2), "text", None, True], "array": np.arange(3)}
    found = pf.load(pf.save(data, tmp_path / "x.safetensors"))
    assert found["x"].dtype == dtype and found["x"].numpy().tolist() == [1, 0, 1] and isinstance(found["x"], pf.Tensor)
    assert found["l"][0][0].shape == [] and (found["l"][0][1], *found["l"][1:]) == (2, "text", None, True)
    assert found["array"].numpy().tolist() == [0, 1, 2]


def test_misuse_of_files(tmp_path):
    whole = pf.save({"x": pf.ones([50])}, tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-9])
    for name in ("cut.safetensors", "none.safetensors"):
        with pytest.raises(FileError, match=name):
            pf.load(tmp_path / name)
    with pytest.raises(ArgumentError, match="x cannot be saved"):
        pf.save({"x": object()}, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == whole
    ts.save({"x": ts.ones((2,), dtype=ts.f64)}, tmp_path / "wide.safetensors")
    with pytest.raises(DTypeError, match="f64|float64"):
        pf.load(tmp_path / "wide.safetensors")


@pytest.mark.parametrize("limit", [0.0, 0.3, 5.0, 1e4])
def test_clipping_is_that_of_torch(limit):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    for ours, theirs in ((pf.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_norm_),
                         (pf.nn.utils.clip_grad_value_, torch.nn.utils.clip_grad_value_)):  # fmt: skip
        a, b = pf.nn.Parameter(pf.tensor(x)), pf.nn.Parameter(pf.tensor([2.0]))
        unused = pf.nn.Parameter(pf.ones([2]))
        pf.autograd.backward((a * a).sum() * b.sum())
        held = [torch.tensor(p.numpy(), requires_grad=True) for p in (a, b)]
        ((held[0] * held[0]).sum() * held[1].sum()).backward()
        found, want = ours([a, b, unused], limit), theirs(held, limit)
        assert want is None or found.item() == pytest.approx(want.item(), rel=1e-6)
        for p, t in zip((a, b), held, strict=True):
            np.testing.assert_allclose(p.grad.numpy(), t.grad.numpy(), rtol=1e-6)
        assert unused.grad is None


def test_misuse_of_clipping():
    parameters = pf.nn.Linear(2, 2).parameters()
    assert pf.nn.utils.clip_grad_norm_(parameters, 1.0).item() == 0  # none has a gradient
    w = pf.nn.Parameter(pf.ones([2]))
    pf.autograd.backward(w.sum())
    for clip in (pf.nn.utils.clip_grad_norm_, pf.nn.utils.clip_grad_value_):
        for limit in (-1.0, float("nan")):
            with pytest.raises(ArgumentError, match=r"(max_norm|limit) is (-1|nan)"):
                clip(w, limit)
        with pytest.raises(ArgumentError, match="not a parameter"):
            clip([1.0], 1.0)
    with pytest.raises(ArgumentError, match="another norm"):
        pf.nn.utils.clip_grad_norm_(w, 1.0, norm_type=1)
    assert w.grad.numpy().tolist() == [1, 1]
