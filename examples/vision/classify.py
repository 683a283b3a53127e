"""Classify an image: a ResNet or ViT with weights from a PyTorch state dict or a safetensors file.

    python examples/vision/classify.py resnet18 --weights resnet18.pth --image photo.npy

`--image` is a NumPy file [3, H, W] or [H, W, 3] of bytes or of floats from 0 to 1; without it, and without weights,
random ones. The image is normalised with the mean and deviation of ImageNet. Prints the five best classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from tessera import nn

if __package__:
    from examples.vision.resnet import DEPTHS, make_resnet
    from examples.vision.vit import SIZES, make_vit
else:  # run as a file
    from resnet import DEPTHS, make_resnet  # type: ignore[no-redef, import-not-found]
    from vit import SIZES, make_vit  # type: ignore[no-redef, import-not-found]

MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def make_model(name: str, classes: int = 1000) -> nn.Module:
    """A model by its name, in evaluation mode."""
    return (make_resnet(name, classes) if name in DEPTHS else make_vit(name, classes)).eval()


def read_state(path: str | Path) -> Any:
    """A state dict of PyTorch (.pth, .pt), read without executing code; the path of any other file."""
    if Path(path).suffix not in (".pth", ".pt"):
        return str(path)
    import torch

    if not Path(path).is_file():
        raise ts.errors.FileError(f"there is no file {path}")
    found = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(found, Mapping):
        raise ts.errors.FileError(f"{path} holds no state dict", received=type(found).__name__)
    return {name: value.detach() for name, value in found.items()}


def read_image(path: str | Path) -> np.ndarray:
    """An image [1, 3, H, W], normalised."""
    if not Path(path).is_file():
        raise ts.errors.FileError(f"there is no file {path}")
    image = np.load(path, allow_pickle=False)
    image = image.astype(np.float32) / 255 if image.dtype == np.uint8 else image.astype(np.float32)
    if image.ndim == 3 and image.shape[0] != 3 and image.shape[2] == 3:
        image = image.transpose(2, 0, 1)
    if image.ndim != 3 or image.shape[0] != 3:
        raise ts.errors.ShapeError("this is not an image", expected="[3, H, W] or [H, W, 3]", received=str(image.shape))
    return ((image - MEAN[:, None, None]) / DEVIATION[:, None, None])[None]


def classify(model: nn.Module, images: Any, target: str = "cpu") -> np.ndarray:
    """The probabilities of the classes, from a compiled program."""
    run = ts.jit(lambda model, images: ts.softmax(model(images), axis=-1), target=target)
    return run(model, images).numpy()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[*DEPTHS, *SIZES])
    parser.add_argument("--weights")
    parser.add_argument("--image")
    parser.add_argument("--target", default="cpu")
    options = parser.parse_args()
    ts.manual_seed(0)
    model = make_model(options.model)
    if options.weights:
        model.load_state_dict(read_state(options.weights))
    random = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
    image = read_image(options.image) if options.image else random
    shares = classify(model, image, options.target)[0]
    for number in np.argsort(-shares)[:5]:
        print(f"class {number:4d}: {shares[number]:.3%}")


if __name__ == "__main__":
    main()
