"""Entry points in files: `file.py`, `file.py:name`, their inputs, and the cause of an exception in the user's code."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

import numpy as np

from tessera.codegen.contract import get_backend
from tessera.core.device import INTERP
from tessera.core.errors import (
    UNKNOWN,
    ArgumentError,
    FileError,
    Location,
    ProgramError,
    ResourceError,
    TesseraError,
    UnknownNameError,
    is_command_file,
    is_package_file,
    traceback_location,
)
from tessera.core.io import read_array
from tessera.core.types import DType
from tessera.frontend.jit.dynamic_shapes import SizeVariant
from tessera.frontend.jit.tracing import Jit, locate_definition
from tessera.frontend.kernel import Kernel
from tessera.ir.tensor import Tensor
from tessera.runtime.program import PreparedProgram, format_tuning, prepare
from tessera.tools.example import Example

# Diagnosis of exceptions that are not a `TesseraError`: their cause and the user's line.


TRACEBACK_HINT = "--traceback shows the calls that led there"


def describe_exception(error: Exception) -> TesseraError:
    """Convert an exception to the error to show: of user code, a file, memory, or Tessera itself."""
    if isinstance(error, SyntaxError):
        return syntax_error(error)
    place, own = _locate_exception(error)
    text = f"{type(error).__name__}: {error}"
    if not own:
        return ProgramError(text, suggestion=TRACEBACK_HINT).at(place)
    if isinstance(error, OSError):
        return FileError(f"{error.filename or 'a file'}: {error.strerror or error}").at(place)
    if isinstance(error, MemoryError):
        return ResourceError(f"there is not enough memory: {error}").at(place)
    return TesseraError(f"a fault of Tessera itself: {text}", suggestion=f"report it: {TRACEBACK_HINT}").at(place)


def syntax_error(error: SyntaxError, path: str | None = None) -> FileError:
    """The error for a file that does not parse; `path` is the user's name for it."""
    file = error.filename or path or "the program"
    place = Location(file, error.lineno, error.offset or 0) if error.lineno else None
    return FileError(f"{path or file} is not Python: {error.msg}", location=place)


def _locate_exception(error: BaseException) -> tuple[Location, bool]:
    """The innermost line of user code in a traceback (or UNKNOWN), and whether Tessera's frames follow it.

    Frames outside the command are ignored, and frames of libraries count as their callers'.
    """
    found, own, step, depth = UNKNOWN, True, error.__traceback__, 0
    libraries = tuple(path for name, path in sysconfig.get_paths().items() if name.endswith("lib"))
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if is_command_file(file):
            found, own = UNKNOWN, True
        elif is_package_file(file):
            own, depth = True, depth + 1
        elif not file.startswith(("<", *libraries)):
            found, own, depth = traceback_location(step), False, 0
        step = step.tb_next
    asked = isinstance(error, AttributeError) and depth == 1  # the user's line asks for a name that an object lacks
    return found, own and not asked


# Entry points in files: `file.py`, `file.py:name`, and their inputs.


@dataclass(frozen=True)
class EntryPoint:
    """A kernel or jit function found in a file, and how to run it."""

    name: str
    function: Any
    example: Example | None
    # Of a model of another system: its inputs with their element types, and its place.
    parameters: Mapping[str, DType | None] | None = None
    place: Location | None = None

    @property
    def location(self) -> Location:
        """The location of its definition."""
        return self.place or locate_definition(self.function.__wrapped__)


# Models of other systems, by the suffix of their files: load_entry(path, sizes), imported on demand.
IMPORTERS = {".onnx": "tessera.onnx.entry"}


