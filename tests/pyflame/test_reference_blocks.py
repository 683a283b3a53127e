# ruff: noqa: E501 - tables of programs
"""Every code block of the PyFlame API reference runs and has the values that it states (reference_blocks.md).

Where a block is broken or says less than a value, `CHECKS` has what a user of PyTorch expects of it:

- Arrays are printed without their type in the reference; values are compared.
- "Module Base Class" lists methods without bodies, which is no Python: the methods and their parameters are compared.
- Loops call `train(...)`, `validate(...)` and the like with an ellipsis: functions of any arguments serve them.
- `Sequential` is declared as `Sequential(*modules)` and used with a list: both are accepted.
- The C++ summary is not Python (docs/pyflame.md says why it is not here).
"""

import ast
import contextlib
import doctest
import inspect
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera.pyflame as pf

TEXT = Path(__file__).with_name("reference_blocks.md").read_text()
BLOCKS = re.findall(r"^## (.*?)\n\n```(\w+)\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
PYTHON = [(f"{i:03d} {title}", title, code) for i, (title, language, code) in enumerate(BLOCKS) if language == "python"]
INPUTS = {
    "images": "input = pf.randn([2, {}, 6, 6])",
    "pair": "predictions = pf.randn([4, 3], requires_grad=True); targets = pf.rand([4, 3])",
    "classes": "logits = pf.randn([4, 5], requires_grad=True); targets = pf.tensor([0, 4, 2, 2], dtype=pf.int32)",
    "model": "model = pf.nn.Linear(3, 2); pf.autograd.backward(model(pf.ones([1, 3])).sum())",
    "rate": "optimizer = pf.optim.SGD([pf.nn.Parameter(pf.ones([1]))], lr=0.5); rates = [0.5]\n"
    "def train(*args):\n    rates.append(optimizer.get_lr())\ntrain_step = train\nvalidate = lambda *args: 1.0",
}
ARITHMETIC = "a, b = pf.tensor([[1, 2], [3, 4]]), pf.tensor([10, 20])"
# What a block needs before it, by the title of its section.
SETUP = {
    **dict.fromkeys(["Addition", "Subtraction", "Multiplication", "Division", "Negation"], ARITHMETIC),
    "`generate(graph, options=CodeGenOptions())`": (
        "graph = pf.get_graph(pf.relu(pf.ones([4, 4]) @ pf.ones([4, 4]))); options = pf.CodeGenOptions()"
    ),
    "no_grad Context Manager": "model = pf.nn.Linear(3, 2); input = pf.ones([1, 3])",
    "Linear Layer": "input = pf.ones([7, 512])",
    "Conv2d": INPUTS["images"].format(3),
    "Conv1d": "input = pf.randn([2, 128, 9])",
    "BatchNorm2d": INPUTS["images"].format(64),
    "BatchNorm1d": "input = pf.randn([5, 256])",
    "LayerNorm": "input = pf.randn([2, 3, 768])",
    "GroupNorm": INPUTS["images"].format(256),
    **dict.fromkeys(["MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d", "GlobalAvgPool2d"], INPUTS["images"].format(3)),
    "Dropout": "input = pf.ones([50, 50])",
    "Dropout2d": "input = pf.ones([30, 20, 3, 3])",
    "MultiheadAttention": "x = query = pf.randn([4, 2, 512]); key = value = pf.randn([5, 2, 512])",
    "SelfAttention": "input = pf.randn([4, 2, 768])",
    "CrossAttention": "query, context = pf.randn([4, 2, 512]), pf.randn([5, 2, 512])",
    "Sequential Container": "input = pf.randn([3, 784])",
    **dict.fromkeys(["MSELoss", "L1Loss", "SmoothL1Loss"], INPUTS["pair"]),
    **dict.fromkeys(["CrossEntropyLoss", "NLLLoss"], INPUTS["classes"]),
    **dict.fromkeys(["BCELoss", "BCEWithLogitsLoss"], "logits = pf.randn([6]); targets = pf.rand([6])"),
    "KLDivLoss": "log_probs = pf.log_softmax(pf.randn([3, 4])); target_probs = pf.softmax(pf.randn([3, 4]))",
    # Its targets are those of cross_entropy and of bce_with_logits: probabilities are both.
    "Functional Interface": "logits = pf.randn([4, 5]); probs = pf.rand([4, 5]); pred = pf.rand([3]); target = pf.rand([3])\n"
    "targets = pf.softmax(pf.randn([4, 5]))",
    "SGD": "from types import SimpleNamespace; loss_fn = pf.nn.MSELoss()\n"
    "data = [SimpleNamespace(x=pf.randn([8, 100]), y=pf.zeros([8, 10]))] * 4\n"
    "pf.manual_seed(0)",
    **dict.fromkeys(["Adam", "AdamW", "RMSprop"], INPUTS["model"]),
    "Optimizer Methods": INPUTS["model"] + "\noptimizer = pf.optim.Adam(model.parameters()); new_lr = 0.25\n"
    "state = optimizer.state_dict(); before = model.weight.numpy()",
    **dict.fromkeys(
        ["StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "ReduceLROnPlateau", "OneCycleLR", "LinearLR",
         "PolynomialLR"], INPUTS["rate"],
    ),
}  # fmt: skip
STEPS = "\nfor _ in range(3): scheduler.step()\n"
TORCH_LOSS = "import torch; F = torch.nn.functional; t = lambda x: torch.tensor(x.numpy())\n"
# What holds after a block.
CHECKS = {
    "`eval()`": "assert y.is_evaluated() and (y.numpy() == np.maximum(x.numpy(), 0)).all()",
    "`randn(shape, dtype=float32, layout=None)`": "assert x.shape == [1000]",
    "Addition": "assert c.numpy().tolist() == [[6, 7], [8, 9]] and (a + b).numpy().tolist() == [[11, 22], [13, 24]]",
    "Subtraction": "assert c.numpy().tolist() == [[-4, -3], [-2, -1]]",
    "Multiplication": "assert c.numpy().tolist() == [[2, 4], [6, 8]]",
    "Division": "assert c.numpy().tolist() == [[0.5, 1], [1.5, 2]]",
    "Negation": "assert c.numpy().tolist() == [[-1, -2], [-3, -4]]",
    "`gelu(x)`": "import torch; t = torch.tensor(x.numpy())\n"
    "np.testing.assert_allclose(y.numpy(), torch.nn.functional.gelu(t), rtol=1e-5, atol=1e-6)",
    "`silu(x)`": "np.testing.assert_allclose(y.numpy(), x.numpy() / (1 + np.exp(-x.numpy())), rtol=1e-5)",
    "`softmax(x, dim=-1)`": "np.testing.assert_allclose(probs.sum(dim=1).numpy(), np.ones(32), rtol=1e-5)",
    "`log_softmax(x, dim=-1)`": "np.testing.assert_allclose(log_probs.numpy(), np.log(pf.softmax(x, 1).numpy()), 1e-4)",
    "`MeshLayout.row_partition(n)`": "assert layout.tile(x.shape, pf.PECoord(1, 0))[0] == slice(25, 50)",
    "`MeshLayout.col_partition(n)`": "assert layout.tile(x.shape, pf.PECoord(0, 3))[1] == slice(75, 100)",
    "`MeshLayout.grid(rows, cols)`": "assert layout.tile(x.shape, pf.PECoord(1, 0)) == (slice(256, 512), slice(0, 256))",
    "`get_graph(tensor)`": "assert graph.num_nodes == 2",
    "`get_node(tensor)`": "assert node.op_type == 'randn' and node.output_shape == [100]",
    "`print_graph(tensor)`": "assert 'relu' in printed and 'matmul' in printed",
    "CodeGenOptions Class": "assert (options.output_dir, options.fabric_width) == ('./pyflame_csl_output', 0)\n"
    "assert options.emit_comments and not options.generate_debug_info",
    "`generate(graph, options=CodeGenOptions())`": "assert result.success and (result.run() == 4).all()\n"
    "assert 'Generated' in printed and result.output_dir.endswith('pyflame_csl_output')",
    "`compile_to_csl(tensor, options=CodeGenOptions())`": "assert result.success\n"
    "np.testing.assert_allclose(result.run(), c.numpy(), rtol=1e-4, atol=1e-4)",
    "GradMode": "assert pf.autograd.GradMode.is_enabled()",
    "no_grad Context Manager": "assert not output.requires_grad and model(input).requires_grad",
    "backward(output, grad_output=None)": "np.testing.assert_allclose(x.grad.numpy()[0], y.numpy().sum(1), rtol=1e-5)",
    "Linear Layer": "assert output.shape == [7, 256] and layer.weight.shape == [256, 512] and layer.bias.shape == [256]\n"
    "want = input.numpy() @ layer.weight.numpy().T + layer.bias.numpy()\n"
    "np.testing.assert_allclose(output.numpy(), want, rtol=1e-4, atol=1e-5)",
    "Conv2d": "assert output.shape == [2, 64, 6, 6]",
    "Conv1d": "assert output.shape == [2, 256, 9]",
    "BatchNorm2d": "np.testing.assert_allclose(output.numpy().mean((0, 2, 3)), np.zeros(64), atol=1e-5)",
    "BatchNorm1d": "np.testing.assert_allclose(output.numpy().std(0), np.ones(256), atol=1e-3)",
    "LayerNorm": "np.testing.assert_allclose(output.numpy().std(-1), np.ones((2, 3)), atol=1e-3)",
    "GroupNorm": "np.testing.assert_allclose(output.numpy().reshape(2, 32, -1).mean(-1), np.zeros((2, 32)), atol=1e-5)",
    "MaxPool2d": "assert output.shape == [2, 3, 3, 3]\n"
    "assert (output.numpy() == input.numpy().reshape(2, 3, 3, 2, 3, 2).max((3, 5))).all()",
    "AvgPool2d": "np.testing.assert_allclose(output.numpy(), input.numpy().reshape(2, 3, 3, 2, 3, 2).mean((3, 5)), 1e-4)",
    "AdaptiveAvgPool2d": "np.testing.assert_allclose(output.numpy(), input.numpy().mean((2, 3), keepdims=True), 1e-4)",
    "GlobalAvgPool2d": "np.testing.assert_allclose(output.numpy(), input.numpy().mean((2, 3), keepdims=True), 1e-4)",
    "Dropout": "assert (output.numpy() == 1).all(); kept = dropout.train()(input).numpy()\n"
    "assert set(np.unique(kept)) == {0, 2} and abs((kept == 0).mean() - 0.5) < 0.06",
    "Dropout2d": "found = output.numpy().reshape(600, 9)\n"
    "assert (found == found[:, :1]).all() and abs((found == 0).mean() - 0.2) < 0.06",
    "MultiheadAttention": "assert output.shape == [4, 2, 512] and attn_weights.shape == [2, 4, 5]\n"
    "np.testing.assert_allclose(attn_weights.numpy().sum(-1), np.ones((2, 4)), rtol=1e-5)",
    "SelfAttention": "assert output.shape == [4, 2, 768]",
    "CrossAttention": "assert output.shape == [4, 2, 512]",
    "Sequential Container": "assert output.shape == [3, 10] and len(model.parameters()) == 4",
    "MSELoss": "np.testing.assert_allclose(loss.item(), ((predictions.numpy() - targets.numpy()) ** 2).mean(), 1e-5)",
    "L1Loss": "np.testing.assert_allclose(loss.item(), abs(predictions.numpy() - targets.numpy()).mean(), 1e-5)",
    "SmoothL1Loss": TORCH_LOSS + "np.testing.assert_allclose(loss.item(), F.smooth_l1_loss(t(predictions), t(targets)), 1e-5)",
    "CrossEntropyLoss": TORCH_LOSS + "np.testing.assert_allclose(loss.item(), F.cross_entropy(t(logits), t(targets).long()), 1e-5)\n"
    "want = F.cross_entropy(t(logits), t(targets).long(), label_smoothing=0.1)\n"
    "np.testing.assert_allclose(loss_fn(logits, targets).item(), want, rtol=1e-5)",
    "BCELoss": TORCH_LOSS + "np.testing.assert_allclose(loss.item(), F.binary_cross_entropy(t(logits).sigmoid(), t(targets)), 1e-5)",
    "BCEWithLogitsLoss": TORCH_LOSS
    + "np.testing.assert_allclose(loss.item(), F.binary_cross_entropy_with_logits(t(logits), t(targets)), 1e-5)",
    "NLLLoss": TORCH_LOSS + "np.testing.assert_allclose(loss.item(), F.cross_entropy(t(logits), t(targets).long()), 1e-5)",
    "KLDivLoss": TORCH_LOSS
    + "np.testing.assert_allclose(loss.item(), F.kl_div(t(log_probs), t(target_probs), reduction='sum') / 12, rtol=1e-4)",
    "SGD": "import numpy; first = loss_fn(model(data[0].x), data[0].y).item(); assert first < 1",
    "Adam": "optimizer.step(); assert optimizer.rule.amsgrad and optimizer.get_lr() == 0.001",
    "AdamW": "optimizer.step(); assert optimizer.get_lr() == 1e-4 and optimizer.rule.weight_decay == 0.01",
    "RMSprop": "optimizer.step(); assert optimizer.rule.momentum == 0.9",
    "Optimizer Methods": "assert optimizer.get_lr() == 0.001 and model.weight.grad is None\n"
    "assert (model.weight.numpy() != before).all()",
    "StepLR": "np.testing.assert_allclose([rates[i] for i in (1, 30, 31, 61, 91)], [0.5, 0.5, 0.05, 0.005, 0.0005], 1e-6)",
    "MultiStepLR": "for _ in range(31): scheduler.step()\nnp.testing.assert_allclose(optimizer.get_lr(), 0.05, rtol=1e-6)",
    "ExponentialLR": STEPS + "np.testing.assert_allclose(optimizer.get_lr(), 0.5 * 0.95**3, rtol=1e-6)",
    "CosineAnnealingLR": STEPS
    + "np.testing.assert_allclose(optimizer.get_lr(), 1e-6 + (0.5 - 1e-6) * (1 + np.cos(np.pi * 3 / 100)) / 2, rtol=1e-6)",
    "ReduceLROnPlateau": "assert rates[12] == 0.5 and abs(rates[13] - 0.05) < 1e-9",
    "OneCycleLR": "assert max(rates[1:]) == 0.1 and abs(rates[1] - 0.1 / 25) < 1e-9 and rates.index(max(rates[1:])) == 300\n"
    "assert rates[-1] < 1e-6",
    "LinearLR": STEPS + "np.testing.assert_allclose(optimizer.get_lr(), 0.5 * (0.1 + 0.9 * 3 / 10), rtol=1e-6)",
    "PolynomialLR": STEPS + "np.testing.assert_allclose(optimizer.get_lr(), 0.5 * 0.97**2, rtol=1e-6)",
    "Functional Interface": "assert loss.shape == []",
}  # fmt: skip


@pytest.mark.parametrize(("name", "title", "code"), PYTHON, ids=[name for name, _, _ in PYTHON])
def test_block(name, title, code, tmp_path, monkeypatch):
    if title == "Module Base Class":
        compare_module(code)
        return
    if title in CHECKS and "torch" in CHECKS[title]:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    code = re.sub(r"\b(import|from) pyflame", r"\1 tessera.pyflame", code)
    code = re.sub(r"(?m)^#.*\n", "", code) if ">>>" in code else code  # which doctest takes for an output
    names = {"pf": pf, "np": np}
    exec(SETUP.get(title, ""), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_session(code, names) if ">>>" in code else exec(code, names)
    exec(CHECKS.get(title, ""), {**names, "printed": printed.getvalue()})


def test_every_block_states_something():
    """A block without a stated value has a check."""
    silent = []
    for _, title, code in PYTHON:
        stated = any(e.want or find_comment(e.source) for e in doctest.DocTestParser().get_examples(code))
        if not (stated or title in CHECKS or title in LEAVES):
            silent.append(title)
    assert not silent


# Blocks without a result to compare: that their tensors can be computed is checked; test_operations.py has the values.
LEAVES = ("`mean(dim=None, keepdim=False)`", "`max(dim=None, keepdim=False)`", "`min(dim=None, keepdim=False)`",
          "`tensor(data, dtype=None)`", "`from_numpy(arr)`", "`MeshLayout.single_pe()`", "Module Base Class",
          "`zeros(shape, dtype=float32, layout=None)`", "`ones(shape, dtype=float32, layout=None)`",
          "`full(shape, value, dtype=float32, layout=None)`", "`eval(*tensors)`")  # fmt: skip


def run_session(code, names):
    """A session with prompts: values are compared with what it prints and with what comments say."""
    for example in doctest.DocTestParser().get_examples(code):
        values = []
        monkey, sys.displayhook = sys.displayhook, values.append
        try:
            exec(compile(example.source, "<reference>", "single"), names)
        finally:
            sys.displayhook = monkey
        value = values[-1] if values else None
        if isinstance(value, pf.Tensor):
            assert value.eval().numpy().size == value.numel
        if example.want:
            compare_printed(value, example.want.strip())
        if comment := find_comment(example.source):
            last = ast.parse(example.source).body[-1]
            target = value if values else names[last.targets[0].id]
            compare_comment(target, *comment)


def compare_printed(value, want):
    if not isinstance(value, np.ndarray):
        assert repr(value) == want
        return
    numbers = [float(n) for n in re.findall(r"-?\d+\.\d*?(?=\.\.\.|[,\]])", want)]
    np.testing.assert_allclose(value.ravel(), numbers, rtol=1e-3, atol=1e-4)


COMMENT = re.compile(
    r"#\s*(Shape:|Approximately|Broadcasts to|>=|<|.*->|)\s*(\[[\d., ]*\]|scalar|-?\d+(?:\.\d+)?)\s*(?:$|\()"
)


def find_comment(source):
    found = COMMENT.search(source)
    return found and (found.group(1), [] if found.group(2) == "scalar" else ast.literal_eval(found.group(2)))


def compare_comment(target, kind, want):
    if kind == "Approximately":
        assert abs(target - want) < 0.15
    elif kind in (">=", "<"):
        assert target >= want if kind == ">=" else target < want
    elif kind.startswith("Shape") or kind.endswith("->"):
        assert target.shape == want
    elif kind == "Broadcasts to":
        assert np.broadcast_shapes(tuple(target.shape), tuple(want)) == tuple(want)
    elif isinstance(target, list):
        assert target == want
    else:
        np.testing.assert_allclose(target.numpy(), want)


def compare_module(code):
    """The methods that the block lists, with their parameters."""
    listed = re.findall(r"def (\w+)\(([^)]*)\)", code)
    assert len(listed) == 8
    for name, parameters in listed:
        method = getattr(pf.nn.Module, name)
        wanted = [p for p in re.findall(r"(\w+)(?::[^,]*)?", parameters) if p not in ("self", "Tensor", "bool", "True")]
        assert len(inspect.signature(method).parameters) >= len(wanted)
    model = pf.nn.Sequential([pf.nn.Linear(2, 2), pf.nn.Dropout(0.5)])
    assert model.is_training() and not model.eval().is_training() and model.train(True).is_training()
    saved = model.state_dict()
    pf.autograd.backward(model(pf.ones([1, 2])).sum())
    assert all(isinstance(p, pf.Tensor) and p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model.load_state_dict({k: v * 0.0 for k, v in saved.items()})
    assert (model(pf.ones([1, 2])).numpy() == 0).all()
