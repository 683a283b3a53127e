"""Element types, numeric policies, memory spaces, the types of IR values, and the element types of Python numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import DTypeError, user_location
from tessera.core.hooks import find_typed_op
from tessera.core.symbolic_dim import Dim, Size, evaluate_shape, symbol_names


@dataclass(frozen=True)
class DType:
    """An element type: its name, its NumPy storage, its kind and its width in bits.

    >>> DType("float32") == f32
    True
    """

    name: str
    numpy: np.dtype = dataclasses.field(compare=False, repr=False, default=None)  # type: ignore[arg-type]
    kind: str = dataclasses.field(compare=False, default="")  # "float", "int", "uint" or "bool"
    bits: int = dataclasses.field(compare=False, default=0)
    mlir: str = dataclasses.field(compare=False, repr=False, default="")

    def __post_init__(self) -> None:
        if not self.kind:  # a name alone: the type of that name
            for field, value in vars(as_dtype(self.name)).items():
                object.__setattr__(self, field, value)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        # As that of a dataclass, which makes two tuples.
        return self is other or (other.__class__ is DType and self.name == other.name)  # type: ignore[attr-defined]

    def __matmul__(self, clause: PolicyClause) -> Policy:
        return Policy(self) @ clause

    def __getattr__(self, name: str) -> Any:
        """An op of this type alone: `ts.f32.add`, `ts.int8.saturating_add` (tessera/research/typed_ops.py)."""
        op = None if name.startswith("_") else find_typed_op(self, name)
        if op is None:
            raise AttributeError(f"the element type {self.__dict__.get('name', '')} has no {name}", name=name)
        return op

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"ts.{self.name}"

    @property
    def is_float(self) -> bool:
        """Whether this is a floating-point type."""
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """Whether this is a signed or unsigned integer type."""
        return self.kind in ("int", "uint")


def _float_type(name: str, storage: Any, bits: int, mlir: str) -> DType:
    return DType(name, np.dtype(storage), "float", bits, mlir)


f64 = _float_type("f64", np.float64, 64, "f64")
f32 = _float_type("f32", np.float32, 32, "f32")
tf32 = _float_type("tf32", np.float32, 32, "tf32")
f16 = _float_type("f16", np.float16, 16, "f16")
bf16 = _float_type("bf16", ml_dtypes.bfloat16, 16, "bf16")
fp8_e4m3 = _float_type("fp8_e4m3", ml_dtypes.float8_e4m3fn, 8, "f8E4M3FN")
fp8_e5m2 = _float_type("fp8_e5m2", ml_dtypes.float8_e5m2, 8, "f8E5M2")
fp6 = _float_type("fp6", ml_dtypes.float6_e3m2fn, 6, "f6E3M2FN")
fp6_e2m3 = _float_type("fp6_e2m3", ml_dtypes.float6_e2m3fn, 6, "f6E2M3FN")
fp4 = _float_type("fp4", ml_dtypes.float4_e2m1fn, 4, "f4E2M1FN")
int4 = DType("int4", np.dtype(ml_dtypes.int4), "int", 4, "i4")
int8 = DType("int8", np.dtype(np.int8), "int", 8, "i8")
int16 = DType("int16", np.dtype(np.int16), "int", 16, "i16")
int32 = DType("int32", np.dtype(np.int32), "int", 32, "i32")
int64 = DType("int64", np.dtype(np.int64), "int", 64, "i64")
uint8 = DType("uint8", np.dtype(np.uint8), "uint", 8, "ui8")
uint16 = DType("uint16", np.dtype(np.uint16), "uint", 16, "ui16")
uint32 = DType("uint32", np.dtype(np.uint32), "uint", 32, "ui32")
uint64 = DType("uint64", np.dtype(np.uint64), "uint", 64, "ui64")
bool_ = DType("bool", np.dtype(np.bool_), "bool", 1, "i1")

DTYPES: tuple[DType, ...] = (f64, f32, tf32, f16, bf16, fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
DTYPES += (int4, int8, int16, int32, int64, uint8, uint16, uint32, uint64, bool_)
BY_NAME: Mapping[str, DType] = {t.name: t for t in DTYPES}
BY_MLIR: Mapping[str, DType] = {t.mlir: t for t in DTYPES}
_BY_NUMPY = {t.numpy: t for t in reversed(DTYPES) if t is not tf32}


def as_dtype(value: Any) -> DType:
    """A DType from a DType, its name, a NumPy dtype or a Python type.

    >>> as_dtype("bf16"), as_dtype(np.float32), as_dtype(bool)
    (ts.bf16, ts.f32, ts.bool)
    """
    if isinstance(value, DType):
        return BY_NAME.get(value.name, value)
    policy = find_policy(value)
    if policy is not None:
        return policy.storage
    if isinstance(value, str) and value in BY_NAME:
        return BY_NAME[value]
    if value is float or value is int:
        return f32 if value is float else int64
    try:
        if value is not None:  # which NumPy takes for float64
            return _BY_NUMPY[np.dtype(value)]
    except (TypeError, ValueError, KeyError):
        pass
    raise DTypeError(
        f"{value!r} is not an element type", location=user_location(), suggestion="use one of " + ", ".join(BY_NAME)
    )


ROUNDINGS = ("nearest", "toward_zero", "stochastic")
DENORMALS = ("preserve", "flush")


@dataclass(frozen=True)
class PolicyClause:
    """One clause of a policy, such as `ts.accum(ts.f32)`; `@` adds it to a type."""

    field: str
    value: Any


@dataclass(frozen=True)
class Policy:
    """How values of a storage type are computed with, accumulated, rounded and stored.

    `compensated` sums carry their rounding errors along; `seed` tells the draws of stochastic rounding apart.

    >>> bf16 @ accum(f32)
    ts.bf16 @ accumulate=f32
    """

    storage: DType
    compute: DType | None = None
    accumulate: DType | None = None
    rounding: str = "nearest"
    saturate: bool = False
    denormals: str = "preserve"
    loss_scale: float = 1.0
    compensated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("storage", "compute", "accumulate"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_dtype(getattr(self, name)))
        for name, known in (("rounding", ROUNDINGS), ("denormals", DENORMALS)):
            if getattr(self, name) not in known:
                raise DTypeError(
                    f"there is no {name} {getattr(self, name)!r}", location=user_location(), expected=", ".join(known)
                )

    def __matmul__(self, clause: PolicyClause) -> Policy:
        if not isinstance(clause, PolicyClause):
            raise DTypeError(
                f"{clause!r} is not part of a policy", location=user_location(),
                suggestion="use ts.accum(ts.f32), ts.saturate, ...",
            )  # fmt: skip
        return dataclasses.replace(self, **{clause.field: clause.value})

    def clauses(self) -> dict[str, Any]:
        """The fields that differ from the defaults, without the storage type."""
        fields = dataclasses.fields(self)[1:]
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __repr__(self) -> str:
        return " @ ".join([repr(self.storage), *(f"{k}={v}" for k, v in self.clauses().items())])


def accum(dtype: DType) -> PolicyClause:
    """The policy clause for the type that reductions and dots accumulate in."""
    return PolicyClause("accumulate", as_dtype(dtype))


def compute(dtype: DType) -> PolicyClause:
    """The policy clause for the type that each op computes in."""
    return PolicyClause("compute", as_dtype(dtype))


def loss_scale(factor: float) -> PolicyClause:
    """The policy clause for a loss scale."""
    return PolicyClause("loss_scale", float(factor))


stochastic_round = PolicyClause("rounding", "stochastic")
toward_zero = PolicyClause("rounding", "toward_zero")
saturate = PolicyClause("saturate", True)
flush_denormals = PolicyClause("denormals", "flush")
compensated = PolicyClause("compensated", True)


def find_policy(value: Any) -> Policy | None:
    """The policy of a value that is a Policy or a class of `@ts.precision_policy`; else None."""
    found = value if isinstance(value, Policy) else getattr(value, "__policy__", None)
    return found if isinstance(found, Policy) else None


@lru_cache(maxsize=4096)
def share_type(shape: tuple[int, ...], dtype: DType, policy: Policy | None = None) -> TensorType:
    """The type of a tensor of known sizes; equal ones are the same object, which calls compare fastest."""
    return TensorType(shape, dtype, policy)


GLOBAL, SHARED, REGISTER = "global", "shared", "register"
# Memory spaces of the host: its own memory, and files.
HOST, DISK = "host", "disk"
SPACES = (GLOBAL, SHARED, REGISTER)


@dataclass(frozen=True)
class TensorType:
    """A tensor, or a block of elements at the Tile level: its shape, element type and policy.

    A scalar is a tensor of rank 0.
    """

    shape: tuple[Size, ...]
    dtype: DType
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and not self.policy.clauses():
            object.__setattr__(self, "policy", None)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not TensorType:
            return NotImplemented
        assert isinstance(other, TensorType)
        return self.dtype == other.dtype and self.shape == other.shape and self.policy == other.policy

    def __hash__(self) -> int:
        # Kept: each call of a compiled function looks for the types of its arguments.
        found = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((self.shape, self.dtype, self.policy))
        return int(found)

    def __reduce__(self) -> Any:
        return TensorType, (self.shape, self.dtype, self.policy)  # a hash of strings is that of one process

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def compute(self) -> DType:
        """The type that one op on such elements computes in (design: storage widened to f32)."""
        chosen = self.policy.compute if self.policy else None
        return chosen or (f32 if self.dtype.is_float and self.dtype.bits <= 32 else self.dtype)

    @cached_property
    def accumulate(self) -> DType:
        """The type that sums of such elements accumulate in."""
        chosen = self.policy.accumulate if self.policy else None
        narrow = int32 if self.dtype in (int8, int4, uint8) else self.dtype
        return chosen or (f32 if self.dtype.is_float and self.dtype.bits <= 32 else narrow)

    def with_shape(self, shape: tuple[Size, ...]) -> TensorType:
        """This type with another shape."""
        return TensorType(tuple(shape), self.dtype, self.policy)

    def with_dtype(self, dtype: DType) -> TensorType:
        """This type with another element type; the policy stays only with the same storage."""
        return TensorType(self.shape, dtype, self.policy if dtype == self.dtype else None)

    def evaluate(self, sizes: Mapping[str, int]) -> TensorType:
        """This type with symbolic sizes replaced."""
        return self.with_shape(evaluate_shape(self.shape, sizes)) if symbol_names(self.shape) else self

    def __str__(self) -> str:
        return "x".join([*(str(s) for s in self.shape), str(self.dtype)])


def join_compute_types(types: Sequence[DType]) -> DType:
    """The type of an op whose operands are each converted to one of these: floats of several types meet in f32 or f64.

    >>> join_compute_types([f16, f16]), join_compute_types([f16, f32]), join_compute_types([bool_, f64, f32])
    (ts.f16, ts.f32, ts.f64)
    """
    floats = {t for t in types if t.is_float}
    if len(floats) < 2:
        return types[-1]
    return f64 if f64 in floats else f32


@dataclass(frozen=True)
class RefType:
    """A reference to memory: the shape and element type of its elements, and the memory space."""

    shape: tuple[Size, ...]
    dtype: DType
    space: str = GLOBAL
    policy: Policy | None = None

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @staticmethod
    def of(type: TensorType) -> RefType:
        """The memory that holds a tensor."""
        return RefType(type.shape, type.dtype, policy=type.policy)

    def block(self, shape: tuple[int, ...]) -> TensorType:
        """The type of a block of this shape read from here."""
        return TensorType(tuple(shape), self.dtype, self.policy)

    def evaluate(self, sizes: Mapping[str, int]) -> RefType:
        """This type with symbolic sizes replaced."""
        return dataclasses.replace(self, shape=evaluate_shape(self.shape, sizes))

    def __str__(self) -> str:
        return f"{self.space} " + "x".join([*(str(s) for s in self.shape), str(self.dtype)])


Type = TensorType | RefType


@cache
def scalar(dtype: DType) -> TensorType:
    """The type of a scalar."""
    return TensorType((), dtype)


def to_python_numbers(value: Any) -> Any:
    """NumPy's numbers as Python's, also in lists and tuples; anything else as it is.

    >>> to_python_numbers((np.int64(2), np.float32(0.5), "same"))
    (2, 0.5, 'same')
    """
    if isinstance(value, np.generic):
        return value.item()
    return type(value)(map(to_python_numbers, value)) if type(value) in (list, tuple) else value


def check_integer_fits(value: Any, dtype: DType) -> Any:
    """Check that an integer type holds a Python number.

    Raises:
        DTypeError: the type cannot hold it.
    """
    if dtype.is_integer and isinstance(value, int):
        info = ml_dtypes.iinfo(dtype.numpy)
        if not info.min <= value <= info.max:
            raise DTypeError(
                f"{value} does not fit {dtype}",
                location=user_location(),
                expected=f"a number from {info.min} to {info.max}",
                received=str(value),
                suggestion="cast the tensor to a wider type first",
            )
    return value


def find_number_dtype(value: bool | int | float | Dim, beside: DType) -> DType:
    """The element type that a Python number takes in an op with elements of another type."""
    if isinstance(value, Dim):
        return beside if beside.is_float or beside.is_integer else int64
    fits = beside.is_float or (beside.is_integer and isinstance(value, int))  # a bool is an int here: 0 or 1
    return beside if fits else as_dtype(type(value))
