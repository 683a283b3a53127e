"""Layers against PyTorch's: weights copied over give the same results and gradients, for defaults and options."""

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.errors import ArgumentError

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
    ("LPPool2d", (3, 3), {"stride": 2, "ceil_mode": True}, [(2, 3, 6, 7)]),
    ("LPPool1d", (1, 3), {"ceil_mode": True}, [(2, 3, 7)]),
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
    *(("Conv2d", (2, 3, 3), {"padding": (1, 2), "stride": 2, "padding_mode": mode}, [(2, 2, 5, 6)])
      for mode in ("zeros", "reflect", "replicate", "circular")),
    *(("Conv1d", (2, 3, 4), {"padding": "same", "padding_mode": mode}, [(2, 2, 6)])
      for mode in ("reflect", "replicate", "circular")),
    ("Conv3d", (1, 2, 2), {"padding": 1, "padding_mode": "circular"}, [(1, 2, 3, 2)]),
    ("Softmax2d", (), {}, [(2, 3, 4, 2)]),
    ("LSTM", (3, 4), {"proj_size": 2, "num_layers": 2, "bidirectional": True}, [(5, 2, 3)]),
    ("LSTM", (3, 4, 1, False, True), {"proj_size": 3}, [(2, 5, 3)]),
    ("RNN", (3, 4, 2, "relu", False), {}, [(5, 2, 3)]),
    ("RNNCell", (3, 4), {}, [(2, 3), (2, 4)]),
    ("RNNCell", (3, 4, False, "relu"), {}, [(3,)]),
    ("GRUCell", (3, 4), {}, [(2, 3), (2, 4)]),
    ("LSTMCell", (3, 4), {"bias": False}, [(2, 3)]),
    ("AvgPool2d", (3,), {"stride": 2, "divisor_override": 2, "padding": 1}, [(2, 3, 6, 8)]),
    ("AvgPool3d", (2,), {"divisor_override": -3, "ceil_mode": True}, [(1, 2, 3, 4, 3)]),
    ("AdaptiveAvgPool3d", ((2, None, 1),), {}, [(1, 2, 3, 4, 3)]),
    ("AdaptiveMaxPool1d", (3,), {}, [(2, 3, 7)]),
    ("AdaptiveMaxPool3d", (2,), {}, [(1, 2, 3, 4, 3)]),
    ("LPPool2d", (3, 2), {"stride": 1}, [(2, 3, 4, 5)]),
    ("RMSNorm", ((4, 3),), {"eps": 0.1}, [(2, 4, 3)]),
    ("RMSNorm", ([4, 3],), {"elementwise_affine": False}, [(2, 4, 3)]),
    ("InstanceNorm2d", (3,), {"track_running_stats": True, "momentum": 0.3}, [(2, 3, 3, 2)]),
    ("InstanceNorm1d", (3,), {"track_running_stats": True, "momentum": None}, [(3, 4)]),
    ("InstanceNorm3d", (2,), {"affine": True, "bias": False}, [(1, 2, 3, 2, 2)]),
    ("GroupNorm", (2, 4), {"bias": False}, [(2, 4, 3, 2)]),
    ("BatchNorm1d", (3,), {"bias": False}, [(5, 3, 2)]),
    ("LocalResponseNorm", (2, 0.1, 0.5), {"k": 2.0}, [(2, 5, 3)]),
    ("ZeroPad2d", ((1, -1, 0, 2),), {}, [(2, 3, 4, 5)]),
    ("ConstantPad1d", (2, 1.5), {}, [(2, 3, 4)]),
    ("ReflectionPad1d", ((3, 1),), {}, [(2, 3, 4)]),
    ("ReflectionPad3d", (1,), {}, [(2, 3, 4, 2)]),
    ("ReplicationPad2d", ((1, 2, 3, 4),), {}, [(2, 3, 4, 5)]),
    ("CircularPad2d", ((4, 1, 0, 2),), {}, [(2, 3, 3, 4)]),
    ("Upsample", (), {"scale_factor": 2, "mode": "bilinear", "align_corners": True}, [(1, 2, 3, 4)]),
    ("Upsample", ((4, 3),), {}, [(1, 2, 3, 4)]),
    ("PixelShuffle", (2,), {}, [(1, 8, 2, 3)]),
    ("PixelUnshuffle", (2,), {}, [(1, 2, 2, 4)]),
    ("ChannelShuffle", (2,), {}, [(1, 4, 2)]),
    ("Unfold", ((2, 3),), {"padding": 1, "stride": 2}, [(2, 3, 4, 5)]),
    ("Fold", ((4, 5), (2, 3)), {"padding": 1, "stride": 2}, [(2, 18, 9)]),
    ("Fold", ((4, 5), 2), {"dilation": 2}, [(8, 6)]),
    ("Unflatten", (1, (2, -1)), {}, [(3, 4)]),
    ("CosineSimilarity", (-1,), {}, [(3, 4), (3, 4)]),
    ("PairwiseDistance", (1.0, 1e-3, True), {}, [(3, 4), (3, 4)]),
    ("Transformer", (8, 2, 1, 2, 12, 0.0), {"batch_first": True}, [(3, 4, 8), (3, 5, 8)]),
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


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning", "ignore:LSTM with projections:UserWarning")
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
    ("BCELoss", {"weight": [1.0, 2.0, 0.5, 1.5], "reduction": "sum"}),
    ("BCEWithLogitsLoss", {"weight": [1.0, 2.0, 0.5, 1.5], "pos_weight": [0.5, 2.0, 3.0, 1.0]}),
    ("HingeEmbeddingLoss", {"margin": 0.4}), ("SoftMarginLoss", {"reduction": "none"}),
    ("MultiMarginLoss", {"p": 2, "margin": 0.5, "weight": [1.0, 2.0, 0.5, 1.5]}), ("MultiLabelMarginLoss", {}),
    ("MultiLabelSoftMarginLoss", {"weight": [1.0, 2.0, 0.5, 1.5]}), ("PoissonNLLLoss", {"full": True}),
    ("PoissonNLLLoss", {"log_input": False, "eps": 0.1, "reduction": "sum"}),
]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "options"), [
    ("TripletMarginLoss", {}), ("TripletMarginLoss", {"margin": 0.3, "p": 1.0}),
    ("TripletMarginLoss", {"swap": True, "eps": 0.1, "margin": 3.0}),
    ("TripletMarginWithDistanceLoss", {"swap": True, "margin": 3.0}), ("MarginRankingLoss", {"margin": 0.2}),
    ("GaussianNLLLoss", {"full": True, "eps": 0.1}),
    ("CosineEmbeddingLoss", {}), ("CosineEmbeddingLoss", {"margin": 0.5}),
])  # fmt: skip
def test_losses_of_several_inputs_equal_those_of_torch(name, options, reduction):
    arrays = list(np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32))
    if name == "CosineEmbeddingLoss":
        arrays[2] = np.array([1, -1, 1, -1, 1])
    if name == "GaussianNLLLoss":
        arrays[2] = np.abs(arrays[2])
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


