"""Each keyword argument of a constructor of PyTorch has an equal effect here, or is refused: none is ignored."""

import inspect

import numpy as np
import pytest

import tessera as ts
from tessera import nn

torch = pytest.importorskip("torch")

# A call for each class that both have: arguments, options, shapes of inputs.
IMAGE, ROWS, SEQUENCE = [(2, 4, 7, 6)], [(3, 4)], [(5, 2, 4)]
BASES = {
    "AdaptiveAvgPool1d": ((2,), {}, [(2, 3, 7)]), "AdaptiveAvgPool2d": ((2,), {}, IMAGE),
    "AdaptiveAvgPool3d": ((2,), {}, [(1, 2, 3, 4, 3)]), "AdaptiveMaxPool1d": ((2,), {}, [(2, 3, 7)]),
    "AdaptiveMaxPool2d": ((2,), {}, IMAGE), "AdaptiveMaxPool3d": ((2,), {}, [(1, 2, 3, 4, 3)]),
    "AvgPool1d": ((3,), {}, [(2, 3, 8)]), "AvgPool2d": ((3,), {"padding": 1}, IMAGE),
    "AvgPool3d": ((2,), {"padding": 1}, [(1, 2, 3, 4, 3)]), "MaxPool1d": ((3,), {}, [(2, 3, 8)]),
    "MaxPool2d": ((3,), {}, IMAGE), "MaxPool3d": ((2,), {}, [(1, 2, 3, 4, 5)]),
    "LPPool1d": ((2, 3), {}, [(2, 3, 9)]), "LPPool2d": ((2, 2), {}, [(2, 3, 4, 6)]),
    "LPPool3d": ((2, 2), {}, [(1, 2, 4, 4, 2)]), "MaxUnpool1d": None, "MaxUnpool2d": None, "MaxUnpool3d": None,
    "Linear": ((4, 3), {}, ROWS), "Bilinear": ((4, 3, 2), {}, [(5, 4), (5, 3)]), "Flatten": ((), {}, IMAGE),
    "Unflatten": ((1, (2, 2)), {}, ROWS), "Identity": ((), {}, ROWS),
    "Conv1d": ((4, 2, 3), {"padding": 1}, [(2, 4, 6)]), "Conv2d": ((4, 2, 3), {"padding": 1}, IMAGE),
    "Conv3d": ((2, 2, 2), {"padding": 1}, [(1, 2, 3, 4, 3)]),
    "ConvTranspose1d": ((4, 2, 3), {"stride": 3}, [(2, 4, 5)]),
    "ConvTranspose2d": ((4, 2, 3), {"stride": 3}, [(1, 4, 3, 2)]),
    "ConvTranspose3d": ((2, 2, 2), {"stride": 3}, [(1, 2, 2, 2, 3)]),
    "BatchNorm1d": ((4,), {}, ROWS), "BatchNorm2d": ((4,), {}, IMAGE), "BatchNorm3d": ((2,), {}, [(2, 2, 2, 3, 2)]),
    "InstanceNorm1d": ((4,), {"affine": True}, [(2, 4, 3)]), "InstanceNorm2d": ((4,), {"affine": True}, IMAGE),
    "InstanceNorm3d": ((2,), {"affine": True}, [(2, 2, 2, 3, 2)]), "GroupNorm": ((2, 4), {}, IMAGE),
    "LayerNorm": ((4,), {}, ROWS), "RMSNorm": ((4,), {}, ROWS), "LocalResponseNorm": ((2,), {}, IMAGE),
    "MultiheadAttention": ((8, 2), {}, [(4, 4, 8)] * 3),
    "TransformerEncoderLayer": ((8, 2), {"dim_feedforward": 12, "dropout": 0.0}, [(4, 3, 8)]),
    "TransformerDecoderLayer": ((8, 2), {"dim_feedforward": 12, "dropout": 0.0}, [(4, 4, 8)] * 2),
    "Transformer": (
        (), {"d_model": 8, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 12,
             "dropout": 0.0}, [(4, 4, 8)] * 2), "TransformerEncoder": None,
    "TransformerDecoder": None, "RNN": ((4, 3), {}, SEQUENCE), "LSTM": ((4, 3), {}, SEQUENCE),
    "GRU": ((4, 3), {}, SEQUENCE), "RNNCell": ((4, 3), {}, ROWS), "LSTMCell": ((4, 3), {}, ROWS),
    "GRUCell": ((4, 3), {}, ROWS), "Upsample": ((), {"scale_factor": 2.5, "mode": "bilinear"}, [(1, 2, 3, 4)]),
    "UpsamplingNearest2d": ((), {"size": 5}, IMAGE), "UpsamplingBilinear2d": ((), {"size": 5}, IMAGE),
    "PixelShuffle": ((2,), {}, IMAGE), "PixelUnshuffle": ((2,), {}, [(1, 2, 4, 6)]),
    "ChannelShuffle": ((2,), {}, IMAGE),
    "Unfold": ((2,), {}, IMAGE), "Fold": None, "PReLU": ((), {}, ROWS),
    "CosineSimilarity": ((), {}, ROWS * 2), "PairwiseDistance": ((), {}, ROWS * 2), "Embedding": None,
    "EmbeddingBag": None, "CTCLoss": None, "Threshold": ((0.1, -2.0), {}, ROWS), "Softmax2d": ((), {}, IMAGE),
    **{f"{kind}Pad{n}d": ((1,), {}, [(2, 3, 4, 5, 3)[: n + 2]])
       for kind in ("Zero", "Reflection", "Replication", "Circular") for n in (1, 2, 3)},
    **{f"ConstantPad{n}d": ((1, 0.5), {}, [(2, 3, 4, 5, 3)[: n + 2]]) for n in (1, 2, 3)},
    "GLU": ((), {}, [(4, 4)]),
    **{name: ((), {}, ROWS) for name in (
        "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
        "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    )},
    **{name: ((), {"dim": -1}, ROWS) for name in ("LogSoftmax", "Softmax", "Softmin")},
    **{name: ((), {}, ROWS * 2) for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "KLDivLoss")},
    **{name: ((), {}, ROWS * 3) for name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss")},
}  # fmt: skip
# Tested with inputs of their own in test_layers.py, which has these options; and classes that draw.
ELSEWHERE = {
    "BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "NLLLoss", "CosineEmbeddingLoss", "MarginRankingLoss",
    "HingeEmbeddingLoss", "SoftMarginLoss", "MultiMarginLoss", "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss",
    "PoissonNLLLoss", "GaussianNLLLoss", "Module", "ModuleDict", "ModuleList", "Parameter", "ParameterDict",
    "ParameterList", "Sequential", "RReLU",
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout",
    *(n for n in nn.__all__ if n.startswith("Lazy")),
}  # fmt: skip
# Values that are no defaults.
VALUES = {
    "bias": [False], "stride": [2], "padding": [1, 0], "dilation": [2], "groups": [2], "output_padding": [1],
    "padding_mode": ["reflect", "replicate", "circular"], "ceil_mode": [True], "count_include_pad": [False],
    "divisor_override": [5], "return_indices": [True], "eps": [0.3], "momentum": [0.4, None], "affine": [False, True],
    "track_running_stats": [False, True], "elementwise_affine": [False], "alpha": [0.3], "beta": [0.4], "k": [2.0],
    "add_bias_kv": [True], "add_zero_attn": [True], "kdim": [8], "vdim": [8], "batch_first": [True],
    "activation": ["gelu"], "layer_norm_eps": [0.3], "norm_first": [True], "num_layers": [2], "bidirectional": [True],
    "proj_size": [2], "nonlinearity": ["relu"], "mode": ["bicubic"], "align_corners": [True],
    "recompute_scale_factor": [True], "num_parameters": [4], "init": [0.7], "dim": [0], "keepdim": [True], "p": [1.0],
    "negative_slope": [0.4], "approximate": ["tanh"], "min_val": [-0.3], "max_val": [0.3], "lambd": [0.2],
    "threshold": [0.3], "reduction": ["sum", "none"], "delta": [0.4], "log_target": [True], "margin": [2.0],
    "swap": [True], "start_dim": [2], "end_dim": [2], "inplace": [False], "num_encoder_layers": [2],
    "num_decoder_layers": [2], "value": [0.3], "dim_feedforward": [5], "d_model": [8], "nhead": [4],
    # What only PyTorch has: refused.
    "device": ["cpu"], "size_average": [False], "reduce": [False], "max_value": [0.3], "min_value": [-0.3],
}  # fmt: skip
PASSED = {
    "size",
    "dtype",
    "dropout",
    "custom_encoder",
    "custom_decoder",
    "distance_function",
    "scale_factor",
    "args",
    "kwargs",
}


def list_arguments(name):
    kind = getattr(torch.nn, name)
    base = torch.nn.RNNBase if issubclass(kind, torch.nn.RNNBase) else kind
    listed = [
        p
        for p in inspect.signature(base.__init__).parameters.values()
        if p.name not in ("self", "mode" * (base is not kind))
    ]
    required = {p.name for p in listed if p.default is p.empty}
    return [p.name for p in listed if p.name not in required | PASSED]


def list_cases():
    for name, base in BASES.items():
        for argument in list_arguments(name) if base else ():
            for value in VALUES[argument]:
                yield pytest.param(name, argument, value, id=f"{name}-{argument}-{value}")


def run_both(ours, theirs, shapes):
    ours.load_state_dict(theirs.state_dict())
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    if isinstance(theirs, torch.nn.KLDivLoss):
        arrays[1] = np.abs(arrays[1])
    given = [torch.tensor(a, requires_grad=True) for a in arrays]
    want = theirs(*given)
    if isinstance(theirs, torch.nn.MultiheadAttention):
        want = want[0]
    want = flatten(want)
    (want[0] * want[0]).sum().backward()

    def loss(model, inputs):
        found = flatten(model(*inputs))
        return (found[0] * found[0]).sum(), (found, model)

    tensors = [ts.Tensor(a) for a in arrays]
    (_, (found, after)), (_, slopes) = ts.value_and_grad(loss, (0, 1), has_aux=True)(ours, tensors)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=3e-5, atol=3e-6)
    for a, b in zip(slopes, given, strict=True):
        np.testing.assert_allclose(a.numpy(), b.grad, rtol=3e-4, atol=3e-5)
    for path, t in theirs.state_dict().items():
        np.testing.assert_allclose(after.state_dict()[path].numpy(), t, rtol=1e-5, atol=1e-6, err_msg=path)


def flatten(found):
    return [t for part in found for t in flatten(part)] if isinstance(found, (tuple, list)) else [found]


def test_every_class_that_both_have_is_listed():
    both = {n for n, kind in vars(torch.nn).items() if inspect.isclass(kind) and n in nn.__all__}
    assert both - BASES.keys() - ELSEWHERE == set()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "argument", "value"), list(list_cases()))
