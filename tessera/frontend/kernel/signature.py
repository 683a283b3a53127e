"""Kernel signatures: parameter annotations with types and memory spaces, and how arguments bind to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, DTypeError, ShapeError, UnknownNameError, user_location
from tessera.core.shapes import bind_shape
from tessera.core.symbolic_dim import Size
from tessera.core.types import GLOBAL, DType, Policy, RefType, TensorType, Type, as_dtype, scalar
from tessera.ir.array_interchange import import_dlpack, is_on_device, shorten_repr
from tessera.ir.tensor import Tensor

# The memory that something lies in, as annotations say it.


@dataclass(frozen=True)
class MemorySpace:
    """A memory space in an annotation: `Tensor[128, f32] @ ts.memory("register")`."""

    name: str

    def __rmatmul__(self, type: Any) -> PlacedType:
        return PlacedType(type, self)


@dataclass(frozen=True)
class PlacedType:
    """A type and the space where its values lie."""

    type: Any
    space: MemorySpace


def strip_global_space(annotation: Any, name: str) -> Any:
    """The annotation of a kernel's parameter without its space, which is global.

    Raises:
        ArgumentError: it says another space.
    """
    if not isinstance(annotation, PlacedType):
        return annotation
    if annotation.space.name != GLOBAL:
        raise ArgumentError(
            f"the parameter `{name}` cannot lie in {annotation.space.name} memory", location=user_location(),
            expected="global", suggestion="allocate it in the kernel: tile.alloc_shared(...)",
        )  # fmt: skip
    return annotation.type


class constexpr:
    """The annotation of a parameter that is a constant of the compiler: `BLOCK: ts.constexpr`."""


class KernelArguments(NamedTuple):
    """A call's arguments: types and arrays of those that exist at run time, and the constants."""

    types: Mapping[str, Type]
    arrays: tuple[Any, ...]
    constants: Mapping[str, Any]
    tensors: bool  # whether any came as a Tensor: then results go back as such