@pytest.mark.parametrize("options", [
    {"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 0},
])  # fmt: skip
@pytest.mark.parametrize("target", ["eager", "interp", "cpu"])
def test_an_embedding_is_trained_as_that_of_torch(options, target):
    theirs, ours = torch.nn.Embedding(6, 3, **options), nn.Embedding(6, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    scales = np.random.default_rng(0).standard_normal((20, 2, 3, 3)).astype(np.float32)

    def step(model, rows, scale):
        value, grads = ts.value_and_grad(lambda m: (m(rows) * m(rows[:1]) * scale).sum())(model)
        return value, ts.optim.SGD(lr=0.3).update(model, grads, {"step": ts.zeros((), dtype=ts.int64)})[0]

    run = step if target == "eager" else ts.jit(step, target=target)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3)
    for scale in scales:
        rows = np.argsort(scale.reshape(-1))[:6].reshape(2, 3) % 6
        optimizer.zero_grad()
        want = (theirs(torch.tensor(rows)) * theirs(torch.tensor(rows[:1])) * torch.tensor(scale)).sum()
        want.backward()
        optimizer.step()
        value, ours = run(ours, ts.Tensor(rows), ts.Tensor(scale))
        np.testing.assert_allclose(value.numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.weight.numpy(), theirs.weight.detach(), rtol=1e-4, atol=1e-5)


def test_a_limited_embedding_keeps_its_new_rows():
    model = nn.Embedding(3, 2, max_norm=1.0)
    model.weight = ts.Tensor([[3.0, 4.0], [6.0, 8.0], [0.3, 0.4]])
    for call in (model, ts.jit(model), lambda x: ts.value_and_grad(lambda m: m(x).sum())(model)[0]):
        call(ts.Tensor([0, 2]))
        np.testing.assert_allclose(model.weight.numpy(), [[0.6, 0.8], [6.0, 8.0], [0.3, 0.4]], rtol=1e-6)
        assert isinstance(model.weight, ts.Tensor) and not model.weight.is_traced
        assert [n for n, _ in model.named_parameters()] == ["weight"]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_embeddings_equals_that_of_torch(mode):
    theirs, ours = torch.nn.EmbeddingBag(6, 3, mode=mode, padding_idx=1), nn.EmbeddingBag(6, 3, mode, padding_idx=1)
    ours.load_state_dict(theirs.state_dict())
    rows, starts = np.array([0, 2, 1, 5, 5]), np.array([0, 2, 4])
    np.testing.assert_allclose(
        ours(ts.Tensor(rows), ts.Tensor(starts)).numpy(), theirs(torch.tensor(rows), torch.tensor(starts)).detach(),
        rtol=1e-6,
    )  # fmt: skip
    last = nn.EmbeddingBag(6, 3, mode, include_last_offset=True)
    assert last(ts.Tensor(rows), ts.Tensor([0, 2, 5])).shape == (2, 3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_pool_gives_places_that_its_inverse_takes(n):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6, 4)[: n + 2]).astype(np.float32)
    theirs = getattr(torch.nn, f"MaxPool{n}d")(2, return_indices=True)(torch.tensor(x))
    ours = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)(ts.Tensor(x))
    assert (ours[1].numpy() == theirs[1].numpy()).all()
    back = getattr(nn, f"MaxUnpool{n}d")(2)(*ours)
    np.testing.assert_array_equal(back.numpy(), getattr(torch.nn, f"MaxUnpool{n}d")(2)(*theirs))
    alone = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)(ts.Tensor(x[0]))
    assert (alone[1].numpy() == theirs[1].numpy()[0]).all()
    again = getattr(nn, f"MaxUnpool{n}d")(2)(*alone, output_size=x.shape[1:])
    np.testing.assert_array_equal(again.numpy(), back.numpy()[0])