def test_an_argument_has_the_effect_that_it_has_in_torch(name, argument, value):
    args, options, shapes = BASES[name]
    torch.manual_seed(0)
    try:
        theirs = getattr(torch.nn, name)(*args, **{**options, argument: value})
    except (TypeError, ValueError, AssertionError):
        with pytest.raises(ts.errors.TesseraError):
            getattr(nn, name)(*args, **{**options, argument: value})
        return
    try:
        ours = getattr(nn, name)(*args, **{**options, argument: value})
    except ts.errors.ArgumentError as error:
        assert argument in str(error) and argument in ("device", "size_average", "reduce", "max_value", "min_value")
        return
    run_both(ours, theirs, shapes)


@pytest.mark.parametrize("name", ["ReLU", "ReLU6", "SiLU", "Mish", "SELU", "Hardswish", "ELU", "Hardtanh"])
def test_inplace_may_be_the_last_positional_argument(name):
    kind, x = getattr(torch.nn, name), np.linspace(-2, 8, 9, dtype=np.float32)
    args = [p.default for p in inspect.signature(kind).parameters.values() if p.name not in ("min_value", "max_value")]
    want = kind(*args[:-1], True)(torch.tensor(x))
    np.testing.assert_allclose(getattr(nn, name)(*args[:-1], True)(ts.Tensor(x)).numpy(), want, rtol=1e-6, atol=1e-7)
    with pytest.raises(ts.errors.ArgumentError):
        getattr(nn, name)(*args, 1.0)


