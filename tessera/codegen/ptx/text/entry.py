"""Kernel entries: the .entry directive, its parameters, and its assembled text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.ptx.emitter import PtxEmitter
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.memref import VECTOR_BYTES, PtxMemRef
from tessera.codegen.ptx.text.register_types import ptx_type, register_class
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, RefType, bf16, bool_, f16
from tessera.ir.core import Value


@dataclass(frozen=True)
class KernelEntry:
    """The text of a tile function, the threads of a block, the dynamic shared memory it needs, and for whoever
    launches it: tensor maps, how many programs it works through in a loop (0: one each), and its extras.

    `isa` is the version of the instruction set that it needs, if that is not the least of its architecture. `folded`
    says that it is launched over the number of programs, `halves` which parameters it touches by pairs of bytes."""

    lines: tuple[str, ...]
    threads: int
    shared: int
    maps: tuple[dict[str, Any], ...] = ()
    programs: int = 0
    cluster: int = 1  # blocks of threads that share what they fetch
    extras: Mapping[str, Any] = field(default_factory=dict)
    isa: tuple[int, int] = (0, 0)
    folded: bool = False
    halves: Collection[int] = ()

    def described(self) -> dict[str, Any]:
        """The entry as data that JSON can hold."""
        more: dict[str, Any] = {"maps": list(self.maps)} if self.maps else {}
        more |= {"programs": self.programs} if self.programs else {}
        more |= {"folded": True} if self.folded else {}
        more |= {"halves": sorted(self.halves)} if self.halves else {}
        more |= {"cluster": self.cluster} if self.cluster > 1 else {}
        return {"threads": self.threads, "shared": self.shared, **more, **self.extras}


def bind_parameters(kernel: PtxEmitter, aligned: Sequence[int]) -> None:
    """What the parameters' registers hold."""
    for i, v in enumerate(kernel.function.params):
        _bind_parameter(kernel, v, f"{kernel.function.name}_{i}", aligned[i] if aligned else VECTOR_BYTES)


def finish_entry(kernel: PtxEmitter, maps: Sequence[dict[str, Any]] = (), programs: int = 0) -> KernelEntry:
    """The entry whose body has been emitted."""
    begin = [*kernel.room.lines(), *kernel.extras.lines(kernel.function.name)]
    lines = (*_entry_header(kernel, len(maps)), *kernel.text.assemble(begin), "}", "")
    extras, shared = kernel.extras.described(), kernel.room.shared_bytes
    cluster = kernel.cluster.size if kernel.cluster is not None else 1
    return KernelEntry(
        lines, kernel.team.block, shared, tuple(maps), programs, cluster, extras, kernel.isa, bool(kernel.folded),
        kernel.halves,
    )  # fmt: skip


def _bind_parameter(kernel: PtxEmitter, v: Value, name: str, align: int) -> None:
    """What a parameter's registers hold."""
    text = kernel.text
    with text.first():
        if isinstance(v.type, RefType):
            if not all(isinstance(n, int) for n in v.type.shape):
                raise UnsupportedOpError(f"the target ptx needs sizes that are known, {v.type} has symbols")
            pointer = text.let("ld.param.u64", "b64", f"[{name}]")
            base = text.let("cvta.to.global.u64", "b64", pointer)
            kernel.memories[v] = PtxMemRef(v.type.dtype, "global", base, static_shape(v), align)
        else:
            kernel.values[v] = (_load_scalar_parameter(text, v.type.dtype, name),)


def _load_scalar_parameter(text: PtxBuilder, dtype: DType, name: str) -> str:
    """A scalar parameter, given in memory's form."""
    if dtype == bool_:
        return text.let("setp.ne.u32", "pred", text.let("ld.param.u8", "b32", f"[{name}]"), 0)
    if dtype in (f16, bf16):
        half = text.let("ld.param.b16", "b16", f"[{name}]")
        return text.let(f"cvt.f32.{dtype.name}", "f32", half)
    form = ptx_type(dtype)
    form = f"{form[0]}{dtype.bits}" if dtype.bits < 32 else form
    return text.let(f"ld.param.{form}", register_class(dtype), f"[{name}]")


def _parameter_type(v: Value) -> str:
    if isinstance(v.type, RefType):
        return "u64"
    dtype = v.type.dtype
    return {bool_: "u8", f16: "b16", bf16: "b16"}.get(dtype) or (
        f"{ptx_type(dtype)[0]}{dtype.bits}" if dtype.bits < 32 else ptx_type(dtype)
    )


def _entry_header(kernel: PtxEmitter, maps: int) -> Iterator[str]:
    name = kernel.function.name
    params = [f"\t.param .align 64 .b8 {name}_map{i}[128]" for i in range(maps)]
    params += [f"\t.param .{_parameter_type(v)} {name}_{i}" for i, v in enumerate(kernel.function.params)]
    params += kernel.extras.params(name)
    yield f".visible .entry {name}("
    yield ",\n".join(params)
    yield ")"
    # One block fills a multiprocessor where threads give registers to others.
    resident = 1 if kernel.team.helpers else kernel.resident
    yield f".reqntid {kernel.team.block}, 1, 1" + (f" .minnctapersm {resident}" if resident else "")
    if kernel.cluster is not None:
        yield f".explicitcluster .reqnctapercluster {kernel.cluster.size}, 1, 1"
    yield "{"