def test_copies_of_a_layer_make_a_stack():
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0)
    theirs = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(8, 2, 12, 0.0), 2, torch.nn.LayerNorm(8), enable_nested_tensor=False
    )
    ours = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))
    assert ours.layers[0].linear1.weight is not ours.layers[1].linear1.weight
    ours.load_state_dict(theirs.state_dict())
    x, mask = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32), np.triu(np.ones((4, 4), bool), 1)
    want = theirs(torch.tensor(x), mask=torch.tensor(mask)).detach()
    np.testing.assert_allclose(ours(ts.Tensor(x), mask=ts.Tensor(mask)).numpy(), want, rtol=2e-5, atol=2e-6)


def test_an_instance_norm_evaluates_with_its_statistics():
    theirs, ours = (m.InstanceNorm2d(3, track_running_stats=True) for m in (torch.nn, nn))
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 2)).astype(np.float32)
    for _ in range(3):
        theirs(torch.tensor(x)), ours(ts.Tensor(x))
    np.testing.assert_allclose(
        ours.eval()(ts.Tensor(x * 2)).numpy(), theirs.eval()(torch.tensor(x * 2)), rtol=1e-5, atol=1e-6
    )


def test_the_losses_of_sequences_equal_those_of_torch():
    logs = torch.log_softmax(torch.tensor(np.random.default_rng(0).standard_normal((6, 2, 4)).astype(np.float32)), -1)
    given = torch.tensor([[1, 2, 3], [3, 3, 1]]), torch.tensor([6, 5]), torch.tensor([3, 2])
    for options in ({}, {"reduction": "sum", "blank": 2 * 0, "zero_infinity": True}):
        want = torch.nn.CTCLoss(**options)(logs, *given)
        found = nn.CTCLoss(**options)(logs.numpy(), *(t.numpy() for t in given))
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-5)


