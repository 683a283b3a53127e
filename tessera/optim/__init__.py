"""Optimizers, learning-rate schedules and gradient clipping, as pure functions on pytrees."""

from tessera.optim.adafactor import Adafactor
from tessera.optim.gradients import EMA, clip_by_norm, clip_by_value, global_norm
from tessera.optim.optimizer import Optimizer, Slot
from tessera.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from tessera.optim.schedules import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    RateSchedule,
    ReduceLROnPlateau,
    StepLR,
    WarmupCosine,
)

__all__ = [
    "Adafactor", "Adagrad", "Adam", "AdamW", "ConstantLR", "CosineAnnealingLR", "EMA", "ExponentialLR", "LinearLR",
    "Lion", "MultiStepLR", "OneCycleLR", "Optimizer", "PolynomialLR", "RMSprop", "RateSchedule", "ReduceLROnPlateau",
    "SGD", "Slot", "StepLR", "WarmupCosine", "clip_by_norm", "clip_by_value", "global_norm",
]  # fmt: skip
