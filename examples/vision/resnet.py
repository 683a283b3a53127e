"""ResNet-18, -34, -50, -101 and -152 (He, Zhang, Ren and Sun 2016), with the names of torchvision's state dicts.

python examples/vision/classify.py resnet18 --weights resnet18.pth --image photo.npy
"""

from __future__ import annotations

from collections.abc import Sequence

import tessera as ts
from tessera import nn


def convolve(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size of images at stride 1."""
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        self.conv1, self.bn1 = convolve(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolve(width, width, 3), nn.BatchNorm2d(width)
        self.downsample = make_shortcut(inputs, width, stride)

    def forward(self, x):
        """Images [N, inputs, H, W] to [N, width, H / stride, W / stride]."""
        h = nn.functional.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return nn.functional.relu(h + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A convolution of 3 x 3 between two of 1 x 1, and a shortcut (ResNet-50 and deeper)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        outputs = width * self.expansion
        self.conv1, self.bn1 = convolve(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolve(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolve(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = make_shortcut(inputs, outputs, stride)

    def forward(self, x):
        """Images [N, inputs, H, W] to [N, 4 width, H / stride, W / stride]."""
        h = nn.functional.relu(self.bn1(self.conv1(x)))
        h = nn.functional.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return nn.functional.relu(h + (x if self.downsample is None else self.downsample(x)))


def make_shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A projection where the block changes the shape of its input."""
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(convolve(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, and a linear classifier."""

    def __init__(self, block: type, depths: Sequence[int], classes: int = 1000, width: int = 64) -> None:
        self.conv1, self.bn1 = convolve(3, width, 7, 2), nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for stage, depth in enumerate(depths):
            wide, blocks = width << stage, []
            for number in range(depth):
                blocks.append(block(inputs, wide, 2 if stage and not number else 1))
                inputs = wide * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(blocks))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images):
        """Images [N, 3, H, W] to logits [N, classes]."""
        h = self.maxpool(nn.functional.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            h = stage(h)
        return self.fc(ts.mean(h, axis=(2, 3)))


DEPTHS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def make_resnet(name: str, classes: int = 1000, width: int = 64) -> ResNet:
    """A ResNet by its name; `width` is the number of channels of the stem."""
    if name not in DEPTHS:
        raise ts.errors.ArgumentError(f"there is no ResNet {name!r}", expected=", ".join(DEPTHS))
    return ResNet(*DEPTHS[name], classes, width)
