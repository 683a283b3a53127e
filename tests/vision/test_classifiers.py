"""ResNet and ViT of examples/vision: results, statistics and gradients are those of plain PyTorch definitions."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts

sys.path.insert(0, str(Path(__file__).parents[2]))
torch = pytest.importorskip("torch")
from examples.vision import classify  # noqa: E402
from examples.vision.resnet import make_resnet  # noqa: E402
from examples.vision.vit import VisionTransformer, make_vit  # noqa: E402

F = torch.nn.functional
rng = np.random.default_rng(3)


def normalise(state, name, x):
    weights = [state[f"{name}.{part}"] for part in ("weight", "bias")]
    return F.batch_norm(x, None, None, *weights, training=True)


def run_block(state, name, x, stride):
    """A residual block of PyTorch's functions: two convolutions, or three where the state has them."""
    deep = f"{name}.conv3.weight" in state
    h = x
    for number in (1, 2, 3) if deep else (1, 2):
        weight = state[f"{name}.conv{number}.weight"]
        step = stride if number == (2 if deep else 1) else 1
        h = normalise(state, f"{name}.bn{number}", F.conv2d(h, weight, stride=step, padding=weight.shape[-1] // 2))
        h = F.relu(h) if number < (3 if deep else 2) else h
    if f"{name}.downsample.0.weight" in state:
        x = normalise(state, f"{name}.downsample.1", F.conv2d(x, state[f"{name}.downsample.0.weight"], stride=stride))
    return F.relu(h + x)


def run_resnet(state, x):
    h = F.relu(normalise(state, "bn1", F.conv2d(x, state["conv1.weight"], stride=2, padding=3)))
    h = F.max_pool2d(h, 3, 2, 1)
    blocks = dict.fromkeys(".".join(n.split(".")[:2]) for n in state if n.startswith("layer"))
    for name in blocks:
        h = run_block(state, name, h, 1 if name.endswith(".0") is False or name == "layer1.0" else 2)
    return F.linear(h.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def run_vit(state, x, heads):
    part = lambda name: [state[f"{name}.{k}"] for k in ("weight", "bias")]  # noqa: E731
    features = state["class_token"].shape[-1]
    tokens = F.conv2d(x, *part("conv_proj"), stride=state["conv_proj.weight"].shape[-1]).flatten(2).transpose(1, 2)
    h = torch.cat([state["class_token"].expand(len(x), 1, features), tokens], 1) + state["encoder.pos_embedding"]
    for name in dict.fromkeys(".".join(n.split(".")[:3]) for n in state if n.startswith("encoder.layers")):
        y = F.layer_norm(h, (features,), *part(f"{name}.ln_1"), 1e-6)
        attention = torch.nn.MultiheadAttention(features, heads, batch_first=True)
        inner = {
            k.removeprefix(f"{name}.self_attention."): v for k, v in state.items() if f"{name}.self_attention" in k
        }
        h = h + torch.func.functional_call(attention, inner, (y, y, y))[0]
        y = F.layer_norm(h, (features,), *part(f"{name}.ln_2"), 1e-6)
        h = h + F.linear(F.gelu(F.linear(y, *part(f"{name}.mlp.0"))), *part(f"{name}.mlp.3"))
    h = F.layer_norm(h, (features,), *part("encoder.ln"), 1e-6)
    return F.linear(h[:, 0], *part("heads.head"))


def load_random(model):
    """Random weights of a scale that keeps signals, loaded as a state dict of PyTorch."""
    state = {}
    for name, value in model.state_dict().items():
        if value.dtype is ts.int64 or name.endswith(("running_mean", "running_var")):
            state[name] = torch.tensor(value.numpy())
            continue
        scale = 1 / np.sqrt(np.prod(value.shape[1:])) if value.ndim > 1 else 0.3
        array = rng.normal(size=value.shape).astype(np.float32) * np.float32(scale)
        norm = name.endswith("weight") and value.ndim == 1
        state[name] = torch.tensor(array + np.float32(norm), requires_grad=True)
    model.load_state_dict(state)
    return state


def compare(model, state, want, images, digits):
    def loss(model, x, y):
        logits = model(x)
        return ts.cross_entropy(logits, y), (logits, model)

    (value, (logits, new)), grads = ts.value_and_grad(loss, has_aux=True)(model, images, digits)
    theirs = want(torch.tensor(images))
    expected = F.cross_entropy(theirs, torch.tensor(digits))
    expected.backward()
    np.testing.assert_allclose(logits.numpy(), theirs.detach(), rtol=2e-3, atol=2e-4)
    assert value.item() == pytest.approx(expected.item(), rel=1e-3)
    for name, gradient in grads.named_parameters():
        scale = float(state[name].grad.abs().max()) + 1e-6
        np.testing.assert_allclose(gradient.numpy(), state[name].grad, rtol=1e-2, atol=5e-3 * scale, err_msg=name)
    return new


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_forward_and_backward(name):
    model = make_resnet(name, classes=5, width=4)
    state = load_random(model)
    images, digits = rng.normal(size=(3, 3, 40, 40)).astype(np.float32), np.array([0, 4, 2])
    compare(model, state, lambda x: run_resnet(state, x), images, digits)


def test_a_vit_forward_and_backward():
    model = VisionTransformer(image=12, patch=4, depth=2, heads=2, features=8, hidden=16, classes=5)
    state = load_random(model)
    images, digits = rng.normal(size=(3, 3, 12, 12)).astype(np.float32), np.array([0, 4, 2])
    compare(model, state, lambda x: run_vit(state, x, 2), images, digits)


# The number of parameters of torchvision's models.
COUNTS = {"resnet18": 11_689_512, "resnet50": 25_557_032}


@pytest.mark.parametrize("name", COUNTS)
def test_the_models_have_the_size_of_the_published_ones(name):
    model = classify.make_model(name)
    assert model.count_parameters() == COUNTS[name] and not model.training


def test_names_of_a_vit_are_those_of_torchvision():
    names = VisionTransformer(image=8, patch=4, depth=1, heads=1, features=4, hidden=4, classes=2).state_dict()
    block = "encoder.layers.encoder_layer_0"
    parts = [
        "self_attention.in_proj_weight",
        "self_attention.out_proj.bias",
        "ln_1.weight",
        "mlp.0.bias",
        "mlp.3.weight",
    ]
    assert {f"{block}.{part}" for part in parts} <= names.keys()
    assert {
        "class_token",
        "conv_proj.weight",
        "encoder.pos_embedding",
        "encoder.ln.bias",
        "heads.head.weight",
    } <= names.keys()


def test_a_classifier_with_weights_of_a_file(tmp_path):
    model = make_resnet("resnet18", classes=4, width=4).eval()
    state = {k: v.detach() for k, v in load_random(model).items()}
    torch.save(state, tmp_path / "weights.pth")
    other = make_resnet("resnet18", classes=4, width=4).eval()
    other.load_state_dict(classify.read_state(tmp_path / "weights.pth"))
    image = (rng.random((32, 32, 3)) * 255).astype(np.uint8)
    np.save(tmp_path / "image.npy", image)
    found = classify.classify(other, classify.read_image(tmp_path / "image.npy"), target="interp")
    want = ts.softmax(model(classify.read_image(tmp_path / "image.npy"))).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-5)


def test_a_compiled_classifier():
    model = VisionTransformer(image=8, patch=4, depth=1, heads=2, features=8, hidden=8, classes=3).eval()
    images = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(
        classify.classify(model, images, "cpu"), ts.softmax(model(images)).numpy(), rtol=1e-4, atol=1e-6
    )


def test_wrong_files(tmp_path):
    with pytest.raises(ts.errors.FileError, match="no file"):
        classify.read_state(tmp_path / "none.pth")
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ts.errors.FileError, match="no state dict"):
        classify.read_state(tmp_path / "list.pth")
    np.save(tmp_path / "flat.npy", np.zeros((4, 4)))
    with pytest.raises(ts.errors.ShapeError, match="not an image"):
        classify.read_image(tmp_path / "flat.npy")
    with pytest.raises(ts.errors.ArgumentError, match="resnet19"):
        make_resnet("resnet19")
    with pytest.raises(ts.errors.ArgumentError, match="vit_x"):
        make_vit("vit_x")
    with pytest.raises(ts.errors.StateDictError, match="fc.bias"):
        make_resnet("resnet18", classes=4, width=4).load_state_dict({"fc.bias": np.zeros(3, np.float32)})
