"""The GPU: its context, modules loaded once, a memory pool; driver failures become Tessera errors."""

from __future__ import annotations

import atexit
import importlib
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tessera.codegen.artifact import hash_content
from tessera.core.device import count_gpus
from tessera.core.errors import ArtifactError, DeviceUnavailable, ExecutionError, ResourceError, TesseraError

MIN_CAPABILITY = (8, 0)  # compute capability
ARCH_PATTERN = re.compile(r"sm_(\d+)(\d)(a?)")
LOG_LINE = re.compile(r"line (\d+)")
ALLOCATION_UNIT = 4  # bytes


class DeviceAllocation:
    """Memory on the GPU; as an int its address."""

    def __init__(self, allocation: Any) -> None:
        self._allocation = allocation
        self._address = int(allocation)

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        """Give it back to the pool."""
        if self._allocation is not None:
            self._allocation.free()
            self._allocation = None


class GPU:
    """The first GPU of this machine, through pycuda; its context is the one other libraries use too.

    Raises:
        DeviceUnavailable: pycuda, the driver or a GPU that is new enough is missing.
    """

    def __init__(self) -> None:
        self.driver = _import_pycuda()
        try:
            self.driver.init()
            self.device = self.driver.Device(0)
        except self.driver.Error as error:
            raise DeviceUnavailable(f"no GPU answers: {error}", suggestion="check nvidia-smi") from None
        self.capability: tuple[int, int] = self.device.compute_capability()
        if self.capability < MIN_CAPABILITY:
            raise DeviceUnavailable(
                f"{self.device.name()} has compute capability {_format_capability(self.capability)}",
                expected=f"{_format_capability(MIN_CAPABILITY)} or more", suggestion='run on the processor with "cpu"',
            )  # fmt: skip
        self.processors = int(self.device.get_attribute(self.driver.device_attribute.MULTIPROCESSOR_COUNT))
        self.context = self.device.retain_primary_context()
        self._here = threading.local()
        self._modules: dict[str, Any] = {}
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        with self.active():
            self._pool = importlib.import_module("pycuda.tools").DeviceMemoryPool()
        atexit.register(self._leave)

    def allocate(self, size: int) -> DeviceAllocation:
        """Memory from the pool, free again when nothing refers to it."""
        # In whole words: what is smaller than an atomic operation is changed by one on the word around it.
        room = DeviceAllocation(self._pool.allocate(-(-max(size, 1) // ALLOCATION_UNIT) * ALLOCATION_UNIT))
        self.keep(room)
        return room

    def keep(self, what: Any) -> None:
        """Have its `free` called before the context goes."""
        self._held.add(what)

    def _leave(self) -> None:
        """Give all back while the context still stands: pycuda ends the process otherwise."""
        for each in list(self._held):
            each.free()
        self._modules.clear()
        self._pool.stop_holding()
        if getattr(self._here, "active", False):
            self.driver.Context.pop()

    @property
    def name(self) -> str:
        """What the GPU calls itself."""
        return str(self.device.name())

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context made current, for as long as this thread lives: what is on the GPU is freed at any time.

        Errors of the driver become ours.

        Raises:
            ResourceError: memory is used up.
            ExecutionError: a kernel failed; the context is then lost, and so is all that lies in its memory.
        """
        drv = self.driver
        if not getattr(self._here, "active", False):
            self.context.push()
            self._here.active = True
        try:
            yield
        except drv.MemoryError as error:
            raise ResourceError(
                f"the memory of {self.name} is used up: {error}",
                suggestion="smaller inputs; what was free before is so",
            ) from None
        except drv.LaunchError as error:
            raise self._failed(error) from None
        except drv.Error as error:
            raise ExecutionError(f"{self.name} refused: {error}") from None

    def _failed(self, error: Exception) -> ExecutionError:
        """A kernel's failure; whether the context stands decides what is left to do."""
        try:
            self.driver.Context.synchronize()
        except self.driver.Error:
            hint = "this process cannot use the GPU any more: begin a new one, and look for the fault with "
            hint += "`tessera run --level target --target ptx`, which runs the same text in the interpreter"
        else:
            hint = "the GPU goes on working in this process; what this program should have written is not there"
        return ExecutionError(f"a kernel failed on {self.name}: {error}", suggestion=hint)

    def check_room(self, name: str, function: Any, threads: int, shared: int) -> None:
        """Refuse a kernel whose threads or shared memory are more than this GPU has for it.

        Raises:
            ResourceError: it names the kernel and both numbers.
        """
        drv = self.driver
        most = function.get_attribute(drv.function_attribute.MAX_THREADS_PER_BLOCK)
        room = self.device.get_attribute(drv.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        if threads > most:
            raise ResourceError(
                f"{name} takes so many registers that {self.name} runs no {threads} threads of it at once",
                expected=f"at most {most}", received=f"{threads}", suggestion="smaller tiles, or fewer warps",
            )  # fmt: skip
        if shared > room:
            raise ResourceError(
                f"{name} needs {shared:,} bytes of shared memory", expected=f"at most {room:,} on {self.name}",
                received=f"{shared:,}", suggestion="smaller tiles, or fewer stages",
            )  # fmt: skip

    def check_architecture(self, arch: str) -> None:
        """Refuse text for an architecture that this GPU is not.

        Raises:
            DeviceUnavailable: the GPU is older, or of another generation than text of the kind sm_90a asks for.
        """
        major, minor, exact = ARCH_PATTERN.fullmatch(arch).groups()  # type: ignore[union-attr]
        wanted = (int(major), int(minor))
        if self.capability < wanted or (exact and self.capability != wanted):
            raise DeviceUnavailable(
                f"the artifact is for {arch}, {self.name} has compute capability {_format_capability(self.capability)}",
                expected=f"{_format_capability(wanted)}{'' if exact else ' or more'}",
                suggestion="build it again with --arch sm_80",
            )

    def module(self, text: str) -> Any:
        """PTX text loaded, once for each text.

        Raises:
            ArtifactError: the driver's assembler refuses it; the error shows its log and the line.
        """
        key = hash_content(text)
        if key not in self._modules:
            self._modules[key] = self._load(text)
        return self._modules[key]

    def _load(self, text: str) -> Any:
        log: list[str] = []
        try:
            return self.driver.module_from_buffer(
                text.encode() + b"\0", message_handler=lambda done, info, error: log.append(error or info)
            )
        except self.driver.Error as error:
            raise _assembly_error(text, f"{error}\n" + "\n".join(log)) from None


def _assembly_error(text: str, log: str) -> TesseraError:
    """The assembler's complaint with the line it is about."""
    found = LOG_LINE.search(log)
    lines = text.splitlines()
    shown = f"line {found[1]}: {lines[int(found[1]) - 1].strip()}" if found and int(found[1]) <= len(lines) else ""
    return ArtifactError(f"the driver cannot assemble this text: {log.strip()}", received=shown)


def _format_capability(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _import_pycuda() -> Any:
    try:
        return importlib.import_module("pycuda.driver")
    except ImportError as error:
        raise DeviceUnavailable(
            f"running on a GPU needs the package pycuda: {error}", suggestion='pip install "tessera[ptx]"'
        ) from None


@cache
def get_gpu() -> GPU:
    """The GPU of this machine, its context made once."""
    if not count_gpus():
        raise DeviceUnavailable("this machine has no NVIDIA GPU", suggestion='run on the processor with "cpu"')
    return GPU()
