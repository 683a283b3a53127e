"""Neural networks: modules whose parameters are pytrees, layers, losses and initialisation."""

from tessera.nn import functional, initialisation
from tessera.nn import initialisation as init
from tessera.nn.activations import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    SwiGLU,
    Tanh,
    Tanhshrink,
    Threshold,
)
from tessera.nn.linear import Bilinear, Embedding, Flatten, Identity, Linear, LoRA, add_lora
from tessera.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CosineEmbeddingLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    Loss,
    MSELoss,
    NLLLoss,
    Reduction,
    SmoothL1Loss,
    TripletMarginLoss,
)
from tessera.nn.module import Lambda, Module, ModuleDict, ModuleList, Parameter, Sequential

__all__ = [
    "BCELoss", "BCEWithLogitsLoss", "Bilinear", "CELU", "CosineEmbeddingLoss", "CrossEntropyLoss", "ELU", "Embedding",
    "Flatten", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Identity",
    "KLDivLoss", "L1Loss", "Lambda", "LeakyReLU", "Linear", "LoRA", "LogSigmoid", "LogSoftmax", "Loss", "MSELoss",
    "Mish", "Module", "ModuleDict", "ModuleList", "NLLLoss", "PReLU", "Parameter", "ReLU", "ReLU6", "Reduction", "SELU",
    "Sequential", "SiLU", "Sigmoid", "SmoothL1Loss", "Softmax", "Softmin", "Softplus", "Softshrink", "Softsign",
    "SwiGLU", "Tanh", "Tanhshrink", "Threshold", "TripletMarginLoss", "add_lora", "functional", "init",
    "initialisation",
]  # fmt: skip
