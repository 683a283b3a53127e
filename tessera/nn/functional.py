"""Functions of neural networks under PyTorch's names (`torch.nn.functional`): the functions of `ts`, gathered."""

from tessera.nn.activations import relu
from tessera.nn.linear import linear
from tessera.ops.tensor.activations import (
    celu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    logsigmoid,
    prelu,
    relu6,
    selu,
    softmin,
    softshrink,
    softsign,
    tanhshrink,
    threshold,
)
from tessera.ops.tensor.adaptive_pooling import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_max_pool2d
from tessera.ops.tensor.attention_calls import scaled_dot_product_attention
from tessera.ops.tensor.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from tessera.ops.tensor.elementwise import tanh
from tessera.ops.tensor.layers import dropout1d, dropout2d, dropout3d, group_norm, instance_norm, local_response_norm
from tessera.ops.tensor.losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from tessera.ops.tensor.nn import (
    batch_norm,
    dropout,
    elu,
    gelu,
    layer_norm,
    leaky_relu,
    log_softmax,
    mish,
    rms_norm,
    silu,
    softmax,
    softplus,
)
from tessera.ops.tensor.pooling import avg_pool1d, avg_pool2d, avg_pool3d, max_pool1d, max_pool2d, max_pool3d
from tessera.ops.tensor.rearrange import one_hot, pad
from tessera.ops.tensor.resampling import interpolate
from tessera.ops.tensor.scalar_functions import sigmoid
from tessera.ops.tensor.shape import embedding

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cross_entropy", "dropout", "dropout1d", "dropout2d",
    "dropout3d", "elu", "embedding", "gelu", "glu", "group_norm", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "huber_loss", "instance_norm", "interpolate", "kl_div", "l1_loss", "layer_norm", "leaky_relu", "linear",
    "local_response_norm", "log_softmax", "logsigmoid", "max_pool1d", "max_pool2d", "max_pool3d", "mish", "mse_loss",
    "nll_loss", "one_hot", "pad", "prelu", "relu", "relu6", "rms_norm", "scaled_dot_product_attention", "selu",
    "sigmoid", "silu", "smooth_l1_loss", "softmax", "softmin", "softplus", "softshrink", "softsign", "tanh",
    "tanhshrink", "threshold",
]  # fmt: skip
