"""Containers: lists and dicts of modules and of parameters, modules one after the other, a function as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.module import WRAPPERS, Module, Parameter, check_module, find_part

# mypy: disable-error-code="no-any-return"


def replace_part(module: Module, key: Any, part: Module) -> None:
    """Put another part in the place of one.

    Raises:
        ArgumentError: there is none.
    """
    old, parts = find_part(module, key), module.__dict__["_modules"]
    name = key if key in parts else list(parts)[key]
    assert parts[name] is old
    parts[name] = part


def insert_part(module: Module, index: int, part: Module) -> None:
    """Add a part before another of a container whose parts have numbers; the later ones are renumbered."""
    parts = module.__dict__["_modules"]
    listed = list(parts.values())
    listed.insert(index, part)
    parts.clear()
    parts.update({str(i): each for i, each in enumerate(listed)})


class ModuleList(Module):
    """A list of modules: indexed and iterated as a list.

    >>> len(ModuleList([ModuleList(), ModuleList()]))
    2
    """

    def __init__(self, modules: Any = ()) -> None:
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end."""
        self._modules[str(len(self._modules))] = check_module(module, type(self).__name__)
        return self

    def extend(self, modules: Any) -> ModuleList:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> None:
        """Add a module before the one at a place."""
        insert_part(self, index, check_module(module, type(self).__name__))

    def pop(self, index: int = -1) -> Module:
        """Take a module out: later ones move forward."""
        found = find_part(self, index)
        kept = [m for m in self._modules.values() if m is not found]
        self._modules.clear()
        self.extend(kept)
        return found

    def __add__(self, other: Any) -> ModuleList:
        return type(self)([*self, *other])

    def __iadd__(self, other: Any) -> ModuleList:
        return self.extend(other)

    def __getitem__(self, index: Any) -> Any:
        found = list(self._modules.values())
        if isinstance(index, slice):
            return type(self)(found[index])
        return find_part(self, index)

    def __setitem__(self, index: int, module: Module) -> None:
        replace_part(self, index, check_module(module, type(self).__name__))

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(list(self._modules.values()))


