"""Layers and losses of PyFlame: those of `tessera.nn` on lazy tensors (PyFlame API reference).

>>> import tessera.pyflame as pf
>>> layer = pf.nn.Linear(4, 2)
>>> layer(pf.ones([3, 4])).shape, layer.weight.shape
([3, 2], [2, 4])
"""

from typing import Any

from tessera import nn as core
from tessera.nn.containers import Lambda
from tessera.pyflame.nn import functional as functional
from tessera.pyflame.nn import utils as utils
from tessera.pyflame.nn.losses import BCELoss as BCELoss
from tessera.pyflame.nn.losses import BCEWithLogitsLoss as BCEWithLogitsLoss
from tessera.pyflame.nn.losses import CrossEntropyLoss as CrossEntropyLoss
from tessera.pyflame.nn.losses import NLLLoss as NLLLoss
from tessera.pyflame.nn.modules import LazyEmbedding, LazyModuleDict, LazyModuleList, make_layer
from tessera.pyflame.nn.modules import Module as Module
from tessera.pyflame.nn.modules import Parameter as Parameter
from tessera.pyflame.nn.modules import Sequential as Sequential

Embedding, ModuleDict, ModuleList, Reduction = LazyEmbedding, LazyModuleDict, LazyModuleList, core.Reduction
_CONTAINERS = (core.Module, core.ModuleList, core.ModuleDict, core.Sequential, Lambda)


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, core.Module) and value not in _CONTAINERS


_OWN = [
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "Embedding",
    "Module",
    "ModuleDict",
    "ModuleList",
    "NLLLoss",
    "Parameter",
    "Reduction",
    "Sequential",
    "functional",
    "utils",
]
_LAYERS = [name for name in core.__all__ if _is_layer(getattr(core, name)) and name not in _OWN]
globals().update({name: make_layer(getattr(core, name)) for name in _LAYERS})
__all__ = sorted([*_OWN, *_LAYERS])
