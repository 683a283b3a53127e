"""Recurrent layers through torch.compile: whole in the forward and the backward program, equal to eager PyTorch."""

import copy

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.torch import decompositions, recurrent_layers  # noqa: E402

KINDS = [
    ("LSTM", {"bidirectional": True, "batch_first": True}),
    ("LSTM", {"proj_size": 3, "num_layers": 2}),
    ("LSTM", {"proj_size": 2, "bias": False, "bidirectional": True}),
    ("LSTM", {"num_layers": 2, "dropout": 1.0}),  # what a probability of 1 drops is no question
    ("GRU", {"num_layers": 2, "batch_first": True}),
    ("GRU", {"bias": False, "bidirectional": True}),
    ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
    ("RNN", {"num_layers": 2}),
]


def make(kind, named, shape=(3, 2, 5)):
    torch.manual_seed(0)
    return getattr(torch.nn, kind)(5, 4, **named), torch.randn(shape)


def run_step(call, module, x):
    """All results of a layer, and the gradients of the input and the weights."""
    x = x.clone().requires_grad_()
    results = torch.utils._pytree.tree_leaves(call(x))
    loss = sum((r * torch.linspace(-1, 1, r.numel()).reshape(r.shape)).sum() for r in results)
    return [*results, *torch.autograd.grad(loss, [x, *module.parameters()])]


def check_equal(found, wanted):
    assert len(found) == len(wanted)
    for own, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, want, atol=1e-5, rtol=1e-5)


def compile_layer(module, **options):
    torch._dynamo.reset()
    ts.torch.reset_report()
    return torch.compile(module, backend=ts.torch.backend, options={"fallback": False, **options})


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "named"), KINDS)
def test_a_training_step_is_that_of_pytorch(kind, named):
    module, x = make(kind, named)
    other = copy.deepcopy(module)
    found = run_step(compile_layer(other, level="graph"), other, x)
    check_equal(found, run_step(module, module, x))
    assert ts.torch.report().graphs == 2


def test_compiled_programs_hold_the_scan_whole():
    module, x = make("GRU", {"bidirectional": True}, (50, 2, 5))
    check_equal(run_step(compile_layer(module), module, x), run_step(module, module, x))
    assert ts.torch.report().ops < 60  # unrolled, each of 50 steps and 2 directions would be some


def test_dropout_between_layers_drops_elements():
    module, x = make("LSTM", {"num_layers": 2, "dropout": 0.5}, (40, 2, 5))
    compiled = compile_layer(module, level="graph")
    torch.manual_seed(1)
    first, again = compiled(x)[0], compiled(x)[0]
    assert not torch.allclose(first, again)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x)[0], first)
    module.eval()
    torch.testing.assert_close(compiled(x)[0], module(x)[0])


def test_other_backends_capture_what_they_did():
    module, x = make("GRU", {})
    compile_layer(module, level="graph")(x)
    assert torch._dynamo.config.allow_rnn is False
    seen = []

    def other(graph, inputs):
        seen.extend(n.target for n in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    torch.compile(module, backend=other)(x)
    assert torch.gru not in seen


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_whole_ops_run_in_pytorch(name):
    """What the table does not take falls back to these."""
    recurrent_layers.define_ops()
    gates = {"lstm": 4, "gru": 3}.get(name, 1)
    shapes = [(gates * 4, 5), (gates * 4, 4), (gates * 4,), (gates * 4,)]
    x, h, c, *params = [torch.randn(s, requires_grad=True) for s in [(3, 2, 5), (1, 2, 4), (1, 2, 4), *shapes]]
    states = [h, c] if name == "lstm" else h
    leaves = [x, *([h, c] if name == "lstm" else [h]), *params]
    numbers = (True, 1, 0.0, True, False, False)
    results = []
    for op in (getattr(torch.ops.tessera_recurrent, name), getattr(torch._VF, name)):
        outs = op(x, states, params, *numbers)
        results.append([*outs, *torch.autograd.grad([o.square().sum() for o in outs], leaves)])
    check_equal(*results)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("named", [{"bidirectional": True, "num_layers": 2}, {"bias": False, "batch_first": True}])
def test_the_ops_of_cudnn_are_whole_ops(kind, named):
    """`_cudnn_rnn` has the weights of all layers in one list; its backward op does without reserved space."""
    module, x = make(kind, named)
    weights = [w.detach() for w in module.parameters()]
    wanted = run_step(module, module, x)
    out, (hy, *cy), by_x, *by_weights = torch.utils._pytree.tree_unflatten(
        wanted[: -1 - len(weights)], torch.utils._pytree.tree_structure((0, (0, 0) if kind == "LSTM" else (0,)))
    ) + tuple(wanted[-1 - len(weights) :])
    h = torch.zeros_like(hy)
    c = torch.zeros_like(h) if kind == "LSTM" else None
    mode = {"LSTM": 2, "GRU": 3, "RNN": 1}[kind]
    both, first = named.get("bidirectional", False), named.get("batch_first", False)
    numbers = (mode, 4, 0, module.num_layers, first, 0.0, True, both, [], None)
    stride = 4 if module.bias else 2
    found = decompositions.cudnn_rnn(x, weights, stride, None, h, c, *numbers)
    check_equal(found[: 3 if cy else 2], [out, hy, *cy])
    gradients = [torch.linspace(-1, 1, r.numel()).reshape(r.shape) for r in (out, hy, *cy)]
    gradients += [None] * (3 - len(gradients))
    by = decompositions.cudnn_rnn_backward(
        x, weights, stride, found[4], h, c, out, *gradients, *numbers, found[3], [True] * 4
    )
    check_equal([by[0], *by[3]], [by_x, *by_weights])


def test_under_autocast_layers_are_those_of_pytorch():
    module, x = make("LSTM", {"bidirectional": True})
    module.eval()
    compiled = compile_layer(module, level="graph", fallback=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x)[0].float(), module(x)[0].float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_onednn_is_a_whole_op(bias, reverse):
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(3, 4, bias=bias), torch.randn(5, 2, 3)
    weights = [w.detach() for w in lstm.parameters()] + ([] if bias else [torch.zeros(16)] * 2)
    state = [torch.randn(1, 2, 4) for _ in range(2)]
    with torch.no_grad():
        want, (h, c) = lstm(x.flip(0) if reverse else x, tuple(state))
    arguments = (reverse, [], 2, 4, 1, bias, False, False)
    found = decompositions.mkldnn_rnn_layer(x, *weights, *state, *arguments, False)
    check_equal(found[:3], [want.flip(0) if reverse else want, h, c])
    assert decompositions.mkldnn_rnn_layer(x, *weights, *state, *arguments, True) is NotImplemented
