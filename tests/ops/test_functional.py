"""The functions of torch.nn.functional: values and gradients of PyTorch (tests/fixtures/torch_functional), vmap, types
and errors. The conformance suite runs them on the targets."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError

FOLDER = Path(__file__).parents[1] / "fixtures" / "torch_functional"
DATA = np.load(FOLDER / "functional.npz")
NAMES = sorted(k.removesuffix("/out") for k in DATA.files if k.endswith("/out"))
OTHER = {
    "celu 2": lambda x: ts.celu(x, alpha=2.0),
    "hardtanh 2": lambda x: ts.hardtanh(x, -0.5, 2.0),
    "softshrink 1": lambda x: ts.softshrink(x, 1.0),
    "hardshrink 1": lambda x: ts.hardshrink(x, lambd=1.0),
    "softplus beta": lambda x: ts.softplus(x, 2.0, 3.0),
    "threshold": lambda x: ts.threshold(x, 0.5, -2.0),
    "rrelu": lambda x: ts.rrelu(x, 0.1, 0.5),
    "group_norm": lambda x, w, b: ts.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: ts.instance_norm(x, weight=w, bias=b),
    "instance_norm known": lambda x, m: ts.instance_norm(
        x, ts.stop_gradient(m), ts.stop_gradient(m) ** 2 + 0.5, use_input_stats=False
    ),
    "local_response_norm": lambda x: ts.local_response_norm(x, 3, 0.5, 0.7, 2.0),
    "lp_normalize 3": lambda x: ts.lp_normalize(x, p=3.0),
    "conv1d same": lambda x, w: ts.conv1d(x[:, :3], w, padding="same", dilation=2),
    "conv3d": lambda x, w: ts.conv3d(x, w, stride=(1, 2, 1), padding=(1, 0, 1)),
    "conv_transpose1d": lambda x, w: ts.conv_transpose1d(x, w, stride=2, padding=1),
    "conv_transpose2d": lambda x, w: ts.conv_transpose2d(x, w, None, (2, 1), (1, 2), (1, 0), 2, (1, 2)),
    "conv_transpose3d": lambda x, w: ts.conv_transpose3d(x, w, stride=(1, 2, 2)),
    "im2col": lambda x: ts.im2col(x, (3, 2), dilation=(1, 2), padding=1, stride=(2, 1)),
    "col2im": lambda x: ts.col2im(x, (5, 7), (2, 3), dilation=(2, 1), padding=(1, 0), stride=(2, 1)),
    "max_pool1d": lambda x: ts.max_pool1d(x, 3, 2, 1),
    "max_pool2d ceil": lambda x: ts.max_pool2d(x, (3, 2), 2, 1, ceil_mode=True, return_indices=True),
    "max_pool2d dilated": lambda x: ts.max_pool2d(x, 2, 1, dilation=(2, 3), return_indices=True),
    "max_pool3d": lambda x: ts.max_pool3d(x, 2, 1, 1, return_indices=True),
    "avg_pool1d": lambda x: ts.avg_pool1d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d ceil": lambda x: ts.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d inside": lambda x: ts.avg_pool2d(x, 3, 2, 1, True, False),
    "avg_pool2d divisor": lambda x: ts.avg_pool2d(x, 2, divisor_override=3),
    "avg_pool3d": lambda x: ts.avg_pool3d(x, 2, 1, 1),
    "lp_pool1d": lambda x: ts.lp_pool1d(ts.abs(x), 3.0, 2),
    "lp_pool2d": lambda x: ts.lp_pool2d(x, 2.0, (2, 3), 1),
    "lp_pool3d": lambda x: ts.lp_pool3d(x, 2.0, 2),
    "adaptive_avg_pool1d": lambda x: ts.adaptive_avg_pool1d(x, 3),
    "adaptive_avg_pool2d": lambda x: ts.adaptive_avg_pool2d(x, (4, None)),
    "adaptive_avg_pool3d": lambda x: ts.adaptive_avg_pool3d(x, (3, 2, 1)),
    "adaptive_max_pool1d": lambda x: ts.adaptive_max_pool1d(x, 3),
    "adaptive_max_pool2d": lambda x: ts.adaptive_max_pool2d(x, (4, 3), return_indices=True),
    "adaptive_max_pool3d": lambda x: ts.adaptive_max_pool3d(x, (3, 2, 1), return_indices=True),
    "fractional_max_pool2d": lambda x, s: ts.fractional_max_pool2d(
        x, (2, 3), (3, 2), return_indices=True, samples=s
    ),
    "fractional_max_pool3d": lambda x, s: ts.fractional_max_pool3d(
        x, 2, output_ratio=0.6, return_indices=True, samples=s
    ),
    "max_unpool1d": lambda x: ts.max_unpool1d(*ts.max_pool1d(x, 2, return_indices=True), 2),
    "max_unpool2d": lambda x: ts.max_unpool2d(*ts.max_pool2d(x, 2, return_indices=True), 2, output_size=(6, 5)),
    "max_unpool3d": lambda x: ts.max_unpool3d(
        *ts.max_pool3d(x, (2, 2, 1), return_indices=True), (2, 2, 1), output_size=(4, 5, 3)
    ),
    "interpolate nearest": lambda x: ts.interpolate(x, (4, 9)),
    "interpolate exact": lambda x: ts.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
    "interpolate linear": lambda x: ts.interpolate(x, scale_factor=1.6, mode="linear"),
    "interpolate bilinear": lambda x: ts.interpolate(x, (9, 3), mode="bilinear"),
    "interpolate corners": lambda x: ts.interpolate(x, (9, 3), mode="bilinear", align_corners=True),
    "interpolate bicubic": lambda x: ts.interpolate(x, (7, 8), mode="bicubic"),
    "interpolate bicubic corners": lambda x: ts.interpolate(x, (7, 8), mode="bicubic", align_corners=True),
    "interpolate trilinear": lambda x: ts.interpolate(x, scale_factor=(1.5, 2.0, 1.0), mode="trilinear"),
    "interpolate area": lambda x: ts.interpolate(x, (4, 3), mode="area"),
    "affine_grid": lambda m: ts.affine_grid(m, (2, 1, 3, 4)),
    "affine_grid corners": lambda m: ts.affine_grid(m, (1, 1, 2, 3, 2), align_corners=True),
    **{f"grid_sample {mode} {pad} {corners}": lambda x, g, m=mode, p=pad, c=corners: ts.grid_sample(x, g, m, p, c)
       for mode in ("bilinear", "nearest", "bicubic") for pad in ("zeros", "border", "reflection")
       for corners in (False, True)},
    "pixel_shuffle": lambda x: ts.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: ts.pixel_unshuffle(x[..., :4], 2),
    "channel_shuffle": lambda x: ts.channel_shuffle(x, 2),
    "embedding_bag": lambda i, w: ts.embedding_bag(w, i),
    "embedding_bag sum": lambda i, w, s: ts.embedding_bag(w, i, mode="sum", per_sample_weights=s),
    "embedding_bag max": lambda i, w, o: ts.embedding_bag(w, i, o, mode="max"),
    "embedding_bag padding": lambda i, w, o: ts.embedding_bag(w, i, o, padding_idx=3),
    "cosine_similarity": lambda x, r: ts.cosine_similarity(x, r[:, None, None]),
    "pairwise_distance 3": lambda x, y: ts.pairwise_distance(x, y, 3.0, keepdims=True),
    "pdist 1": lambda x: ts.pdist(x, 1.0),
    "smooth_l1_loss": lambda x, y: ts.smooth_l1_loss(x, y, beta=2.0, reduction="none"),
    "smooth_l1_loss 0": lambda x, y: ts.smooth_l1_loss(x, y, beta=0.0),
    "hinge_embedding_loss": lambda x, s: ts.hinge_embedding_loss(x, s, margin=1.5, reduction="none"),
    "poisson_nll_loss": lambda x, n: ts.poisson_nll_loss(x, n, full=True),
    "poisson_nll_loss rate": lambda x, n: ts.poisson_nll_loss(x, n, log_input=False),
    "gaussian_nll_loss": lambda x, y, v: ts.gaussian_nll_loss(x, y, v, full=True),
    "gaussian_nll_loss row": lambda x, y, v: ts.gaussian_nll_loss(x, y, v[:, 0]),
    "margin_ranking_loss": lambda x, y, s: ts.margin_ranking_loss(x, y, s, margin=0.5),
    "cosine_embedding_loss": lambda x, y, s: ts.cosine_embedding_loss(x, y, s[:, 0], margin=0.1, reduction="none"),
    "triplet_margin_loss": lambda x, y, z: ts.triplet_margin_loss(x, y, z, swap=True),
    "triplet_margin_with_distance_loss": lambda x, y, z: ts.triplet_margin_with_distance_loss(
        x, y, z, distance_function=lambda a, b: ts.abs(a - b).sum(-1), margin=9.0
    ),
    "multi_margin_loss 2": lambda x, y, w: ts.multi_margin_loss(x, y, 2, 0.5, ts.abs(w), reduction="none"),
    "multilabel_margin_loss": lambda x, y: ts.multilabel_margin_loss(x, y, reduction="none"),
    "nll_loss weighted": lambda x, y, w: ts.nll_loss(ts.log_softmax(x, axis=1), y, w * w),
    "nll_loss ignored": lambda x, y: ts.nll_loss(ts.log_softmax(x, axis=1), y, ignore_index=0, reduction="none"),
    "linear_cross_entropy": lambda x, w, y, b: ts.linear_cross_entropy(x, w[0], y, b),
    "cross_entropy smooth": lambda x, y, w: ts.cross_entropy(x, y, w * w, label_smoothing=0.1),
    "kl_div batchmean": lambda x, p: ts.kl_div(ts.log_softmax(x), p, reduction="batchmean"),
    "kl_div log": lambda x, y: ts.kl_div(ts.log_softmax(x), ts.log_softmax(y), "sum", log_target=True),
    "bce_logits pos_weight": lambda x, p, w: ts.binary_cross_entropy_with_logits(x, p, pos_weight=ts.abs(w)),
    "ctc_loss": lambda x, y: ts.ctc_loss(ts.log_softmax(x), y, [6, 5], [3, 2]),
    "ctc_loss joined": lambda x, y: ts.ctc_loss(ts.log_softmax(x), y, [6, 6], [3, 2], reduction="none"),
    "ctc_loss impossible": lambda x, y: ts.ctc_loss(
        ts.log_softmax(x), y, [3, 4], [3, 2], reduction="sum", zero_infinity=True
    ),
}  # fmt: skip


def function(name):
    return OTHER.get(name) or getattr(ts, name.split()[0])


def inputs(name, given=None):
    return [(given or DATA)[n if given else f"in/{n}"] for n in str(DATA[f"{name}/inputs"]).split()]


def first(result):
    return result[0] if isinstance(result, tuple) else result


def cotangent(shape):
    return np.cos(np.arange(int(np.prod(shape)), dtype=np.float64)).reshape(shape)


def gradients(name, arrays, shape, places):
    loss = lambda *args: (first(function(name)(*args)) * ts.Tensor(cotangent(shape))).sum()  # noqa: E731
    return ts.grad(loss, argnums=tuple(places))(*arrays)


def check(name, arrays, wanted):
    """Compare the values and gradients of a case with those of PyTorch."""
    got = function(name)(*map(ts.Tensor, arrays))
    also = [wanted[f"{name}/also"]] if f"{name}/also" in wanted else []
    for one, other in zip(got if also else [got], [wanted[f"{name}/out"], *also], strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-9, atol=1e-11)
    places = [i for i, a in enumerate(arrays) if f"{name}/grad{i}" in wanted and a.dtype.kind == "f"]
    if places:
        found = gradients(name, arrays, wanted[f"{name}/out"].shape, places)
        for i, g in zip(places, found, strict=True):
            np.testing.assert_allclose(g.numpy(), wanted[f"{name}/grad{i}"], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_as_pytorch(name):
    check(name, inputs(name), DATA)


@pytest.mark.parametrize("name", NAMES)
def test_as_the_installed_pytorch(name):
    """Other inputs than the stored ones."""
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("make_fixture", FOLDER / "make_fixture.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    given = maker.inputs(12)
    check(name, inputs(name, given), maker.made(name, given))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_is_a_loop(name):
    lanes = [[x * scale if x.dtype.kind == "f" else x for x in inputs(name)] for scale in (1.0, 0.7)]
    got = ts.vmap(function(name))(*(np.stack(pair) for pair in zip(*lanes, strict=True)))
    for i, lane in enumerate(lanes):
        want = function(name)(*map(ts.Tensor, lane))
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        for one, other in pairs:
            np.testing.assert_allclose(one.numpy()[i], other.numpy(), rtol=1e-9, atol=1e-11)


BAD_SHAPES = {
    "group_norm": lambda x: ts.group_norm(x, 3),
    "group_norm weight": lambda x: ts.group_norm(x, 2, ts.ones(3)),
    "instance_norm": lambda x: ts.instance_norm(x[:, :, :1, :1]),
    "local_response_norm": lambda x: ts.local_response_norm(x[0, 0], 3),
    "prelu": lambda x: ts.prelu(x, ts.ones(3)),
    "glu": lambda x: ts.glu(x),
    "conv3d": lambda x: ts.conv3d(x, ts.ones((1, 1, 1, 1, 1))),
    "conv_transpose2d": lambda x: ts.conv_transpose2d(x, ts.ones((3, 1, 2, 2))),
    "conv_transpose2d empty": lambda x: ts.conv_transpose2d(x, ts.ones((4, 1, 1, 1)), padding=3),
    "im2col": lambda x: ts.im2col(x[0], 2),
    "col2im": lambda x: ts.col2im(x[0], 4, 2),
    "max_pool1d": lambda x: ts.max_pool1d(x, 2),
    "fractional_max_pool2d": lambda x: ts.fractional_max_pool2d(x, 4, 3, samples=ts.zeros((2, 4, 2))),
    "max_unpool2d": lambda x: ts.max_unpool2d(x, ts.Tensor([1]), 2),
    "adaptive_avg_pool2d": lambda x: ts.adaptive_avg_pool2d(x[:, :, :0], 2),
    "interpolate": lambda x: ts.interpolate(x[0, 0], 2),
    "affine_grid": lambda x: ts.affine_grid(x, (2, 3, 4, 4)),
    "grid_sample": lambda x: ts.grid_sample(x, ts.zeros((2, 3, 3, 3))),
    "pixel_shuffle": lambda x: ts.pixel_shuffle(x, 3),
    "pixel_unshuffle": lambda x: ts.pixel_unshuffle(x, 4),
    "channel_shuffle": lambda x: ts.channel_shuffle(x, 3),
    "embedding_bag": lambda x: ts.embedding_bag(x[0, 0], ts.Tensor([1, 2])),
    "pdist": lambda x: ts.pdist(x),
    "nll_loss": lambda x: ts.nll_loss(x, ts.Tensor([1, 2])),
    "multi_margin_loss": lambda x: ts.multi_margin_loss(x[0, 0], ts.Tensor([1, 2])),
    "multilabel_margin_loss": lambda x: ts.multilabel_margin_loss(x[0, 0], ts.Tensor([1, 2])),
    "ctc_loss": lambda x: ts.ctc_loss(x[0], ts.Tensor([[1, 2]]), [4], [2]),
    "dropout2d": lambda x: ts.dropout2d(x[0]),
}
BAD_ARGUMENTS = {
    "gumbel_softmax": lambda x: ts.gumbel_softmax(x, tau=0.0),
    "conv2d": lambda x: ts.conv2d(x, ts.ones((1, 4, 2, 2)), stride=2, padding="same"),
    "conv_transpose2d": lambda x: ts.conv_transpose2d(x, ts.ones((4, 1, 2, 2)), output_padding=1),
    "max_pool2d": lambda x: ts.max_pool2d(x, 2, padding=2),
    "adaptive_max_pool2d": lambda x: ts.adaptive_max_pool2d(x, (1, 2, 3)),
    "lp_pool2d": lambda x: ts.lp_pool2d(x, 0, 2),
    "fractional_max_pool2d": lambda x: ts.fractional_max_pool2d(x, 2),
    "interpolate none": lambda x: ts.interpolate(x),
    "interpolate mode": lambda x: ts.interpolate(x, 2, mode="linear"),
    "interpolate corners": lambda x: ts.interpolate(x, 2, align_corners=True),
    "grid_sample": lambda x: ts.grid_sample(x, ts.zeros((2, 3, 3, 2)), "linear"),
    "embedding_bag": lambda x: ts.embedding_bag(x[0, 0], ts.Tensor([[1, 2]]), mode="median"),
    "instance_norm": lambda x: ts.instance_norm(x, use_input_stats=False),
    "multi_margin_loss": lambda x: ts.multi_margin_loss(x[0, 0], ts.Tensor([0] * 6), 3),
    "smooth_l1_loss": lambda x: ts.smooth_l1_loss(x, x, beta=-1.0),
    "reduction": lambda x: ts.soft_margin_loss(x, x, "batchmean"),
    "alpha_dropout": lambda x: ts.alpha_dropout(x, 1.5),
}


@pytest.mark.parametrize(
    ("name", "error"), [(n, ShapeError) for n in BAD_SHAPES] + [(n, ArgumentError) for n in BAD_ARGUMENTS]
)
def test_refused_with_the_line(name, error):
    call = (BAD_SHAPES if error is ShapeError else BAD_ARGUMENTS)[name]
    with pytest.raises(error) as info:
        call(ts.rand((2, 4, 6, 5), generator=ts.Generator(1)))
    assert "test_functional.py" in str(info.value)


def test_classes_and_indices_are_checked():
    x = ts.zeros((3, 4))
    with pytest.raises(OutOfBoundsError):
        ts.nll_loss(x, ts.Tensor([0, 1, 4]))
    assert ts.nll_loss(x - 1.0, ts.Tensor([0, 1, -100])).item() == 1.0


FLOATING = (
    "logsigmoid hardsigmoid hardswish hardtanh relu6 celu selu softsign tanhshrink softshrink hardshrink erfc".split()
)


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("dtype", (ts.f16, ts.bf16, ts.int32))
def test_types_and_rounding(name, dtype):
    """16-bit floats are rounded once from the value in f64; integers count as f32."""
    x = ts.Tensor(np.linspace(-5, 5, 41), dtype if dtype.is_float else ts.f32).to(dtype)
    out = getattr(ts, name)(x)
    want = getattr(ts, name)(x.to(ts.f64)).to(out.dtype)
    assert out.dtype == (dtype if dtype.is_float else ts.f32)
    same = np.mean(out.numpy() == want.numpy()) if dtype.is_float else np.allclose(out.numpy(), want.numpy(), rtol=1e-5)
    assert same >= 0.95


def test_second_derivatives_at_ties():
    """The smooth functions have them where a formula of |x| would have none."""
    for function, want in ((ts.logsigmoid, -0.25), (ts.softplus, 0.25), (ts.erfc, 0.0), (ts.tanhshrink, 0.0)):
        assert ts.grad(ts.grad(function))(np.float64(0.0)).item() == want
    loss = lambda x: ts.smooth_l1_loss(x, np.float64(0.0), beta=0.5)  # noqa: E731
    assert ts.grad(ts.grad(loss))(np.float64(0.0)).item() == 2.0


def test_saturated_tails_have_finite_derivatives():
    x = np.float32([-1000, -100, 100, 1000])
    for function in (getattr(ts, name) for name in FLOATING):
        assert np.isfinite(ts.grad(lambda x, f=function: f(x).sum())(x).numpy()).all(), function


def test_samples():
    g = ts.Generator(3)
    soft = ts.gumbel_softmax(np.zeros((2000, 3), "f4"), tau=0.5, generator=g).numpy()
    np.testing.assert_allclose(soft.sum(-1), 1, rtol=1e-5)
    hard = ts.gumbel_softmax(np.log(np.float32([[0.6, 0.3, 0.1]] * 4000)), hard=True, generator=g).numpy()
    np.testing.assert_allclose(hard.mean(0), [0.6, 0.3, 0.1], atol=0.04)
    slope = ts.rrelu(-np.ones(4000, "f4"), 0.2, 0.4, training=True, generator=g).numpy()
    assert -0.4 <= slope.min() < -0.39 and -0.21 < slope.max() <= -0.2
    kept = ts.dropout2d(np.ones((30, 40, 2, 3), "f4"), 0.25, generator=g).numpy()
    assert (kept == kept[:, :, :1, :1]).all() and abs(kept.mean() - 1) < 0.1
    normal = ts.alpha_dropout(ts.randn((200, 200), generator=g), 0.3, generator=g).numpy()
    assert abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05


@pytest.mark.parametrize("target", ("interp", "llvm"))
@pytest.mark.parametrize("dtype", ("f4", "f8", "i4", "u1"))
def test_fmod_is_numpy_s(dtype, target):
    x, y = (v.astype(dtype) for v in (np.arange(-20, 21), np.where(np.arange(41) % 2, 3, 7)))
    y = y if dtype == "u1" else y * np.where(np.arange(41) % 3, 1, -1).astype(dtype)
    out = ts.jit(lambda x, y: ts.fmod(x, y), target=target)(x, y).numpy()
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.fmod(x, y))


def test_ctc_takes_single_sequences_and_impossible_ones():
    logs = ts.log_softmax(ts.Tensor(DATA["in/frames"][:, 0]))
    one = ts.ctc_loss(logs, ts.Tensor([1, 2]), [6], [2], reduction="none")
    both = ts.ctc_loss(logs[:, None], ts.Tensor([[1, 2]]), [6], [2], reduction="none")
    assert one.shape == () and one.item() == both.item()
    assert ts.ctc_loss(logs, ts.Tensor([1, 1]), [2], [2], reduction="none").item() == np.inf


@pytest.mark.parametrize("name", [n for n in NAMES if n != "instance_norm known"])  # that one squares its input
def test_16_bits_are_rounded_once(name):
    """The result is the one in f64, rounded; ties that f32 breaks apart."""
    given = [ts.Tensor(x) for x in inputs(name)]
    narrow = [x.to(ts.bf16) if x.dtype.is_float else x for x in given]
    got = first(function(name)(*narrow))
    want = first(function(name)(*(x.to(ts.f64) if x.dtype.is_float else x for x in narrow)))
    assert got.dtype == ts.bf16 and np.mean(got.numpy() == want.to(ts.bf16).numpy()) >= 0.95


def test_sizes_that_are_known_by_name():
    """Batches of any size; windows whose number does not divide an unknown size are refused."""

    def model(x: ts.Tensor["B", 4, "H", "W"]):
        x = ts.max_pool2d(ts.conv2d(x, ts.ones((4, 4, 3, 3)), padding="same"), 2)
        return ts.adaptive_avg_pool2d(ts.group_norm(ts.hardswish(x), 2), 1), ts.pixel_shuffle(x, 2)

    def windows(x: ts.Tensor["B", 4, "H", 6]):
        return ts.adaptive_max_pool2d(x, 2)

    def more_windows(x: ts.Tensor["B", 4, "H", 6]):
        return ts.max_pool2d(x, 2, ceil_mode=True)

    assert ts.check(model).ok and ts.jit(model)(np.ones((2, 4, 7, 5), "f4"))[0].shape == (2, 4, 1, 1)
    assert "a known size, or a multiple of 2" in str(ts.check(windows))
    assert "known sizes" in str(ts.check(more_windows))


# What ts calls otherwise or does not have (docs/tensors.md), beside variants that change their arguments or the result.
DIFFERENT = (
    "normalize unfold upsample upsample_bilinear upsample_nearest native_channel_shuffle conv_tbc grouped_mm scaled_mm "
    "scaled_grouped_mm multi_head_attention_forward"
).split()
HELPERS = "Optional assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function".split()


def test_no_function_of_pytorch_is_forgotten():
    functional = pytest.importorskip("torch").nn.functional
    names = {n for n in dir(functional) if n[0] != "_" and callable(getattr(functional, n))}
    names = {n.removesuffix("_with_indices") for n in names if not n.endswith("_") and n not in HELPERS}
    names = {n for n in names if not n.startswith("has_torch_function") and n[0].islower()}
    assert {n for n in names if not hasattr(ts, n)} <= set(DIFFERENT)


def test_interpolation_of_long_axes():
    x = np.arange(600, dtype="f4").reshape(1, 1, 600)
    np.testing.assert_array_equal(ts.interpolate(x, 300).numpy()[0, 0], x[0, 0, ::2])
    np.testing.assert_allclose(ts.interpolate(x, 300, mode="linear").numpy()[0, 0], x[0, 0, ::2] + 0.5, rtol=1e-6)


def test_columns_of_taps_that_all_windows_have_in_the_padding():
    """Those of a window with dilation that reaches from one side of the padding to the other."""
    columns = np.arange(24, dtype=np.float32).reshape(1, 12, 2)
    folded = ts.col2im(columns, (2, 2), (2, 3), dilation=(1, 3), padding=(0, 3), stride=(1, 1))
    middle = columns.reshape(2, 2, 3, 2)[:, :, 1]  # the other columns of a window are outside
    np.testing.assert_array_equal(folded.numpy()[0], middle)


@pytest.mark.parametrize(("outputs", "products"), [(3, 1), (64, 4)])
def test_transposed_convolutions_to_few_channels_are_one_product(outputs, products):
    """Else each phase is a product; the first one has 16 rows for each channel."""
    x, w = np.ones((1, 64, 5, 5), np.float32), np.ones((64, outputs, 4, 4), np.float32)
    traced = ts.jit(lambda x, w: ts.conv_transpose2d(x, w, stride=2, padding=1)).trace(x, w).function
    assert sum(node.op.name == "ts.dot" for node in traced.body.walk()) == products


@pytest.mark.parametrize("seed", range(8))
def test_transposed_convolutions_to_few_channels_are_the_transposes_of_convolutions(seed):
    """⟨conv(y), x⟩ = ⟨y, conv_transpose(x)⟩ for any y, in whole numbers; one product computes the latter."""
    rng = np.random.default_rng(seed)
    rank = seed % 3 + 1
    kernel, stride, padding = (tuple(rng.integers(low, high, rank).tolist()) for low, high in ((2, 5), (2, 4), (0, 2)))
    counts = tuple(rng.integers(1, 6, rank).tolist())
    x = rng.integers(-3, 4, (2, 96, *counts)).astype("f8")
    w = rng.integers(-3, 4, (96, 2, *kernel)).astype("f8")
    named = {"stride": stride, "padding": padding}
    transpose, convolve = (getattr(ts, f"{name}{rank}d") for name in ("conv_transpose", "conv"))
    traced = ts.jit(lambda x, w: transpose(x, w, **named)).trace(x, w).function
    assert sum(node.op.name == "ts.dot" for node in traced.body.walk()) == 1
    found = transpose(x, w, **named).numpy()
    y = rng.integers(-3, 4, found.shape).astype("f8")
    np.testing.assert_array_equal((convolve(y, w, **named).numpy() * x).sum(), (found * y).sum())


def test_windows_of_transposed_convolutions_are_added_up_before_they_are_rounded():
    x, w = np.full((1, 64, 3, 3), 0.3, np.float16), np.full((64, 1, 5, 5), 0.3, np.float16)
    exact = ts.conv_transpose2d(x.astype("f8"), w.astype("f8"), stride=2).numpy()
    np.testing.assert_array_equal(ts.conv_transpose2d(x, w, stride=2).numpy(), exact.astype(np.float16))