def test_a_part_of_a_sequence_keeps_the_names_of_its_modules():
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(whole[1:].state_dict()) == list(
        torch.nn.Sequential(*map(torch.nn.Linear, [2] * 3, [2] * 3))[2:].state_dict()
    )


def test_a_stack_of_decoder_layers_equals_that_of_torch():
    make = lambda m: m.TransformerDecoderLayer(8, 2, 12, 0.0)  # noqa: E731
    theirs = torch.nn.TransformerDecoder(make(torch.nn), 2, torch.nn.LayerNorm(8))
    ours = nn.TransformerDecoder([make(nn), make(nn)], nn.LayerNorm(8))
    ours.load_state_dict(theirs.state_dict())
    tgt, memory = (np.random.default_rng(0).standard_normal((n, 3, 8)).astype(np.float32) for n in (4, 5))
    want = theirs(torch.tensor(tgt), torch.tensor(memory)).detach()
    np.testing.assert_allclose(ours(ts.Tensor(tgt), ts.Tensor(memory)).numpy(), want, rtol=2e-5, atol=2e-6)


def make_mixture(lib, tensor):
    """A model of `lib` with parameters in a list and in a dict."""

    class Mixture(lib.Module):
        def __init__(self):
            super().__init__()
            self.weights = lib.ParameterList([lib.Parameter(tensor(w)) for w in ([1.0, 2.0], [3.0])])
            self.scales = lib.ParameterDict({"a": lib.Parameter(tensor([2.0]))})

        def forward(self, x):
            return sum((w * x).sum() for w in self.weights) * self.scales["a"]

    return Mixture()


def test_lists_and_dicts_of_parameters_equal_those_of_torch():
    ours, theirs = make_mixture(nn, ts.tensor), make_mixture(torch.nn, torch.tensor)
    ours.load_state_dict(theirs.state_dict())
    theirs(torch.tensor(3.0)).sum().backward()
    found = ts.jit(ts.grad(lambda m, x: m(x).sum()), target="cpu")(ours, 3.0)
    wanted = dict(theirs.named_parameters())
    assert {n for n, _ in found.named_parameters()} == set(wanted) == {"weights.0", "weights.1", "scales.a"}
    for name, g in found.named_parameters():
        np.testing.assert_allclose(g.numpy(), wanted[name].grad.numpy(), err_msg=name)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_a_transformer_with_masks_equals_that_of_torch():
    """As a translation model is called: causal targets, padded sources."""
    make = lambda m: m.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)  # noqa: E731
    theirs, ours = make(torch.nn), make(nn)
    ours.load_state_dict(theirs.state_dict())
    source, target = (np.random.default_rng(0).standard_normal((2, n, 8)).astype(np.float32) for n in (5, 4))
    padding = np.array([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], bool)
    masks = [m.Transformer.generate_square_subsequent_mask(4) for m in (torch.nn, nn)]
    np.testing.assert_array_equal(masks[1].numpy(), masks[0])
    named = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    torch_named = {name: torch.tensor(x) for name, x in named.items()}
    want = theirs(torch.tensor(source), torch.tensor(target), tgt_mask=masks[0], **torch_named).detach()
    for more in ({"tgt_mask": masks[1]}, {"tgt_is_causal": True}):
        found = ours(ts.Tensor(source), ts.Tensor(target), **named, **more)
        np.testing.assert_allclose(found.numpy(), want, rtol=2e-5, atol=2e-6)