class ModuleDict(Module):
    """A dict of modules: indexed and iterated as a dict.

    >>> list(ModuleDict({"a": ModuleList()}))
    ['a']
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        for name, module in (modules or {}).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        self._modules[name] = check_module(module, type(self).__name__)

    def __getitem__(self, name: str) -> Module:
        return find_part(self, name)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._modules))

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def keys(self) -> list[str]:
        """The names."""
        return list(self._modules)

    def items(self) -> list[tuple[str, Module]]:
        """The names and modules."""
        return list(self._modules.items())

    def update(self, modules: Any) -> None:
        """Add or replace modules by their names."""
        for name, module in dict(modules.items() if hasattr(modules, "items") else modules).items():
            self[name] = module

    def pop(self, name: str) -> Module:
        """Take a module out."""
        found = find_part(self, name)
        del self._modules[name]
        return found

    def values(self) -> list[Module]:
        """The modules."""
        return list(self._modules.values())


class ParameterList(Module):
    """A list of parameters: indexed and iterated as a list.

    >>> [p.shape for p in ParameterList([Parameter([1.0, 2.0]), Parameter([3.0])])]
    [(2,), (1,)]
    """

    def __init__(self, values: Any = ()) -> None:
        self.extend(values)

    def append(self, value: Any) -> ParameterList:
        """Add a parameter at the end."""
        setattr(self, str(len(self._parameters)), value if isinstance(value, Parameter) else Parameter(value))
        return self

    def extend(self, values: Any) -> ParameterList:
        """Add parameters at the end."""
        for value in values:
            self.append(value)
        return self

    def __getitem__(self, index: Any) -> Any:
        return list(self._parameters.values())[index]

    def __setitem__(self, index: int, value: Any) -> None:
        setattr(self, list(self._parameters)[index], value if isinstance(value, Tensor) else Parameter(value))

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(list(self._parameters.values()))


class ParameterDict(Module):
    """A dict of parameters: indexed and iterated as a dict.

    >>> ParameterDict({"scale": Parameter([2.0])})["scale"]
    Tensor([2.], f32)
    """

    def __init__(self, values: Any = ()) -> None:
        self.update(values)

    def __setitem__(self, name: str, value: Any) -> None:
        kept = isinstance(value, Parameter) or (isinstance(value, Tensor) and name in self)
        setattr(self, name, value if kept else Parameter(value))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise ArgumentError(
                f"there is no parameter {name!r}", location=user_location(),
                expected=", ".join(self._parameters) or "none: it is empty",
            )  # fmt: skip
        return self._parameters[name]  # type: ignore[no-any-return]

    def update(self, values: Any) -> None:
        """Add or replace parameters by their names."""
        for name, value in dict(values).items():
            self[name] = value

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._parameters))

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def keys(self) -> list[str]:
        """The names."""
        return list(self._parameters)

    def items(self) -> list[tuple[str, Tensor]]:
        """The names and parameters."""
        return list(self._parameters.items())

    def values(self) -> list[Tensor]:
        """The parameters."""
        return list(self._parameters.values())


WRAPPERS.update(
    {(list, False): ModuleList, (list, True): ParameterList, (dict, False): ModuleDict, (dict, True): ParameterDict}
)


class Sequential(Module):
    """Modules one after the other: the result of each is the argument of the next.

    It takes modules, a list of them, or a dict of named ones; `add` appends. A function is taken as a module.

    >>> Sequential(lambda x: x + 1.0, lambda x: x * 2.0)(1.0)
    Tensor(4., f32)
    """

    def __init__(self, *modules: Any) -> None:
        listed = modules[0] if len(modules) == 1 and isinstance(modules[0], (list, tuple, dict)) else modules
        named = listed.items() if isinstance(listed, dict) else ((str(i), m) for i, m in enumerate(listed))
        for name, module in named:
            self._modules[name] = _as_module(module)

    def add(self, module: Any) -> Sequential:
        """Append a module."""
        self._modules[str(len(self._modules))] = _as_module(module)
        return self

    append = add

    def extend(self, modules: Any) -> Sequential:
        """Append modules."""
        for module in modules:
            self.add(module)
        return self

    def insert(self, index: int, module: Any) -> Sequential:
        """Add a module before the one at a place."""
        insert_part(self, index, _as_module(module))
        return self

    def __setitem__(self, index: Any, module: Any) -> None:
        replace_part(self, index, _as_module(module))

    def forward(self, x: Any) -> Any:
        """The result of the last module."""
        x = as_tensor(x) if isinstance(x, (int, float)) else x
        before: Module | None = None
        for module in self._modules.values():
            if before is not None and isinstance(x, tuple) and _takes_one_tensor(module):
                raise ArgumentError(
                    f"{type(module).__name__} takes one tensor, and {type(before).__name__} gives {len(x)} values",
                    location=user_location(), suggestion=f"put `lambda y: y[0]` behind {type(before).__name__}",
                )  # fmt: skip
            before, x = module, module(x)
        return x

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Sequential(dict([*self._modules.items()][index]))  # with their names, as in PyTorch
        return find_part(self, index)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(list(self._modules.values()))


def _takes_one_tensor(module: Module) -> bool:
    """Whether a module is a layer of this package; modules of users may take what recurrent layers give."""
    return type(module).__module__.startswith("tessera.nn.") and not isinstance(module, (Sequential, Lambda))


class Lambda(Module):
    """A function as a module.

    >>> Lambda(abs)(Tensor([-1.0]))
    Tensor([1.], f32)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def forward(self, *args: Any, **named: Any) -> Any:
        """The function's result."""
        return self.function(*args, **named)

    def extra_repr(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", repr(self.function))


def _as_module(value: Any) -> Module:
    if isinstance(value, Module) or not callable(value) or isinstance(value, type):
        return check_module(value, "Sequential")
    return Lambda(value)
