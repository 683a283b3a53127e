"""Module: a layer or model as an object that is also a pytree: its parameters and buffers are the leaves (Equinox)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tessera.core.errors import (
    CURRENT_SCOPE,
    ArgumentError,
    DTypeError,
    TesseraError,
    TraceError,
    hides_internal_frames,
    user_location,
)
from tessera.core.pytree import CallScope, Parts, StaticFields, register_class
from tessera.frontend.jit.tracing import Jit
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, as_tensor, wrap_array
from tessera.nn import descriptions, state_dicts

STORES = ("_parameters", "_buffers", "_modules")
_PRIVATE = frozenset((*STORES, "_static", "_trace"))
_VALUES = (int, float, str, bool, type(None), type)


class Parameter:
    """Marks a tensor that training changes: `self.weight = nn.Parameter(ts.zeros((2, 3)))`.

    It has its own identity: two parameters of one tensor are two. To tie parameters, assign the parameter of one
    module to another: `self.head.weight = self.embedding.weight`.

    Raises:
        DTypeError: the elements are not floats.
    """

    def __init__(self, data: Any) -> None:
        tensor = as_tensor(data)
        if not tensor.dtype.is_float:
            raise DTypeError(
                "a parameter has no float elements", location=user_location(), received=str(tensor.type),
                expected="floats, which have gradients", suggestion="assign the tensor itself: it is then a buffer",
            )  # fmt: skip
        self.tensor = Tensor(tensor.data) if tensor.is_traced else wrap_array(tensor.data, tensor.type)
        self.tensor.requires_grad = tensor.requires_grad


# What to write in place of arguments that only PyTorch's constructors have.
SUGGESTIONS = {
    "device": "make the module, then move it: module.to('cuda:0')",
    "size_average": 'say reduction="mean" or reduction="sum"',
    "reduce": 'say reduction="mean" or reduction="none"',
}


# Methods of PyTorch's modules, and what to write instead: for the error of a name that is not here.
SPELLINGS = {
    "float": "module.to(ts.f32)", "half": "module.to(ts.f16)", "bfloat16": "module.to(ts.bf16)",
    "double": "module.to(ts.f64)", "cuda": 'module.to("cuda:0")', "cpu": 'module.to("cpu")',
    "compile": "ts.jit(module)", "register_module": "module.add_module(name, part)",
    "register_full_backward_hook": "ts.custom_vjp around the function",
    "get_buffer": "dict(module.named_buffers())[path]",
}  # fmt: skip


def check_keywords(cls: type, named: Mapping[str, Any], suggestions: Mapping[str, str] = SUGGESTIONS) -> None:
    """Refuse arguments that the constructor of a class does not have; `suggestions` say what to write in their place.

    Raises:
        ArgumentError: there is one; it lists those that the class has.
    """
    known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return
    if unknown := [name for name in named if name not in known]:
        raise ArgumentError(
            f"{cls.__name__} has no argument {unknown[0]!r}", location=user_location(),
            expected=", ".join([*known][1:]) or "none", received=f"{unknown[0]}={named[unknown[0]]!r}",
            suggestion=suggestions.get(unknown[0]),
        )  # fmt: skip


class Module:
    """A layer or a model: subclasses assign parameters, buffers and modules in `__init__`, and define `forward`.

    A `Parameter` that is assigned to an attribute is a parameter, any other tensor a buffer (state that training does
    not differentiate), a module (or a list or dict of modules) a part; all else is configuration. A module is a
    pytree: it may be an argument and a result of `ts.jit`, `ts.grad`, `ts.vmap` and `ts.scan`.

    >>> class Scale(Module):
    ...     def __init__(self):
    ...         self.factor = Parameter([2.0])
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> Scale()(3.0)
    Tensor([6.], f32)
    """

    training: bool
    lacks_shapes = False  # a layer whose parameters its first call makes
    renewed: tuple[str, ...] = ()  # parameters that a call may give another value, which is then kept
    _hooks: tuple[tuple[Any, ...], ...]
    _unsaved: frozenset[str] = frozenset()  # the buffers that are not in the state dict

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """An instance without parts, so that `__init__` need not call that of `Module`."""
        if named and cls.__module__.startswith("tessera.nn."):
            check_keywords(cls, named)
        made = object.__new__(cls)
        own = made.__dict__
        own["_parameters"], own["_buffers"], own["_modules"] = {}, {}, {}
        own["_static"], own["_trace"] = None, CURRENT_BUILDER.get()
        own["training"] = True
        own["_frozen"] = frozenset()
        own["_hooks"] = ((), ())
        return made

    def __init_subclass__(cls, **named: Any) -> None:
        """Register the subclass as a pytree."""
        super().__init_subclass__(**named)
        register_class(cls, _take_apart, _build, _list_tensors)

    # Attributes.

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for store in STORES:
            if name in own.get(store, ()):
                return own[store][name]
        hint = f"; write {SPELLINGS[name]}" if name in SPELLINGS else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        value = _wrap_modules(value)
        if isinstance(value, Parameter):
            self._remove(name)
            own["_parameters"][name] = value.tensor
        elif isinstance(value, Module):
            self._remove(name)
            own["_modules"][name] = value
        elif isinstance(value, Tensor):
            self._set_tensor(name, value)
        elif value is None and (name in own["_parameters"] or name in own["_buffers"]):
            own["_parameters" if name in own["_parameters"] else "_buffers"][name] = None
        else:
            self._remove(name)
            own["_static"] = None
            own[name] = value

    def _set_tensor(self, name: str, value: Tensor) -> None:
        own = self.__dict__
        if value.is_traced and own["_trace"] is not CURRENT_BUILDER.get():
            raise TraceError(
                f"{type(self).__name__}.{name} is set to a value of a program being traced, which does not own the "
                "module", location=user_location(), expected="a module that is an argument of the traced function",
                suggestion="pass the module as an argument and return it, or call module.eval() first",
            )  # fmt: skip
        if name in own["_parameters"]:
            own["_parameters"][name] = value
            return
        if name not in own["_buffers"]:
            self._remove(name)
        own["_buffers"][name] = value

    def _remove(self, name: str) -> None:
        own = self.__dict__
        for store in STORES:
            own[store].pop(name, None)
        if name in own and name not in _PRIVATE:
            del own[name]
            own["_static"] = None

    def __delattr__(self, name: str) -> None:
        getattr(self, name)
        self._remove(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for store in STORES for name in self.__dict__[store])]

    def register_parameter(self, name: str, value: Any) -> None:
        """Add a parameter; None reserves its name."""
        setattr(self, name, value if value is None or isinstance(value, Parameter) else Parameter(value))

    def register_buffer(self, name: str, value: Any, persistent: bool = True) -> None:
        """Add a buffer: a tensor that is not trained; it is in the state dict unless `persistent` is False."""
        setattr(self, name, None if value is None else as_tensor(value))
        self._unsaved = self._unsaved - {name} if persistent else self._unsaved | {name}

    # Calls.

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the module computes: subclasses define it."""
        raise ArgumentError(
            f"{type(self).__name__} does not define forward", location=user_location(),
            expected="def forward(self, x): ...",
        )  # fmt: skip

    @hides_internal_frames
    def __call__(self, *args: Any, **named: Any) -> Any:
        before, after = self.__dict__["_hooks"]
        scope = CallScope(self, CURRENT_SCOPE.get())
        token = CURRENT_SCOPE.set(scope)
        try:
            for hook in before:
                changed = hook(self, args)
                args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
            found = self.forward(*args, **named)
            for hook in after:
                changed = hook(self, args, found)
                found = found if changed is None else changed
            return found
        except TesseraError as error:
            error.scope = error.scope or str(scope)
            raise
        finally:
            CURRENT_SCOPE.reset(token)

    def __parts__(self) -> list[tuple[str, Any]]:
        """What errors may name by its path: the parts, and the state objects among the settings."""
        return [*self._modules.items(), *((n, v) for n, v in self.__dict__.items() if n not in _PRIVATE)]

    def register_forward_hook(self, hook: Callable[..., Any]) -> Callable[[], None]:
        """Call `hook(module, args, result)` after each forward; what it returns, unless None, is the result.

        Returns a function that removes the hook.
        """
        return self._add_hook(1, hook)

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> Callable[[], None]:
        """Call `hook(module, args)` before each forward; what it returns, unless None, are the arguments.

        Returns a function that removes the hook.
        """
        return self._add_hook(0, hook)

    def _add_hook(self, place: int, hook: Callable[..., Any]) -> Callable[[], None]:
        def change(keep: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
            hooks = list(self._hooks)
            hooks[place] = keep(hooks[place])
            self._hooks = tuple(hooks)

        change(lambda hooks: (*hooks, hook))
        return lambda: change(lambda hooks: tuple(h for h in hooks if h is not hook))

    def on(self, device: Any) -> Module:
        """Name the device that runs this module as a stage (`ts.pipeline`); returns the module."""
        self.placement = device
        return self

    def require_shapes(self) -> None:
        """Refuse a layer whose parameters its first call makes, before that.

        Raises:
            ArgumentError: it is one.
        """
        if self.lacks_shapes:
            raise ArgumentError(
                f"a {type(self).__name__} has no parameters before its first call", location=user_location(),
                expected="a model that was called once, eagerly", suggestion="call the model with an example before it "
                "is compiled, trained, saved or loaded: model(ts.zeros(shape))",
            )  # fmt: skip

    # Parts.

    def children(self) -> list[Module]:
        """The direct parts."""
        return [m for m in self._modules.values() if m is not None]

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, each once, with their paths ("layers.0.linear")."""
        seen: set[int] = set()
        for path, module in _walk(self, prefix):
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module

    def named_children(self) -> list[tuple[str, Module]]:
        """The direct parts with their names."""
        return [(name, m) for name, m in self._modules.items() if m is not None]

    def get_submodule(self, path: str) -> Module:
        """The module at a path ("layers.0.linear"); "" is this one.

        Raises:
            ArgumentError: there is none.
        """
        found = self
        for name in path.split(".") if path else ():
            found = find_part(found, name)
        return found

    def get_parameter(self, path: str) -> Tensor:
        """The parameter at a path ("layers.0.linear.weight").

        Raises:
            ArgumentError: there is none.
        """
        owner, _, name = path.rpartition(".")
        found = self.get_submodule(owner)._parameters
        if name not in found:
            raise ArgumentError(
                f"{type(self).__name__} has no parameter {path}", location=user_location(),
                expected=", ".join(n for n, _ in self.named_parameters()) or "none",
            )  # fmt: skip
        return found[name]  # type: ignore[no-any-return]

    def add_module(self, name: str, module: Any) -> None:
        """Add a part under a name; None reserves it."""
        if module is None:
            self._modules[name] = None
            return
        setattr(self, name, check_module(module, type(self).__name__))

    def modules(self) -> list[Module]:
        """This module and all below it."""
        return [m for _, m in self.named_modules()]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters with their paths; a tied one once, by its first path."""
        return _iterate_tensors(self, "_parameters")

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return [t for _, t in self.named_parameters()]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers with their paths."""
        return _iterate_tensors(self, "_buffers")

    def buffers(self) -> list[Tensor]:
        """The buffers."""
        return [t for _, t in self.named_buffers()]

    def count_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(int(t.size) for t in self.parameters())

    def set_tensor(self, path: str, value: Tensor) -> None:
        """Replace the parameter or buffer at a path."""
        owner, _, name = path.rpartition(".")
        setattr(_find_module(self, owner), name, value)

    # Changes to all parts.

    def train(self, mode: bool = True) -> Module:
        """Set training mode here and below: dropout drops, batch norm uses the statistics of the batch."""
        if not isinstance(mode, bool):
            raise ArgumentError("train takes a bool", location=user_location(), received=repr(mode))
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Set evaluation mode here and below."""
        return self.train(False)

    def is_training(self) -> bool:
        """Whether the module is in training mode."""
        return self.training

    def apply(self, function: Callable[[Module], Any]) -> Module:
        """Call a function on each module, the parts before what holds them."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def map_tensors(self, function: Callable[[Tensor], Any]) -> Module:
        """Replace each parameter and buffer, here and below, by what `function` makes of it; tied ones stay tied."""
        known: dict[int, tuple[Tensor, Any]] = {}
        for module in self.modules():
            module.require_shapes()
            for store in ("_parameters", "_buffers"):
                held = module.__dict__[store]
                for name, tensor in held.items():
                    if tensor is not None:
                        if id(tensor) not in known:
                            known[id(tensor)] = tensor, function(tensor)
                        held[name] = known[id(tensor)][1]
        return self

    def to(self, target: Any) -> Module:
        """Cast the float parameters and buffers to an element type, or move all to a device."""

        def change(tensor: Tensor) -> Tensor:
            return tensor.to(target) if isinstance(target, str) or tensor.dtype.is_float else tensor

        return self.map_tensors(change)

    def freeze(self, *names: str) -> Module:
        """Take parameters out of training: all here and below, or those with these paths (or below them).

        Derivatives leave them alone: their gradients are None.
        """
        return self._set_frozen(names, True)

    def unfreeze(self, *names: str) -> Module:
        """Undo `freeze`."""
        return self._set_frozen(names, False)

    def _set_frozen(self, names: tuple[str, ...], frozen: bool) -> Module:
        matched = set()
        for path, module in self.named_modules():
            for name in module._parameters:
                whole = f"{path}.{name}" if path else name
                found = {n for n in names if whole == n or whole.startswith(f"{n}.")}
                matched |= found
                if found or not names:
                    module._frozen = module._frozen | {name} if frozen else module._frozen - {name}
        if missing := [n for n in names if n not in matched]:
            raise ArgumentError(
                f"{type(self).__name__} has no parameter {missing[0]}", location=user_location(),
                expected=", ".join(n for n, _ in self.named_parameters()) or "none",
            )  # fmt: skip
        return self

    def requires_grad_(self, mode: bool = True) -> Module:
        """Let `backward` compute gradients of the parameters (`x.grad`), or not."""
        for tensor in self.parameters():
            tensor.requires_grad = mode
        return self

    def zero_grad(self) -> None:
        """Forget the gradients that `backward` left at the parameters."""
        for tensor in self.parameters():
            tensor.grad = None

    # State dicts and text.

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers by path, tied ones under each of their paths."""
        return state_dicts.collect_state(self)

    def load_state_dict(self, state: Any, strict: bool = True, cast: bool = False) -> Module:
        """Take parameters and buffers from a mapping of paths to arrays, or from a .safetensors file.

        All is checked before anything changes. `strict=False` lets entries be missing or extra; `cast` converts float
        types.

        Raises:
            StateDictError: entries are missing, extra, or of another shape or element type; it names them.
            FileError: the file is missing, truncated or not a safetensors file.
        """
        state_dicts.load_state(self, state, strict, cast)
        return self

    def summary(self, *args: Any, file: Any = None) -> None:
        """Print a table of the modules with their parameters and, for a call with `args`, the shapes of results."""
        descriptions.print_summary(self, args, file)

    def __repr__(self) -> str:
        return descriptions.describe_module(self)

    def extra_repr(self) -> str:
        """What `repr` says of the configuration: subclasses define it."""
        return ""

    def __jit__(self, options: Mapping[str, Any]) -> Any:
        """What `ts.jit(module)` is: a call of the module with its tensors of that time, compiled."""
        return CompiledModule(self, options)


class CompiledModule:
    """A compiled call of a module: its parameters are arguments of the program, its new buffers are kept.

    >>> from tessera.frontend.jit.tracing import jit
    >>> class Increment(Module):
    ...     def forward(self, x):
    ...         return x + 1.0
    >>> jit(Increment())(2.0)
    Tensor(3., f32)
    """

    def __init__(self, module: Module, options: Mapping[str, Any]) -> None:
        self.module = module
        self.call = Jit(_call_with_state, **options)

    @hides_internal_frames
    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result of the module."""
        found, state = self.call(self.module, args, named)
        for path, value in state.items():
            self.module.set_tensor(path, value)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


def _call_with_state(module: Module, args: Any, named: Any) -> Any:
    """The result of a module, and the buffers that the call replaced."""
    before = {path: id(t) for path, t in module.named_buffers()}
    found = module(*args, **named)
    return found, {path: t for path, t in module.named_buffers() if before.get(path) != id(t)}


def _find_module(module: Module, path: str) -> Module:
    for name in path.split(".") if path else ():
        module = module.__dict__["_modules"][name]
    return module


register_class(Module, lambda value: _take_apart(value), lambda *parts: _build(*parts))


def _walk(module: Module, path: str) -> Iterator[tuple[str, Module]]:
    yield path, module
    for name, child in module.__dict__["_modules"].items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name)


def _iterate_tensors(module: Module, store: str) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for path, each in module.named_modules():
        each.require_shapes()
        for name, tensor in each.__dict__[store].items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor


# The pytree of a module: one node whose children are all its tensors, by path. A tied tensor is one child.


def _get_static(module: Module) -> StaticFields:
    own = module.__dict__
    if own["_static"] is None:
        values = {name: own[name] for name in sorted(own.keys() - _PRIVATE)}
        static = StaticFields(values, all(_is_immutable(v) for v in values.values()))
        if not static.immutable:
            return static  # a list may change in place: looked at anew each time
        own["_static"] = static
    return own["_static"]


def _is_immutable(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(_is_immutable(v) for v in value)
    return isinstance(value, _VALUES) or callable(value)


class _Collector:
    """Walks a module and collects its tensors; parameters that are one tensor are one leaf."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.tensors: list[Any] = []
        self.fixed: list[bool] = []
        self.renewed: list[bool] = []
        self.places: dict[int, int] = {}
        self.modules: dict[int, int] = {}

    def walk(self, module: Module, path: str) -> Any:
        """The specification of a module: its class, configuration, and the leaf of each tensor."""
        if id(module) in self.modules:
            return self.modules[id(module)]  # the same module in two places
        module.require_shapes()
        self.modules[id(module)] = len(self.modules)
        own, prefix = module.__dict__, f"{path}." if path else ""
        frozen = own["_frozen"]
        kept = module.renewed
        parameters = tuple(
            [(n, self.add(t, prefix + n, n in frozen, True, n in kept)) for n, t in own["_parameters"].items()]
        )
        buffers = tuple([(n, self.add(t, prefix + n, True, False)) for n, t in own["_buffers"].items()])
        modules = tuple([(n, None if m is None else self.walk(m, prefix + n)) for n, m in own["_modules"].items()])
        return module.__class__, own["_static"] or _get_static(module), parameters, buffers, modules

    def add(self, tensor: Any, path: str, fixed: bool, share: bool, renewed: bool = False) -> int:
        place = self.places.get(id(tensor)) if share and tensor is not None else None
        if place is not None:
            self.fixed[place] = self.fixed[place] and fixed
            self.renewed[place] = self.renewed[place] or renewed
            return place
        if share and tensor is not None:
            self.places[id(tensor)] = len(self.tensors)
        self.paths.append(path)
        self.tensors.append(tensor)
        self.fixed.append(fixed)
        self.renewed.append(renewed)
        return len(self.tensors) - 1


def _take_apart(module: Module) -> Parts:
    found = _Collector()
    spec = found.walk(module, "")
    return Parts(tuple(found.paths), found.tensors, spec, tuple(found.fixed), tuple(found.renewed))


def _list_tensors(module: Module) -> list[Any]:
    """All tensors of a module; a tied one as often as it occurs."""
    found: list[Any] = []
    work, seen = [module], {id(module)}
    for each in work:
        own = each.__dict__
        found += own["_parameters"].values()
        found += own["_buffers"].values()
        for part in own["_modules"].values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                work.append(part)
    return found


def _build(cls: type, spec: Any, paths: tuple[str, ...], leaves: list[Any]) -> Module:
    return _build_module(spec, leaves, [])


def _build_module(spec: Any, leaves: list[Any], made: list[Module]) -> Module:
    if isinstance(spec, int):
        return made[spec]
    cls, static, parameters, buffers, modules = spec
    module = object.__new__(cls)
    made.append(module)
    own = module.__dict__
    own.update(static.values)
    own["_static"], own["_trace"] = static if static.immutable else None, CURRENT_BUILDER.get()
    own["_parameters"] = {name: leaves[i] for name, i in parameters}
    own["_buffers"] = {name: leaves[i] for name, i in buffers}
    own["_modules"] = {n: None if m is None else _build_module(m, leaves, made) for n, m in modules}
    return module  # type: ignore[no-any-return]


# Parts, and the containers that stand for lists and dicts of them.


# By the kind of a value, and whether it holds parameters: filled by tessera/nn/containers.py.
WRAPPERS: dict[tuple[type, bool], type] = {}


def _wrap_modules(value: Any) -> Any:
    """A list or dict that holds modules, or parameters, as one module."""
    if not isinstance(value, (list, tuple, dict)):
        return value
    kind, held = (dict, list(value.values())) if isinstance(value, dict) else (list, list(value))
    if not any(isinstance(v, (Module, Parameter)) for v in held):
        return value
    return WRAPPERS[kind, all(isinstance(v, Parameter) for v in held)](value)


def check_module(value: Any, where: str) -> Module:
    """A part of a container.

    Raises:
        ArgumentError: it is no module.
    """
    if not isinstance(value, Module):
        raise ArgumentError(
            f"{where} holds a {type(value).__name__}", location=user_location(), expected="modules",
            received=type(value).__name__,
        )  # fmt: skip
    return value


def find_part(module: Module, key: Any) -> Module:
    """A part of a container by its number or name.

    Raises:
        ArgumentError: there is none.
    """
    parts = module.__dict__["_modules"]
    names = list(parts)
    if isinstance(key, int) and -len(names) <= key < len(names):
        return parts[names[key]]  # type: ignore[no-any-return]
    if key in parts:
        return parts[key]  # type: ignore[no-any-return]
    raise ArgumentError(
        f"there is no module {key!r}", location=user_location(), expected=", ".join(names) or "none: it is empty"
    )
