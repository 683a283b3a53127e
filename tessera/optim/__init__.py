"""Optimizers, learning-rate schedules and gradient clipping, as pure functions on pytrees."""

from tessera.optim.adafactor import Adafactor
from tessera.optim.adaptive_rules import ASGD, Adadelta, Adamax, NAdam, RAdam, Rprop, SparseAdam
from tessera.optim.gradients import EMA, clip_by_norm, clip_by_value, global_norm
from tessera.optim.optimizer import Optimizer, Slot
from tessera.optim.quasi_newton import LBFGS
from tessera.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from tessera.optim.schedules import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    RateSchedule,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
    WarmupCosine,
)

__all__ = [
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ConstantLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "EMA", "ExponentialLR", "LBFGS", "LambdaLR", "LinearLR", "Lion",
    "MultiStepLR", "NAdam", "OneCycleLR", "Optimizer", "PolynomialLR", "RAdam", "RMSprop", "RateSchedule",
    "ReduceLROnPlateau", "Rprop", "SGD", "SequentialLR", "Slot", "SparseAdam", "StepLR", "WarmupCosine",
    "clip_by_norm", "clip_by_value", "global_norm",
]  # fmt: skip
