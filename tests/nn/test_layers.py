"""Layers against PyTorch's: weights copied over give the same results and gradients, for defaults and options."""

import numpy as np
import pytest

import tessera as ts
from tessera import nn

torch = pytest.importorskip("torch")
CASES = [
    ("Linear", (5, 3), {}, [(4, 5)]),
    ("Linear", (5, 3), {"bias": False}, [(2, 4, 5)]),
    ("Bilinear", (3, 4, 2), {}, [(5, 3), (5, 4)]),
    ("Conv1d", (3, 4, 3), {"padding": 1}, [(2, 3, 7)]),
    ("Conv1d", (3, 4, 2), {"padding": "same"}, [(2, 3, 7)]),
    ("Conv2d", (4, 6, 3), {"stride": 2, "padding": (1, 2), "groups": 2}, [(2, 4, 7, 6)]),
    ("Conv2d", (2, 3, (3, 2)), {"dilation": 2, "bias": False, "padding": "same"}, [(2, 6, 5)]),
    ("Conv3d", (2, 3, 2), {"stride": (1, 2, 1)}, [(1, 2, 3, 4, 3)]),
    ("ConvTranspose2d", (4, 6, 3), {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}, [(2, 4, 3, 4)]),
    ("ConvTranspose1d", (2, 3, 3), {"dilation": 2}, [(2, 2, 4)]),
    ("BatchNorm1d", (3,), {}, [(5, 3)]),
    ("BatchNorm2d", (3,), {"momentum": 0.3, "eps": 1e-3}, [(2, 3, 2, 2)]),
    ("BatchNorm2d", (3,), {"momentum": None, "affine": False}, [(2, 3, 2, 2)]),
    ("BatchNorm2d", (3,), {"track_running_stats": False}, [(2, 3, 2, 2)]),
    ("LayerNorm", ([4, 3],), {}, [(2, 4, 3)]),
    ("LayerNorm", (3,), {"bias": False, "eps": 1e-2}, [(2, 4, 3)]),
    ("RMSNorm", (6,), {}, [(3, 6)]),
    ("GroupNorm", (2, 4), {}, [(2, 4, 3, 2)]),
    ("InstanceNorm2d", (3,), {"affine": True}, [(2, 3, 3, 2)]),
    ("MaxPool2d", (2,), {"ceil_mode": True}, [(2, 3, 5, 7)]),
    ("MaxPool2d", (3,), {"stride": 2, "padding": 1, "dilation": 2}, [(2, 3, 9, 8)]),
    ("MaxPool1d", (2,), {}, [(3, 5)]),
    ("AvgPool2d", (2,), {"ceil_mode": True}, [(2, 3, 5, 7)]),
    ("AvgPool2d", (3,), {"stride": 2, "padding": 1, "count_include_pad": False, "ceil_mode": True}, [(2, 3, 6, 8)]),
    ("AvgPool3d", (2,), {}, [(1, 2, 4, 4, 2)]),
    ("AdaptiveAvgPool2d", ((3, None),), {}, [(2, 3, 7, 4)]),
    ("AdaptiveMaxPool2d", (2,), {}, [(2, 3, 5, 4)]),
    ("MultiheadAttention", (8, 2), {}, [(4, 3, 8)]),
    ("MultiheadAttention", (8, 2), {"batch_first": True, "bias": False}, [(3, 4, 8), (3, 5, 8), (3, 5, 8)]),
    ("MultiheadAttention", (8, 4), {"kdim": 5, "vdim": 6}, [(4, 3, 8), (2, 3, 5), (2, 3, 6)]),
    ("MultiheadAttention", (8, 2), {"add_bias_kv": True, "add_zero_attn": True}, [(4, 3, 8), (2, 3, 8), (2, 3, 8)]),
    ("TransformerEncoderLayer", (8, 2, 12, 0.0), {}, [(4, 3, 8)]),
    ("TransformerEncoderLayer", (8, 2, 12, 0.0, "gelu"), {"norm_first": True, "batch_first": True}, [(3, 4, 8)]),
    ("TransformerDecoderLayer", (8, 2, 12, 0.0), {}, [(4, 3, 8), (5, 3, 8)]),
    ("RNN", (3, 4), {"nonlinearity": "relu"}, [(5, 2, 3)]),
    ("LSTM", (3, 4), {"num_layers": 2, "bidirectional": True}, [(5, 2, 3)]),
    ("LSTM", (3, 4), {"batch_first": True}, [(2, 5, 3)]),
    ("GRU", (3, 4), {"bias": False}, [(5, 3)]),
    ("BatchNorm3d", (2,), {}, [(2, 2, 2, 3, 2)]),
    ("ConvTranspose3d", (2, 4, 2), {"stride": 2, "groups": 2, "bias": False}, [(1, 2, 2, 3, 2)]),
    ("MaxPool3d", (2,), {"stride": 1, "padding": 1, "dilation": 2}, [(1, 2, 5, 4, 5)]),
    ("AvgPool1d", (3,), {"stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False}, [(2, 3, 8)]),
    ("AdaptiveAvgPool1d", (3,), {}, [(2, 3, 7)]),
    ("LayerNorm", ((4, 3),), {"elementwise_affine": False}, [(2, 4, 3)]),
    ("GroupNorm", (1, 4), {"affine": False, "eps": 0.1}, [(2, 4, 3)]),
    ("Conv2d", (2, 3, 1), {}, [(2, 5, 6)]),
    ("Linear", (5, 3), {}, [(5,)]),
    ("PReLU", (3,), {}, [(2, 3, 4)]),
    ("Threshold", (0.1, -2.0), {}, [(3, 4)]),
    ("Softmin", (), {"dim": 1}, [(3, 4)]),
    *((name, (), {}, [(3, 4)]) for name in (
        "ReLU", "ReLU6", "LeakyReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Softplus", "Sigmoid", "Tanh",
        "Hardtanh", "Hardswish", "Hardsigmoid", "LogSigmoid", "Softsign", "Tanhshrink", "Softshrink", "Hardshrink",
        "GLU",
    )),
    ("GELU", (), {"approximate": "tanh"}, [(3, 4)]),
    ("Softmax", (), {"dim": 1}, [(3, 4)]),
    ("LogSoftmax", (), {"dim": 0}, [(3, 4)]),
]  # fmt: skip


def flatten(found):
    return [t for part in found for t in flatten(part)] if isinstance(found, (tuple, list)) else [found]


def run_torch(layer, arrays):
    given = [torch.tensor(a).requires_grad_() for a in arrays]
    if isinstance(layer, torch.nn.MultiheadAttention):
        given = given * 3 if len(given) == 1 else given
        outs = flatten(layer(*given, need_weights=False)[0])
        given = given[: len(arrays)]
    else:
        outs = flatten(layer(*given))
    sum((o * o).sum() for o in outs).backward()
    gradients = {n: p.grad for n, p in layer.named_parameters()}
    return [o.detach() for o in outs], gradients, [x.grad for x in given]


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize(("name", "args", "options", "shapes"), CASES, ids=lambda x: str(x))
def test_layer_equals_that_of_torch(name, args, options, shapes):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    theirs, ours = getattr(torch.nn, name)(*args, **options), getattr(nn, name)(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arrays[0].reshape(-1)[0] = 0.0  # where derivatives of activations jump
    outs, gradients, slopes = run_torch(theirs, arrays)

    def loss(model, inputs):
        found = flatten(model(*inputs))
        return sum(((o * o).sum() for o in found), ts.zeros(())), (found, model)

    (_, (found, after)), (grads, moved) = ts.value_and_grad(loss, (0, 1), has_aux=True)(
        ours, [ts.Tensor(a) for a in arrays]
    )
    for a, b in zip(found, outs, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=2e-5, atol=2e-6)
    given = {n: g for n, g in ts.tree.leaves_with_path(grads) if g is not None}
    assert given.keys() == gradients.keys()
    for path, g in [*given.items(), *enumerate(moved)]:
        expected = gradients[path] if isinstance(path, str) else slopes[path]
        np.testing.assert_allclose(g.numpy(), expected, rtol=2e-4, atol=2e-5, err_msg=str(path))
    for path, t in after.state_dict().items():
        np.testing.assert_allclose(t.numpy(), theirs.state_dict()[path], rtol=1e-5, atol=1e-6, err_msg=path)


LOSSES = [
    ("MSELoss", {}), ("MSELoss", {"reduction": "sum"}), ("L1Loss", {"reduction": "none"}), ("SmoothL1Loss", {}),
    ("SmoothL1Loss", {"beta": 0.3}), ("HuberLoss", {"delta": 0.5}), ("BCELoss", {}), ("BCEWithLogitsLoss", {}),
    ("KLDivLoss", {"reduction": "batchmean"}), ("KLDivLoss", {"log_target": True, "reduction": "sum"}),
    ("CrossEntropyLoss", {}), ("CrossEntropyLoss", {"label_smoothing": 0.1, "ignore_index": 2}),
    ("CrossEntropyLoss", {"reduction": "none", "ignore_index": 1}),
    ("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5, 1.5]}),
    ("CrossEntropyLoss", {"weight": [1.0, 2.0, 0.5, 1.5], "label_smoothing": 0.2}),
    ("NLLLoss", {}), ("NLLLoss", {"reduction": "sum", "ignore_index": 0}), ("NLLLoss", {"ignore_index": 9}),
    ("SmoothL1Loss", {"beta": 0.0}), ("BCELoss", {"reduction": "none"}), ("KLDivLoss", {}),
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "options"), [
    ("TripletMarginLoss", {}), ("TripletMarginLoss", {"margin": 0.3, "p": 1.0}),
    ("CosineEmbeddingLoss", {}), ("CosineEmbeddingLoss", {"margin": 0.5}),
])  # fmt: skip
def test_losses_of_several_inputs_equal_those_of_torch(name, options, reduction):
    arrays = list(np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32))
    if name == "CosineEmbeddingLoss":
        arrays[2] = np.array([1, -1, 1, -1, 1])
    theirs, ours = (
        getattr(torch.nn, name)(**options, reduction=reduction),
        getattr(nn, name)(**options, reduction=reduction),
    )
    given = [torch.tensor(a, requires_grad=a.dtype == np.float32) for a in arrays]
    want = theirs(*given)
    want.sum().backward()
    (_, found), g = ts.value_and_grad(lambda a, b, c: (ours(a, b, c).sum(), ours(a, b, c)), (0, 1), has_aux=True)(
        *map(ts.Tensor, arrays)
    )
    np.testing.assert_allclose(found.numpy(), want.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(g, given, strict=False):
        np.testing.assert_allclose(a.numpy(), b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}])
def test_an_embedding_equals_that_of_torch(options):
    theirs, ours = torch.nn.Embedding(6, 3, **options), nn.Embedding(6, 3, **options)
    if options:
        assert (ours.weight.numpy()[options["padding_idx"]] == 0).all()
    ours.load_state_dict(theirs.state_dict())
    rows = np.array([[0, 2, 5], [2, 2, 1]])
    want = theirs(torch.tensor(rows))
    (want * want).sum().backward()
    (_, found), g = ts.value_and_grad(lambda m: ((m(rows) * m(rows)).sum(), m(rows)), has_aux=True)(ours)
    assert (found.numpy() == want.detach().numpy()).all()
    np.testing.assert_allclose(dict(ts.tree.leaves_with_path(g))["weight"].numpy(), theirs.weight.grad, rtol=1e-6)


def test_a_stack_of_decoder_layers_equals_that_of_torch():
    make = lambda m: m.TransformerDecoderLayer(8, 2, 12, 0.0)  # noqa: E731
    theirs = torch.nn.TransformerDecoder(make(torch.nn), 2, torch.nn.LayerNorm(8))
    ours = nn.TransformerDecoder([make(nn), make(nn)], nn.LayerNorm(8))
    ours.load_state_dict(theirs.state_dict())
    tgt, memory = (np.random.default_rng(0).standard_normal((n, 3, 8)).astype(np.float32) for n in (4, 5))
    want = theirs(torch.tensor(tgt), torch.tensor(memory)).detach()
    np.testing.assert_allclose(ours(ts.Tensor(tgt), ts.Tensor(memory)).numpy(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize(("name", "options"), LOSSES, ids=lambda x: str(x))
def test_loss_equals_that_of_torch(name, options):
    rng = np.random.default_rng(1)
    x, y = rng.random((2, 6, 4)).astype(np.float32)
    target = rng.integers(0, 4, 6) if name in ("CrossEntropyLoss", "NLLLoss") else y
    weight = {n: torch.tensor(v) for n, v in options.items() if n == "weight"}
    theirs, ours = getattr(torch.nn, name)(**{**options, **weight}), getattr(nn, name)(**options)
    given = torch.tensor(x, requires_grad=True)
    expected = theirs(given, torch.tensor(target))
    expected.sum().backward()
    value, g = ts.value_and_grad(lambda x, f, t: (lambda out: (out.sum(), out))(f(x, t)), has_aux=True)(
        ts.Tensor(x), ours, ts.Tensor(target)
    )
    np.testing.assert_allclose(value[1].numpy(), expected.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g.numpy(), given.grad, rtol=1e-5, atol=1e-6)


def test_rows_of_attention_have_the_type_and_the_spread_of_torch():
    ts.manual_seed(0)
    ours = nn.MultiheadAttention(1024, 2, add_bias_kv=True, dtype="f16", kdim=1, vdim=1)
    theirs = torch.nn.MultiheadAttention(1024, 2, add_bias_kv=True, dtype=torch.float16, kdim=1, vdim=1)
    for name in ("bias_k", "bias_v"):
        found, expected = ours.state_dict()[name].numpy(), getattr(theirs, name).detach().numpy()
        assert found.dtype == expected.dtype == np.float16 and found.shape == expected.shape
        np.testing.assert_allclose(found.astype(float).std(), expected.astype(float).std(), rtol=0.15)
