"""Foreign engine: a program in any language that runs the cases, spoken to in JSON lines (conformance/README.md)."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance.run import Engine
from tessera.core.errors import ExecutionError, FileError, ResourceError, UnsupportedOpError
from tessera.core.types import as_dtype
from tessera.ir.printer import print_module
from tessera.runtime.program import PreparedProgram


@dataclass(frozen=True)
class ForeignEngine(Engine):
    """A command that reads a request a line and writes an answer a line."""

    command: str = ""
    process: list[Any] = field(default_factory=list, compare=False)
    communicates = False  # a command has one program at a time: none that waits for other ranks

    def run(self, program: PreparedProgram) -> list[np.ndarray]:
        """The results of the command.

        Raises:
            UnsupportedOpError: the command refuses the program.
            ExecutionError: it ended, or its answer is not one of the protocol.
        """
        level = program.top
        with tempfile.TemporaryDirectory() as folder:
            inputs = [_write(Path(folder) / f"input{i}", a) for i, a in enumerate(program.arrays)]
            request = {"case": program.name, "level": level, "module": print_module(program.levels[level]),
                       "inputs": inputs, "written": list(program.written), "folder": folder}  # fmt: skip
            answer = self._ask(request)
            if answer.get("status") == "unsupported":
                raise UnsupportedOpError(str(answer.get("detail", "refused")))
            if answer.get("status") == "resource":
                raise ResourceError(str(answer.get("detail", "refused")))
            if answer.get("status") != "ok" or not isinstance(answer.get("outputs"), list):
                raise ExecutionError(str(answer.get("detail", "the engine failed")), received=json.dumps(answer)[:200])
            return [_read(each) for each in answer["outputs"]]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line)
        except (OSError, ValueError):
            process.kill()
            code = process.wait()
            self.close()
            raise ExecutionError(
                "the engine gave no answer", expected="a line of JSON", received=f"exit status {code}"
            ) from None
        if not isinstance(answer, dict):
            raise ExecutionError("the engine's answer is no object", received=line[:200])
        return answer

    def _start(self) -> Any:
        if not self.process:
            try:
                self.process.append(
                    subprocess.Popen(
                        shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                )
            except (OSError, ValueError, IndexError) as error:
                reason = getattr(error, "strerror", None) or error
                raise FileError(f"the engine does not start: {reason}", received=self.command) from None
        return self.process[0]

    def close(self) -> None:
        """End the command."""
        for process in self.process:
            with suppress(OSError):  # it has ended with a request unread
                process.stdin.close()
            process.wait()
            process.stdout.close()
        self.process.clear()


def _write(path: Path, array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    path.write_bytes(array.tobytes())
    return {"file": str(path), "dtype": array.dtype.name, "shape": list(array.shape)}


def _read(answer: Any) -> np.ndarray:
    try:
        element = _find_dtype(answer["dtype"])
        return np.frombuffer(Path(answer["file"]).read_bytes(), element).reshape(answer["shape"]).copy()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ExecutionError(f"an output of the engine cannot be read: {error}", received=str(answer)[:200]) from None


def _find_dtype(name: str) -> np.dtype[Any]:
    """An element type by NumPy's name (float32, bfloat16) or Tessera's (f32, bf16)."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(as_dtype(name).numpy)


def make_foreign_engines(commands: Sequence[str]) -> list[ForeignEngine]:
    """An engine for each command.

    Raises:
        FileError: there is no such program.
    """
    for command in commands:
        program = (shlex.split(command) or [""])[0]
        if shutil.which(program) is None:
            raise FileError(
                f"there is no program {program}", received=f"--engine {command!r}",
                suggestion="name an executable file; conformance/README.md defines what it answers",
            )  # fmt: skip
    return [ForeignEngine(command, "device", "interp", command) for command in commands]