def test_a_transformer_whose_memory_is_causal():
    model = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)
    x = ts.Tensor(np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32))
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    found, want = model(x, x, memory_is_causal=True), model(x, x, memory_mask=mask)
    np.testing.assert_allclose(found.numpy(), want.numpy(), rtol=1e-6, atol=1e-6)
    assert not np.allclose(found.numpy(), model(x, x).numpy(), atol=1e-3)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize(("name", "options"), LOSSES, ids=lambda x: str(x))
def test_loss_equals_that_of_torch(name, options):
    rng = np.random.default_rng(1)
    x, y = rng.random((2, 6, 4)).astype(np.float32)
    target = rng.integers(0, 4, 6) if name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss") else y
    target = rng.permuted(np.tile([0, 2, 3, -1], (6, 1)), axis=1) if name == "MultiLabelMarginLoss" else target
    target = np.sign(y - 0.5) if name in ("HingeEmbeddingLoss", "SoftMarginLoss") else target
    target = np.floor(y * 4) if name == "PoissonNLLLoss" else target
    weight = {n: torch.tensor(v) for n, v in options.items() if n.endswith("weight")}
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


def test_a_recurrent_layer_in_a_sequence():
    """It gives its state too; the error says how to take its outputs."""
    layers = nn.Linear(2, 3), nn.LSTM(3, 3), nn.Linear(3, 1)
    for one in (nn.Sequential(*layers), nn.Sequential(nn.GRU(2, 3), nn.Linear(3, 1))):
        with pytest.raises(ArgumentError, match="Linear takes one tensor, and (LSTM|GRU) gives 2 values") as error:
            one(ts.zeros((1, 5, 2)))  # of one step, where outputs and state have one shape
        assert error.value.suggestion.startswith("put `lambda y: y[0]` behind ")
    assert nn.Sequential(*layers[:2], lambda y: y[0], layers[2])(ts.zeros((4, 5, 2))).shape == (4, 5, 1)


@pytest.mark.parametrize(("ours", "theirs"), [(ts.f64, "float64"), (ts.bf16, "bfloat16"), (ts.f16, "float16")])
def test_even_shares_of_batches_have_the_element_type_of_the_statistics(ours, theirs):
    wanted = torch.nn.BatchNorm1d(3, momentum=None).to(getattr(torch, theirs))
    layer = nn.BatchNorm1d(3, momentum=None).to(ours)
    for _ in range(5):
        x = torch.randn(4, 3).to(getattr(torch, theirs))
        wanted(x)
        layer(ts.Tensor(x))
    tolerance = {ts.f64: 1e-12, ts.bf16: 2e-2, ts.f16: 2e-3}[ours]
    assert layer.running_mean.dtype == layer.running_var.dtype == ours
    for found, want in zip(
        (layer.running_mean, layer.running_var), (wanted.running_mean, wanted.running_var), strict=True
    ):
        np.testing.assert_allclose(np.float64(found), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [(8, 7), (2, 3, 7, 6)])
def test_a_transposed_convolution_takes_the_size_of_its_result(size):
    wanted = torch.nn.ConvTranspose2d(2, 3, (3, 2), stride=2, padding=1)
    layer = nn.ConvTranspose2d(2, 3, (3, 2), stride=2, padding=1)
    layer.load_state_dict(wanted.state_dict())
    x = torch.randn(2, 2, 4, 4)
    found, want = layer(ts.Tensor(x), output_size=size), wanted(x, output_size=size)
    assert found.shape == tuple(want.shape)
    np.testing.assert_allclose(found, want.detach(), atol=1e-5)
    with pytest.raises(ArgumentError, match=r"from \[7, 6\] to \[8, 7\]"):
        layer(ts.Tensor(x), output_size=(9, 7))


def test_arguments_of_losses_may_be_named():
    x, y = np.float32([[1, 2], [3, 4]]), np.float32([[0, 1], [1, 1]])
    assert nn.MSELoss()(input=x, target=y).item() == nn.MSELoss()(x, target=y).item() == nn.MSELoss()(x, y).item()
    margin = nn.TripletMarginLoss(reduction="sum")
    assert margin(anchor=x, negative=x + 1, positive=y).item() == margin(x, y, x + 1).item()
    with pytest.raises(TypeError, match="target"):
        nn.MSELoss()(x, targets=y)