@pytest.mark.parametrize(("make", "what"), [
    (lambda: nn.Linear(2, 3, device="cpu"), "module.to"), (lambda: nn.MSELoss(reduce=False), 'reduction="none"'),
    (lambda: nn.Embedding(3, 2, sparse=True), "leave it out"), (lambda: nn.Conv2d(1, 1, 1, foo=3), "foo"),
    (lambda: nn.ReLU(foo=3), "foo"), (lambda: nn.ELU("a"), "alpha"), (lambda: nn.AvgPool2d(2, divisor_override=0), "0"),
    (lambda: nn.LSTM(3, 4, proj_size=4), "hidden_size"), (lambda: nn.Conv2d(1, 1, 1, padding_mode="edge"), "reflect"),
    (lambda: nn.ConvTranspose2d(1, 1, 1, padding_mode="reflect"), "zeros"), (lambda: nn.RNN(3, 4, 1, "x"), "relu"),
    (lambda: nn.Embedding(3, 2, max_norm=-1.0), "max_norm"), (lambda: nn.LSTM(3, 4, dropout=2.0), "0 to 1"),
    (lambda: nn.ZeroPad2d((1, 2, 3)), "4 of them"), (lambda: nn.GRU(3, 4, proj_size=2), "proj_size"),
    (lambda: nn.ReflectionPad1d(3)(ts.zeros((1, 2, 3))), "more elements"),
    (lambda: nn.CircularPad1d(4)(ts.zeros((1, 2, 3))), "more elements"),
    (lambda: nn.ZeroPad1d(-2)(ts.zeros((1, 2, 3))), "more elements"),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2)), "num_layers"),
    (lambda: nn.RMSNorm(()), "no axes"),
    (lambda: nn.Unflatten(1, (2, 3))(ts.zeros((2, 5))), "split"),
    (lambda: nn.AdaptiveAvgPool2d((1, 2, 3)), "2 of them"),
])  # fmt: skip
def test_bad_arguments_are_refused(make, what):
    with pytest.raises(ts.errors.TesseraError, match="(?s)" + what):
        make()