def _import_model(path: str, sizes: Mapping[str, int]) -> EntryPoint:
    """Load a model of another system by the importer for its suffix."""
    importer = import_module(IMPORTERS[Path(path).suffix])
    function, inputs, parameters, place = importer.load_entry(path, sizes)
    return EntryPoint(function.__name__, function, Example(inputs), parameters, place)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse the sizes of open axes, as "batch=4".

    Raises:
        ArgumentError: a text has another form.
    """
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise ArgumentError(f"{text} is not a size", expected="NAME=NUMBER, as batch=4")
        found[name] = int(number)
    return found


def find_entry_point(text: str, sizes: Sequence[str] = ()) -> EntryPoint:
    """Find the entry point named by "file.py", "file.py:name", or the file of a model, with the sizes of its axes.

    Raises:
        FileError: there is no such file. UnknownNameError: there is no such entry, or several.
        ArgumentError: sizes are given for a Python file.
    """
    if Path(text).suffix in IMPORTERS:
        return _import_model(text, parse_sizes(sizes))
    if sizes:
        raise ArgumentError("--size is for the open axes of a model", expected=f"a file {', '.join(IMPORTERS)}",
                            received=text)  # fmt: skip
    path, _, name = text.partition(":") if ".py:" in text else (text, "", "")
    entries = _entry_points_of(load_module(path))
    if name:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, 1)
            raise UnknownNameError(
                f"{path} has no entry point {name}",
                expected=", ".join(entries) or "a function under @ts.jit or @ts.kernel",
                suggestion=f"did you mean {path}:{close[0]}?" if close else None,
            )
        return entries[name]
    return _require_single(entries, path)


ENTRY_DECORATORS = ("jit", "compile", "kernel", "example", "function")


def is_program(text: str) -> bool:
    """Whether this names a Python file that decorates no entry point and has an `if __name__ == "__main__"`."""
    if not text.endswith(".py") or not Path(text).is_file():
        return False
    try:
        tree = ast.parse(Path(text).read_bytes())
    except (SyntaxError, ValueError):
        return False  # refused where it is imported
    names = {ast.unparse(t) for n in tree.body if isinstance(n, ast.If) for t in [n.test]}
    if not names & {"__name__ == '__main__'", "'__main__' == __name__"}:
        return False
    decorators = [d for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for d in n.decorator_list]
    used = {part for d in decorators for part in re.split(r"\W+", ast.unparse(d).split("(")[0])}
    called = {ast.unparse(n.func).rpartition(".")[2] for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return not (used | called) & set(ENTRY_DECORATORS)


def _require_single(entries: dict[str, EntryPoint], path: str) -> EntryPoint:
    examples = [e for e in entries.values() if e.example] or list(entries.values())
    chosen = [e for e in examples if e.example and e.example.marked] or examples
    if len(chosen) == 1:
        return chosen[0]
    raise UnknownNameError(
        f"{path} has {len(chosen) or 'no'} entry points" + (", and none is marked" if chosen else ""),
        expected=", ".join(e.name for e in chosen) or "a function under @ts.jit or @ts.kernel with @ts.example",
        suggestion=f"name one: {path}:{chosen[0].name}" if chosen else None,
    )


def load_module(path: str) -> ModuleType:
    """Import the Python file at a path; of a folder its model.py.

    Raises:
        FileError: it is missing, is not Python, or ends the process.
    """
    file = _resolve_file(Path(path))
    name = f"tessera_entry_{file.stem}"
    return _import_with(SourceFileLoader(name, str(file.absolute())), file, path)


def load_definitions(path: str, wanted: str = "") -> tuple[ModuleType, list[str]]:
    """Import what a Python file defines, and `wanted`, and skip what else it does: the module, and notes on both.

    A file with an `if __name__ == "__main__"` is imported as it is.

    Raises:
        FileError: as load_module.
    """
    file = _resolve_file(Path(path))
    name = f"tessera_entry_{file.stem}"
    loader = _DefinitionLoader(name, str(file.absolute()), wanted)
    module = _import_with(loader, file, path)
    notes = [f"imported for the check: {', '.join(loader.imported)}"] if loader.imported else []
    if loader.skipped:
        listed = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in loader.skipped)
        notes.append(f"not run: line{'s' * (listed != str(loader.skipped[0][0]))} {listed} of {file.name}, "
                     "which define nothing that its functions use")  # fmt: skip
    return module, notes


class _DefinitionLoader(SourceFileLoader):
    """Imports a file's definitions without its other statements."""

    def __init__(self, name: str, path: str, wanted: str) -> None:
        super().__init__(name, path)
        self.wanted = wanted
        self.imported: list[str] = []
        self.skipped: list[tuple[int, int]] = []

    def get_code(self, fullname: str) -> CodeType:
        """The code of the definitions; the cache of the whole file's is not used."""
        tree = ast.parse(self.get_data(self.path), self.path)
        self.imported = sorted(_imported_packages(tree) - {"tessera", "__future__"} - sys.stdlib_module_names)
        kept = tree.body if any(map(_is_main_guard, tree.body)) else select_definitions(tree.body, self.wanted)
        self.skipped = [(s.lineno, s.end_lineno or s.lineno) for s in tree.body if s not in kept]
        tree.body = kept
        return compile(tree, self.path, "exec", dont_inherit=True)


