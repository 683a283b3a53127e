"""Modules of PyFlame: those of `tessera.nn`, whose parameters and buffers are lazy tensors.

A layer records its whole call as one node of the lazy graph. New buffers (the statistics of batch norm) are results of
that node: they are computed with the backward that follows, or when they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera.core.pytree import flatten
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.nn import containers, linear
from tessera.nn import module as core
from tessera.pyflame.lazy_graph import Expression, evaluate
from tessera.pyflame.tensor import Tensor, elements_of, record

STORES = ("_parameters", "_buffers")


def Parameter(data: Any) -> Tensor:  # noqa: N802 - PyTorch's name
    """A tensor that a module trains: a leaf with `requires_grad`.

    >>> import tessera.pyflame as pf
    >>> Parameter(pf.ones([2])).requires_grad
    True
    """
    found = elements_of(data if isinstance(data, Tensor) else record("tensor", lambda x: x, data))
    return Tensor(Expression(found.type, "parameter", elements=found), requires_grad=True)


class Module(core.Module):
    """A layer or a model: subclasses assign parameters and modules in `__init__`, and define `forward`.

    A tensor with `requires_grad` that is assigned to an attribute is a parameter, another tensor a buffer.

    >>> import tessera.pyflame as pf
    >>> class Model(Module):
    ...     def __init__(self):
    ...         self.scale = Parameter(pf.ones([2]))
    ...     def forward(self, x):
    ...         return pf.relu(x) * self.scale
    >>> Model()(pf.tensor([-1.0, 2.0])).numpy().tolist()
    [0.0, 2.0]
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            super().__setattr__(name, value)
            return
        own = self.__dict__
        known = next((store for store in STORES if name in own[store]), None)
        wanted = "_parameters" if value._wants_gradient or known == "_parameters" else "_buffers"
        if known != wanted:
            self._remove(name)
        own[wanted][name] = value

    def state_dict(self) -> dict[str, Any]:
        """The parameters and buffers by path, as they are now: later steps do not change them."""
        return {path: Tensor(x._expression) for path, x in super().state_dict().items()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any, strict: bool = True, cast: bool = False) -> Module:
        """Take parameters and buffers from a mapping of paths to tensors or arrays, or from a .safetensors file.

        The tensors of the module stay the same objects, so that an optimizer keeps updating them.

        Raises:
            StateDictError: entries are missing, extra, or of another shape or element type; it names them.
        """
        given = {k: _to_core(v) for k, v in state.items()} if isinstance(state, Mapping) else state
        with core_tensors(self) as places:
            super().load_state_dict(given, strict, cast)
            loaded = [own[name] for own, name, _ in places]
        for (_, _, tensor), elements in zip(places, loaded, strict=True):
            set_elements(tensor, elements)
        return self

    def summary(self, *args: Any, file: Any = None) -> None:
        """Print a table of the modules with their parameters and, for a call with `args`, the shapes of results."""
        with core_tensors(self):
            super().summary(*(_to_core(x) for x in args), file=file)

    def map_tensors(self, function: Any) -> Module:
        """Replace the elements of each parameter and buffer by those of what `function` makes of it."""
        for tensor in {id(t): t for _, _, t in _list_tensors(self) if t is not None}.values():
            set_elements(tensor, elements_of(function(tensor)))
        return self

    def _set_frozen(self, names: tuple[str, ...], frozen: bool) -> Module:
        super()._set_frozen(names, frozen)
        for module in self.modules():
            for name, tensor in module.__dict__["_parameters"].items():
                if tensor is not None:
                    tensor.requires_grad_(name not in module._frozen)
        return self

    def count_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(t.numel for t in self.parameters())  # type: ignore[attr-defined]


class Layer(Module):
    """A layer of `tessera.nn` on lazy tensors."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        make_lazy(self)

    def forward(self, *args: Any, **named: Any) -> Any:
        """The layer's result: recorded; in the program that is recorded, computed."""
        if CURRENT_BUILDER.get() is not None:
            return super().forward(*args, **named)
        return record_module(self, args, named)


class Sequential(Module, containers.Sequential):
    """Modules one after the other; it takes modules or a list of them, and `add` appends.

    >>> import tessera.pyflame as pf
    >>> model = Sequential([pf.nn.Linear(3, 4), pf.nn.ReLU(), pf.nn.Linear(4, 2)])
    >>> model(pf.ones([5, 3])).shape, len(model.parameters())
    ([5, 2], 4)
    """


class LazyModuleList(Module, containers.ModuleList):
    """A list of modules: indexed and iterated as a list."""


class LazyModuleDict(Module, containers.ModuleDict):
    """A dict of modules: indexed and iterated as a dict."""