@dataclass(frozen=True)
class KernelParameters:
    """The signature of a kernel with its annotations evaluated."""

    name: str
    signature: inspect.Signature
    annotations: Mapping[str, Any]
    result: Any = None
    constants: frozenset[str] = field(default=frozenset())
    positional: int = 0  # how many may be given by place; no one must

    def bind(self, args: tuple, named: Mapping[str, Any], missing: Mapping[str, Any]) -> KernelArguments:
        """A call's arguments, sorted into run-time values and constants; `missing` gives defaults.

        Raises:
            ArgumentError, DTypeError, ShapeError: they do not fit, by the parameter's name.
        """
        given = self._given(args, named, missing)
        types, arrays, constants = {}, [], {}
        for name, given_as in given.items():
            argument = _adopt_foreign_array(name, given_as)
            if name in self.constants:
                self._check_constant(name, argument)
            type = None if name in self.constants and not _is_array(argument) else self._type(name, argument)
            if type is None:
                constants[name] = argument.item() if isinstance(argument, np.generic) else argument
                continue
            types[name] = type
            arrays.append(make_array(argument, type))
        self.sizes(types)
        return KernelArguments(types, tuple(arrays), constants, any(isinstance(a, Tensor) for a in given.values()))

    def _suggest_memory(self, error: str) -> str | None:
        """Advice for a call that leaves out a memory: a kernel writes memories that the call gives."""
        missing = [n for n in self.signature.parameters if n not in self.constants and f"'{n}'" in error]
        if "missing" not in error or not missing:
            return None
        return f"a kernel writes memory that the call gives; ts.launch takes new memory: {missing[0]}=ts.like(x)"

    def _check_constant(self, name: str, argument: Any) -> None:
        """Refuse a scalar tensor for a constant of the compiler; a parameter annotated as memory is none."""
        if _is_array(argument) and not argument.shape and not isinstance(self.annotations.get(name), TensorType):
            raise ArgumentError(
                f"`{name}` of {self.name} is a constant of the compiler", location=user_location(),
                expected="a Python number", received=f"a tensor {shorten_repr(argument)}",
                suggestion=f'outside of a trace int(...); in ts.jit a static argument: static_argnames=("{name}",)',
            )  # fmt: skip

    def _given(self, args: tuple, named: Mapping[str, Any], missing: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value of each parameter, in order."""
        names = self.signature.parameters
        given = dict(zip(names, args, strict=False))
        if len(args) <= self.positional and not given.keys() & named.keys():
            whole = {**given, **named}
            if whole.keys() == names.keys():  # as in most calls
                return {name: whole[name] for name in names}
        try:
            bound = self.signature.bind(*args, **{**{k: v for k, v in missing.items() if k not in given}, **named})
        except TypeError as error:
            fields = [
                f"{_SCHEDULE_FIELDS[n]}={v!r}" for n, v in named.items() if n in _SCHEDULE_FIELDS and n not in names
            ]
            raise ArgumentError(
                f"{self.name}: {error}", location=user_location(), expected=f"{self.name}({', '.join(names)})",
                suggestion=f"{self.name}.with_schedule(ts.Schedule({', '.join(fields)}))"
                if fields
                else self._suggest_memory(str(error)),
            ) from None  # fmt: skip
        bound.apply_defaults()
        return bound.arguments

    def _type(self, name: str, argument: Any) -> Type | None:
        want = self.annotations.get(name)
        if _is_array(argument):
            return self._ref(name, argument, want)
        if isinstance(want, TensorType) and want.rank and argument is not None:
            raise DTypeError(
                f"argument `{name}` is not a tensor", location=user_location(), expected=str(want),
                received=f"{type(argument).__name__} {shorten_repr(argument)}",
                suggestion=f"np.asarray({name}, {want.dtype.numpy.name!r})"
                if isinstance(argument, (list, tuple))
                else None,
            )  # fmt: skip
        if isinstance(want, DType) and isinstance(argument, (bool, int, float, np.generic)):
            return scalar(want)
        if isinstance(argument, (bool, int, float)):  # NumPy's float64 is a Python float
            return scalar(as_dtype(float if isinstance(argument, float) else type(argument)))
        return scalar(as_dtype(argument.dtype)) if isinstance(argument, np.generic) else None

    def _ref(self, name: str, argument: Any, want: Any) -> RefType:
        found = (
            argument.type if isinstance(argument, Tensor) else TensorType(argument.shape, _element_type(name, argument))
        )
        policy = found.policy
        if isinstance(want, TensorType):
            if want.dtype != found.dtype and want.dtype.numpy != found.dtype.numpy:
                raise DTypeError(
                    f"argument `{name}` has another element type", location=user_location(), expected=str(want),
                    received=str(found),
                    suggestion=f"convert `{name}` to {want.dtype}, or annotate it with ts.{found.dtype}",
                )  # fmt: skip
            return RefType(found.shape, want.dtype, policy=want.policy or policy)
        return RefType(found.shape, found.dtype, policy=policy)

    def sizes(self, types: Mapping[str, Type]) -> dict[str, Size]:
        """The dims that the annotations name, with their sizes.

        Raises:
            ShapeError: an argument's shape contradicts its annotation, or two sizes have one name.
        """
        sizes: dict[str, Size] = {}
        for name, type in types.items():
            want = self.annotations.get(name)
            if not isinstance(want, TensorType) or not isinstance(type, RefType):
                continue
            problem = bind_shape(want.shape, type.shape, sizes)
            if problem:
                raise ShapeError(
                    f"argument `{name}`: {problem}", location=user_location(), expected=str(want),
                    received="x".join([*(str(s) for s in type.shape), str(type.dtype)]),
                )  # fmt: skip
        return sizes


def _element_type(name: str, array: np.ndarray) -> DType:
    try:
        return as_dtype(array.dtype)
    except DTypeError as error:
        raise DTypeError(
            f"argument `{name}` holds no numbers that kernels know",
            location=user_location(),
            expected=error.suggestion,
            received=array.dtype,
        ) from None


def _adopt_foreign_array(name: str, argument: Any) -> Any:
    """An array of another library (PyTorch, JAX, …), seen in place; anything else as it is."""
    if _is_array(argument):
        return argument
    if is_on_device(argument):
        return Tensor(argument)
    if not hasattr(argument, "__dlpack__"):
        return argument
    try:
        return import_dlpack(argument)
    except (DTypeError, RuntimeError, BufferError, TypeError) as error:
        reason = error.message if isinstance(error, DTypeError) else error
        raise DTypeError(
            f"argument `{name}` cannot be seen in place: {reason}", location=user_location(),
            expected="an array in host memory", received=f"{type(argument).__module__}.{type(argument).__name__}",
        ) from None  # fmt: skip


def _is_array(argument: Any) -> bool:
    return isinstance(argument, (Tensor, np.ndarray))


def make_array(argument: Any, type: Type) -> Any:
    """The array of an argument that exists at run time."""
    if argument.__class__ is np.ndarray:
        return argument
    if isinstance(argument, Tensor):
        return argument if argument.is_traced else make_writable(argument)
    return argument if isinstance(argument, np.ndarray) else np.asarray(argument, type.dtype.numpy)


def make_writable(tensor: Tensor) -> np.ndarray | DeviceArray:
    """A tensor's elements; a constant, which is a view of one element, gets memory first: a kernel may write each."""
    if tensor.data.__class__ is DeviceArray:
        return tensor.data  # type: ignore[no-any-return]
    held = tensor.numpy()
    if not held.flags.writeable and isinstance(held.base, np.ndarray) and held.base.size == 1:
        tensor.data = held = held.copy()
    return held


def read_parameters(function: Callable[..., Any]) -> KernelParameters:
    """The parameters of a Python function."""
    signature = inspect.signature(function)
    found: dict[str, Any] = {}
    constants = set()
    for name, each in signature.parameters.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ArgumentError(f"a kernel takes no *{name}", suggestion="name each parameter")
        found[name] = strip_global_space(_evaluate_annotation(function, name, each.annotation), name)
        if each.kind is each.KEYWORD_ONLY or found[name] is constexpr:
            constants.add(name)
    result = _evaluate_annotation(function, "return", signature.return_annotation)
    kinds = [each.kind for each in signature.parameters.values()]
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional = 0 if inspect.Parameter.POSITIONAL_ONLY in kinds else kinds.count(either)
    return KernelParameters(function.__name__, signature, found, result, frozenset(constants), positional)


def _evaluate_annotation(function: Callable[..., Any], name: str, annotation: Any) -> Any:
    """An annotation, which may be a string (`from __future__ import annotations`)."""
    if annotation is inspect.Parameter.empty:
        return None
    if not isinstance(annotation, str):
        return _as_scalar_type(annotation)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return _as_scalar_type(eval(annotation, function.__globals__, {k: c.cell_contents for k, c in cells}))
    except NameError as error:
        raise UnknownNameError(
            f"the annotation of `{name}` in {function.__name__}: {error}", received=annotation,
            suggestion="define what it names in the module",
        ).at(user_location()) from None  # fmt: skip


_SCHEDULE_FIELDS = {"num_warps": "warps", "num_stages": "stages"}  # arguments of a launch in Triton
_PYTHON_TYPES = {int: as_dtype(int), float: as_dtype(float), bool: as_dtype(bool)}


def _as_scalar_type(annotation: Any) -> Any:
    """A policy or a Python number type as the scalar type it means."""
    if isinstance(annotation, Policy):
        return annotation.storage
    try:
        return _PYTHON_TYPES.get(annotation, annotation)
    except TypeError:
        return annotation


def find_dim_names(want: Any) -> tuple[Any, ...]:
    """The dims an annotation names, axis by axis."""
    return want.shape if isinstance(want, TensorType) else ()