def _imported_packages(tree: ast.Module) -> set[str]:
    """The packages that the top level of a file imports."""
    imports = [n for s in tree.body if not _is_definition(s) or isinstance(s, IMPORTS) for n in ast.walk(s)]
    names = [a.name for n in imports if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in imports if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - {""}


IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (*IMPORTS, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DECORATORS = {"jit", "compile", "kernel", "with_schedule", "autotune"}  # what they are called on becomes a program


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in _loaded_names(statement.test)


def _is_definition(statement: ast.stmt) -> bool:
    return isinstance(statement, DEFINITIONS)


def select_definitions(body: list[ast.stmt], wanted: str = "") -> list[ast.stmt]:
    """The statements that define something: imports, functions, classes, and assignments that these use.

    Assignments without a call are kept too, as are changes of sys.path, on which imports depend.
    """
    kept = {s for s in body if _is_definition(s) or _is_harmless(s)}
    needed = {wanted}.union(*map(_loaded_names, kept))
    imported = set().union(*(_bound_names(s) for s in body if isinstance(s, IMPORTS)))
    while more := {s for s in body if s not in kept and (_bound_names(s) | _filled_names(s) - imported) & needed}:
        kept |= more
        needed = needed.union(*map(_loaded_names, more))
    return [s for s in body if s in kept]


def _is_harmless(statement: ast.stmt) -> bool:
    """Whether a statement runs no user code, makes a program, or changes where imports are looked up."""
    if isinstance(statement, (ast.If, ast.Try)):
        inner = [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
        inner += [s for h in getattr(statement, "handlers", ()) for s in h.body]
        return all(_is_definition(s) or isinstance(s, ast.Pass) or _is_harmless(s) for s in inner)
    calls = [n.func for n in ast.walk(statement) if isinstance(n, ast.Call)]
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return all(ast.unparse(c).rpartition(".")[2] in DECORATORS for c in calls)
    return isinstance(statement, ast.Expr) and all(ast.unparse(c).startswith("sys.path.") for c in calls)


def _loaded_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


# Methods by which a statement at the top of a file fills a container.
FILLING_METHODS = {"append", "extend", "insert", "update", "setdefault", "add"}


def _bound_names(node: ast.AST) -> set[str]:
    """The names that a statement binds, those of definitions and imports inside it too."""
    inner = list(ast.walk(node))
    names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in inner if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return names | {(a.asname or a.name).partition(".")[0] for n in inner if isinstance(n, IMPORTS) for a in n.names}


def _filled_names(node: ast.AST) -> set[str]:
    """The variables whose containers a statement fills."""
    return {_root_name(n) for n in ast.walk(node) if isinstance(n, (ast.Subscript, ast.Attribute)) and _fills(n)}


def _fills(node: ast.Subscript | ast.Attribute) -> bool:
    method = isinstance(node, ast.Attribute) and node.attr in FILLING_METHODS
    return method or isinstance(node.ctx, ast.Store)


def _root_name(node: ast.expr) -> str:
    """The variable under subscripts and attributes."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _import_with(loader: SourceFileLoader, file: Path, path: str) -> ModuleType:
    """Import a file with its loader; `path` is the user's name for it."""
    name = loader.name
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    for folder in (Path.cwd(), _import_root(file), file.resolve().parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        loader.exec_module(module)
    except SyntaxError as error:
        raise syntax_error(error, path) from None
    except SystemExit as error:
        raise FileError(
            f"{path} ended the process while it was imported", received=f"SystemExit({error.code!r})",
            suggestion='put what a program does under: if __name__ == "__main__"',
        ) from None  # fmt: skip
    return module


def _import_root(file: Path) -> Path:
    """The import root of a file: the folder of its outermost package."""
    folder = file.resolve().parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _resolve_file(path: Path) -> Path:
    """Resolve a path to the file to import."""
    if path.is_dir() and (path / "model.py").is_file():
        return path / "model.py"
    if path.is_file():
        if b"\0" in path.read_bytes():
            raise FileError(f"{path} is not Python: it is no text", expected="file.py")
        return path
    expected = "file.py, file.py:name, or a folder with a model.py"
    if (path / "manifest.json").is_file():
        raise FileError(f"{path} is an artifact, which holds no source", expected=expected,
                        suggestion=f"tessera run {path}")  # fmt: skip
    what = f"{path} is a folder without a model.py" if path.is_dir() else f"there is no file {path}"
    raise FileError(what, expected=f"{expected}, or for `tessera run` an artifact", suggestion="check the path")


def _entry_points_of(module: ModuleType) -> dict[str, EntryPoint]:
    found = {}
    for name, value in vars(module).items():
        example = getattr(value, "example", None)
        own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, (Kernel, Jit)) and (own or (example and example.module == module.__name__)):
            found[name] = EntryPoint(name, value, example)
    return found


def make_inputs(entry: EntryPoint, seed: int, files: Sequence[str] = ()) -> Any:
    """Make the arguments of an entry: its example's, with the first ones replaced by the files."""
    if entry.parameters is not None and files and len(files) == len(entry.parameters):
        return {n: read_array(f, t) for f, (n, t) in zip(files, entry.parameters.items(), strict=True)}
    arguments = _make_example_inputs(entry, seed, needed=not files)
    if not files:
        return arguments
    keys = list(arguments) if isinstance(arguments, dict) else list(range(len(arguments) or len(files)))
    if len(files) > len(keys):
        raise ArgumentError(f"{len(files)} inputs were given, {entry.name} takes {len(keys)}", location=entry.location)
    given = dict(arguments) if isinstance(arguments, dict) else dict(enumerate(arguments))
    for key, file in zip(keys, files, strict=False):
        before = given.get(key)
        dtype = before.dtype if isinstance(before, (np.ndarray, Tensor)) else None
        given[key] = read_array(file, dtype)
    return given if isinstance(arguments, dict) else tuple(given[k] for k in keys)


def _make_example_inputs(entry: EntryPoint, seed: int, needed: bool) -> Any:
    """Make the example's arguments: a dict, or a tuple (empty where there is no example)."""
    if entry.example is None and needed:
        raise ArgumentError(
            f"{entry.name} has no example inputs", location=entry.location,
            suggestion="add @ts.example(...); `tessera run` also takes --input X.npy for each",
        )  # fmt: skip
    if entry.example is None:
        return ()
    arguments = entry.example.inputs(np.random.default_rng(seed))
    if not isinstance(arguments, (tuple, list, Mapping)):
        raise ArgumentError(
            f"the example of {entry.name} makes no arguments", location=entry.location,
            expected="inputs(rng) gives a tuple, or a dict by name", received=type(arguments).__name__,
            suggestion="one argument stands in a tuple too: (x,)",
        )  # fmt: skip
    return dict(arguments) if isinstance(arguments, Mapping) else tuple(arguments)


def prepare_program(
    entry: EntryPoint, arguments: Any, target: str, tune: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}), lower: bool = True, dynamic: Any = None,
    variant: SizeVariant | None = None,
) -> PreparedProgram:  # fmt: skip
    """Prepare an entry with these arguments to run at any level; errors without a location get the entry's."""
    example = entry.example or Example(lambda rng: ())
    if target != INTERP:
        get_backend(target)  # an unknown one is an error of the command line, not of the entry
    try:
        launch = example.grid, example.group
        return prepare(entry.function, arguments, target, *launch, tune, options, lower, dynamic, variant)
    except TesseraError as error:
        error.at(entry.location)
        raise


def parse_dynamic(texts: Sequence[str]) -> Any:
    """The symbolic sizes of `--dynamic`: None without it, True for the bare option, or what `x:0=B` names.

    Raises:
        ArgumentError: a text has another form.
    """
    if not texts:
        return None
    if all(text == "" for text in texts):
        return True
    found: dict[str, dict[int, str]] = {}
    for text in texts:
        match = re.fullmatch(r"(?P<name>[^:=]+):(?P<axis>-?\d+)=(?P<size>.+)", text)
        if match is None:
            raise ArgumentError("--dynamic names no axis", expected="NAME:AXIS=SIZE, as in x:0=B", received=text)
        found.setdefault(match["name"], {})[int(match["axis"])] = match["size"]
    return found


def describe_configuration(entry: EntryPoint, program: PreparedProgram) -> str:
    """Describe the configuration of an autotuned kernel and how it was found; "" for any other entry."""
    if program.tuned is not None:
        return format_tuning(program.tuned)
    options = entry.function.options if isinstance(entry.function, Kernel) else None
    if options is None or options.tuning is None:
        return ""
    first = ", ".join(f"{k}={v!r}" for k, v in options.tuning.configs[0].items())
    return f"{first} (the first of {len(options.tuning.configs)}, not tuned)"