# The layer for each class of tessera.nn.
LAYERS: dict[type, type] = {containers.ModuleList: LazyModuleList, containers.ModuleDict: LazyModuleDict}


def make_layer(kind: type) -> type:
    """The layer of PyFlame for a class of `tessera.nn`."""
    if kind not in LAYERS:
        doc = f"`tessera.nn.{kind.__name__}` on lazy tensors."
        own = {"__doc__": doc, "__module__": "tessera.pyflame.nn", "__init__": _make_init(kind)}
        LAYERS[kind] = type(kind.__name__, (Layer, kind), own)
    return LAYERS[kind]


def _make_init(kind: Any) -> Any:
    """A layer's `__init__` that shows the arguments of its class in `tessera.nn`."""

    @functools.wraps(kind.__init__)
    def make(self: Layer, *args: Any, **named: Any) -> None:
        Layer.__init__(self, *args, **named)

    return make


class LazyEmbedding(make_layer(linear.Embedding)):  # type: ignore[misc]
    """A table of vectors: rows of weight [num_embeddings, embedding_dim] by index."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx)


for each in (LazyModuleList, LazyModuleDict, LazyEmbedding):  # as users read and import them
    each.__name__ = each.__qualname__ = each.__name__.removeprefix("Lazy")
    each.__module__ = "tessera.pyflame.nn"


def make_lazy(module: core.Module) -> None:
    """Make the tensors of a module and its parts lazy ones, and its parts layers."""
    known: dict[int, tuple[Any, Tensor]] = {}
    stores = {id(each.__dict__["_parameters"]) for each in module.modules()}
    for each in module.modules():
        each.__class__ = LAYERS.get(type(each), type(each))
    for own, name, tensor in _list_tensors(module):
        if not isinstance(tensor, CoreTensor):
            continue
        if id(tensor) not in known:
            trained = id(own) in stores
            found = Expression(tensor.type, name, elements=CoreTensor(tensor.data), constant=not trained)
            known[id(tensor)] = tensor, Tensor(found, requires_grad=trained)
        own[name] = known[id(tensor)][1]


def _list_tensors(module: core.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Each place of a tensor: the store that holds it, its name there, and the tensor."""
    return [
        (own, name, tensor)
        for each in module.modules()
        for own in (each.__dict__[store] for store in STORES)
        for name, tensor in own.items()
    ]


@contextmanager
def core_tensors(module: core.Module) -> Iterator[list[tuple[dict[str, Any], str, Tensor]]]:
    """A context in which a module holds Tessera's tensors in place of its own, for functions of `tessera.nn`."""
    places = [(own, name, t) for own, name, t in _list_tensors(module) if t is not None]
    try:
        known = {id(t): elements_of(t) for _, _, t in places}
        for own, name, tensor in places:
            own[name] = known[id(tensor)]
        yield places
    finally:
        for own, name, tensor in places:
            own[name] = tensor


def set_elements(tensor: Tensor, elements: CoreTensor) -> None:
    """Give a leaf other elements; what was recorded before keeps the old ones."""
    before = tensor._expression
    found = Expression(elements.type, before.label, elements=elements, layout=before.layout, constant=before.constant)
    found.own(tensor)
    tensor._expression = found


def _to_core(value: Any) -> Any:
    return elements_of(value) if isinstance(value, Tensor) else value


def record_module(module: core.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Record the call of a module; buffers that it replaces become results of the record."""
    leaves, tree = flatten(module, empty=True)
    tensors = [t for _, t in leaves]
    evaluate([t._expression for t in tensors if t._expression.record is not None])
    given, shape = flatten((args, named), empty=True)
    operands = [x for _, x in given if _is_operand(x)]
    places: list[str] = []

    def call(*found: CoreTensor) -> Any:
        own, rest = found[: len(tensors)], iter(found[len(tensors) :])
        clone = tree.build(iter(own))
        before = {path: id(t) for path, t in clone.named_buffers()}
        inputs, keywords = shape.build(iter([next(rest) if _is_operand(x) else x for _, x in given]))
        result = clone.forward(*inputs, **keywords)
        new = {path: t for path, t in clone.named_buffers() if before.get(path) != id(t)}
        places.extend(new)
        return result, list(new.values())

    result, states = record(type(module).__name__, call, *tensors, *operands)
    buffers = dict(module.named_buffers())
    for path, state in zip(places, states, strict=True):
        keep_state(buffers[path], state)  # type: ignore[arg-type]
    return result


def _is_operand(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray, CoreTensor))


def keep_state(buffer: Tensor, state: Tensor) -> None:
    """Make a recorded result the value of a buffer; no gradient goes through it."""
    found = state._expression
    found.constant, found.needs_gradient = True, False
    found.own(buffer)
    buffer._expression = found
