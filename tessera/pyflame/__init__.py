"""PyFlame: lazy tensors, layers and CSL code generation with the interface of PyFlame (PyFlame API reference).

>>> import tessera.pyflame as pf
>>> x = pf.tensor([[1.0, -2.0], [3.0, 4.0]])
>>> y = pf.relu(x @ x)
>>> pf.is_lazy(y), y.sum().item()
(True, 25.0)
"""

from tessera.pyflame import autograd, nn, optim
from tessera.pyflame.autograd import GradMode, backward, no_grad
from tessera.pyflame.creation import arange, from_numpy, full, manual_seed, ones, rand, randn, tensor, zeros
from tessera.pyflame.csl import CodeGenOptions, CodeGenResult, CSLCodeGenerator, compile_to_csl
from tessera.pyflame.dtypes import (
    DType,
    bfloat16,
    bool_,
    dtype_name,
    dtype_size,
    float16,
    float32,
    int8,
    int16,
    int32,
    int64,
)
from tessera.pyflame.files import load, save
from tessera.pyflame.graph import Graph, Node, TensorSpec, get_graph, get_node, print_graph
from tessera.pyflame.layouts import MeshLayout, PECoord
from tessera.pyflame.operations import (
    abs,
    cat,
    cos,
    eval,
    exp,
    gelu,
    is_lazy,
    log,
    log_softmax,
    matmul,
    max,
    mean,
    min,
    relu,
    reshape,
    sigmoid,
    silu,
    sin,
    softmax,
    sqrt,
    squeeze,
    stack,
    sum,
    tanh,
    transpose,
    unsqueeze,
    where,
)
from tessera.pyflame.tensor import Tensor

# The version of the interface, not of Tessera.
__version__ = "1.0.0-alpha"
__version_info__ = (1, 0, 0, "alpha")
__release_status__ = "Pre-Release Alpha"

# fmt: off
__all__ = [
    "CSLCodeGenerator", "CodeGenOptions", "CodeGenResult", "DType", "GradMode", "Graph", "MeshLayout", "Node",
    "PECoord", "Tensor", "TensorSpec", "abs", "arange", "autograd", "backward", "bfloat16", "bool_", "cat",
    "compile_to_csl", "cos", "dtype_name", "dtype_size", "eval", "exp", "float16", "float32", "from_numpy", "full",
    "gelu", "get_graph", "get_node", "int16", "int32", "int64", "int8", "is_lazy", "load", "log", "log_softmax",
    "manual_seed", "matmul", "max", "mean", "min", "nn", "no_grad", "ones", "optim", "print_graph", "rand", "randn",
    "relu", "reshape", "save", "sigmoid", "silu", "sin", "softmax", "sqrt", "squeeze", "stack", "sum", "tanh", "tensor",
    "transpose", "unsqueeze", "where", "zeros",
]
# fmt: on
