"""Neural networks: modules whose parameters are pytrees, layers, losses and initialisation."""

from tessera.nn import functional, initialisation
from tessera.nn import initialisation as init
from tessera.nn.activations import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Activation,
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
from tessera.nn.attention import CrossAttention, GroupedQueryAttention, MultiheadAttention, SelfAttention
from tessera.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
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
from tessera.nn.normalisation import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm2d,
    LayerNorm,
    RMSNorm,
)
from tessera.nn.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveMaxPool2d,
    AlphaDropout,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    GlobalAvgPool2d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from tessera.nn.positions import (
    LearnedPositions,
    RotaryEmbedding,
    SinusoidalPositions,
    alibi_bias,
    alibi_slopes,
    rotate_positions,
)
from tessera.nn.recurrent import GRU, LSTM, RNN
from tessera.nn.transformer import (
    DecoderBlock,
    Stack,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    stack_modules,
)

__all__ = [
    "Activation", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AlphaDropout", "AvgPool1d",
    "AvgPool2d", "AvgPool3d", "BCELoss", "BCEWithLogitsLoss", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Bilinear",
    "CELU", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d",
    "CosineEmbeddingLoss", "CrossAttention", "CrossEntropyLoss", "DecoderBlock", "Dropout", "Dropout1d", "Dropout2d",
    "Dropout3d", "ELU", "Embedding", "Flatten", "GELU", "GLU", "GRU", "GlobalAvgPool2d", "GroupNorm",
    "GroupedQueryAttention", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "HuberLoss", "Identity",
    "InstanceNorm2d", "KLDivLoss", "L1Loss", "LSTM", "Lambda", "LayerNorm", "LeakyReLU", "LearnedPositions", "Linear",
    "LoRA", "LogSigmoid", "LogSoftmax", "Loss", "MSELoss", "MaxPool1d", "MaxPool2d", "MaxPool3d", "Mish", "Module",
    "ModuleDict", "ModuleList", "MultiheadAttention", "NLLLoss", "PReLU", "Parameter", "RMSNorm", "RNN", "ReLU",
    "ReLU6", "Reduction", "RotaryEmbedding", "SELU", "SelfAttention", "Sequential", "SiLU", "Sigmoid",
    "SinusoidalPositions", "SmoothL1Loss", "Softmax", "Softmin", "Softplus", "Softshrink", "Softsign", "Stack",
    "SwiGLU", "Tanh", "Tanhshrink", "Threshold", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerEncoderLayer", "TripletMarginLoss", "add_lora", "alibi_bias", "alibi_slopes", "functional", "init",
    "initialisation", "rotate_positions", "stack_modules",
]  # fmt: skip
