"""Compilation unit: the modules, globals, constants, functions and comptime tables of a PE program or a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import evaluate_type
from tessera.interp.target.csl.sema.coercion import coerce, make_zero
from tessera.interp.target.csl.sema.context import (
    SEMANTIC_RULES,
    AnalysisContext,
    ExprValue,
    LValue,
    make_from_value,
    make_known,
    make_runtime,
)
from tessera.interp.target.csl.sema.functions import (
    FunctionInstance,
    FunctionValue,
    compile_instance,
    compute_signature,
)
from tessera.interp.target.csl.sema.values import (
    ColorConfig,
    ComptimeValue,
    GlobalVariable,
    NativeFunction,
    Pointer,
    make_hashable,
)
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import CslError, fail, name_argument_errors
from tessera.interp.target.csl.text.parser import parse_file

# The libraries written in Python, as modules.


LibraryFactory = Callable[["CompilationUnit", dict[str, ComptimeValue]], dict[str, ComptimeValue]]
# The libraries written in Python, by the name in angle brackets.
LIBRARIES: dict[str, LibraryFactory] = {}


def register_library(name: str) -> Callable[[LibraryFactory], LibraryFactory]:
    """Register a library: `factory(unit, params)` returns the members of the module."""

    def add(factory: LibraryFactory) -> LibraryFactory:
        LIBRARIES[name] = factory
        return factory

    return add


class NativeModule:
    """A library module."""

    def __init__(self, title: str, members: dict[str, ComptimeValue]) -> None:
        self.title, self.members = title, members

    def lookup(self, name: str, loc: Location) -> ExprValue | None:
        """The operand of a member, or None."""
        found = self.members.get(name)
        if found is None:
            return None
        return make_variable(found.data) if isinstance(found.data, GlobalVariable) else ExprValue(*found, loc=loc)


def make_variable(made: GlobalVariable) -> ExprValue:
    """The operand of a global variable's name."""

    def take() -> Pointer:
        made.addressed = True
        return Pointer(made, 0)

    n, type_ = made.number, made.type
    if type_.aggregate:
        return ExprValue(type_, code=f"G{n}", place=LValue(True, f"G{n}", take=take), loc=made.loc)
    return ExprValue(type_, code=f"R{n}_", place=LValue(True, f"G{n}", store=f"W{n}_", take=take), loc=made.loc)


# The options of a compilation, and the tables that comptime blocks fill.


PE_MEMORY = 48 * 1024
# The versions of the SDK whose language is accepted; the newest of the last major version is the default.
LANGUAGE_VERSIONS = ("0.6", "0.7", "0.8", "0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "2.10")


@dataclass(frozen=True)
class CslOptions:
    """Compiler options: architecture, language version, fabric, search path."""

    arch: str = "wse2"
    sdk: str = "1.4"
    fabric_dims: tuple[int, int] | None = None
    fabric_offsets: tuple[int, int] | None = None
    import_paths: tuple[str, ...] = ()
    fp16_format: str = "f16"
    max_inlined_iterations: int = 50
    confined_to: Path | None = None  # the folder that may be read besides the libraries; None: every file

    @property
    def early(self) -> bool:
        """Whether the language is that of an SDK before 1.0, in which colors are the ids of tasks."""
        return self.sdk.startswith("0.")

    @property
    def late(self) -> bool:
        """Whether the language is that of SDK 2."""
        return self.sdk.startswith("2.")


MAX_COMPTIME_ITERATIONS = 1 << 22  # of all loops of a unit: a loop without an end is an error within half a minute


@dataclass
class BoundTask:
    """A function bound to a task id."""

    number: int
    kind: str
    name: str
    params: tuple[t.CslType, ...]
    title: str
    loc: Location
    value: FunctionValue


@dataclass
class ComptimeTables:
    """The configuration that comptime blocks set up on a PE."""

    tasks: dict[tuple[str, int], BoundTask] = field(default_factory=dict)
    queues_in: dict[int, int] = field(default_factory=dict)
    queues_out: dict[int, int] = field(default_factory=dict)
    exports: dict[str, tuple[ExprValue, Location]] = field(default_factory=dict)
    colors: dict[int, ColorConfig] = field(default_factory=dict)
    fifos: list[tuple[int, int | None, int | None]] = field(default_factory=list)
    activated: list[int] = field(default_factory=list)
    preloads: list[tuple[str, Location]] = field(default_factory=list)  # code that loads DSRs before a run
    blocked: set[int] = field(default_factory=set)
    blocked_colors: set[int] = field(default_factory=set)
    teardown: dict[int, str] = field(default_factory=dict)
    filters: dict[int, Location] = field(default_factory=dict)  # colors whose filters the program addresses by number
    emptied: dict[tuple[str, int], str] = field(default_factory=dict)  # handlers by side ("in", "out") and queue


# A module: one CSL file with values for its params. Names are resolved on first use.


_UNINITIALISED = "only 'var' and 'extern const' variables may be uninitialized"


class CslModule:
    """One import of a file. Each import is a separate copy with its own variables."""

    def __init__(self, unit: CompilationUnit, file: s.SourceFile, params: dict[str, ComptimeValue]) -> None:
        self.unit, self.file, self.params = unit, file, params
        self.loc = Location(file.path, 1, 1)
        self.title = file.path.rsplit("/", 1)[-1]
        self.items: dict[str, s.VariableDecl | s.FunctionDecl] = {}
        self.symbols: dict[str, ExprValue] = {}
        self._resolving: set[str] = set()
        self._params_read: set[str] = set()
        self._compared: dict[str, Any] = {}  # the hashable forms of params, which those of each PE are compared with
        for item in file.items:
            if isinstance(item, (s.VariableDecl, s.FunctionDecl)):
                self._add(item)

    def _add(self, item: s.VariableDecl | s.FunctionDecl) -> None:
        if item.name in self.items:
            fail(item.loc, f"redeclaration of '{item.name}'")
        if item.name in t.NAMED:
            fail(item.loc, f"declaration of '{item.name}' shadows builtin type")
        if self.unit.options.late and t.parse_integer_type(item.name):
            fail(item.loc, f"declaration of '{item.name}' shadows builtin type")
        self.items[item.name] = item

    def lookup(self, name: str, loc: Location) -> ExprValue | None:
        """The operand of a top-level name, or None."""
        if name in self.symbols:
            return self.symbols[name]
        item = self.items.get(name)
        if item is None:
            return None
        if name in self._resolving:
            fail(loc, f"dependency loop: the value of '{name}' depends on itself")
        self._resolving.add(name)
        try:
            found = self.unit.find_exported(item) if "extern" in item.flags else None
            if found is None:
                found = self._function(item) if isinstance(item, s.FunctionDecl) else self._variable(item)
        finally:
            self._resolving.discard(name)
        self.symbols[name] = found
        return found

    def is_alike(self, params: dict[str, ComptimeValue]) -> bool:
        """Whether the file with these params would be compiled as it was: they differ at most where none was read."""
        mine = self.params
        read = self._params_read & mine.keys()
        if params.keys() != mine.keys():
            return False
        for name in read - self._compared.keys():
            self._compared[name] = make_hashable(mine[name])
        return all(params[n] is mine[n] or make_hashable(params[n]) == self._compared[n] for n in read)

    def _function(self, item: s.FunctionDecl) -> ExprValue:
        value = FunctionValue(self, item)
        return make_known(compute_signature(value), value, item.loc)

    def frame(self) -> AnalysisContext:
        """An analysis context for comptime evaluation in this module."""
        return AnalysisContext(self.unit, self, True)

    def _variable(self, item: s.VariableDecl) -> ExprValue:
        f = self.frame()
        type_ = evaluate_type(f, item.type) if item.type is not None else None
        if item.kind == "var":
            return self._global(f, item, type_)
        value = self._initial(f, item)
        if type_ is not None:
            value = coerce(f, value, type_, item.value.loc if item.value else item.loc)
        return self.constant(value, item)

    def _initial(self, f: AnalysisContext, item: s.VariableDecl) -> ExprValue:
        if item.kind == "param":
            self._params_read.add(item.name)
        if item.kind == "param" and item.name in self.params:
            return make_from_value(self.params[item.name], item.loc)
        if item.value is None:
            fail(
                item.loc,
                _UNINITIALISED,
                suggestion=f"set param '{item.name}' where the file is imported or set as tile code",
            )
        return f.evaluate(item.value)

    def constant(self, value: ExprValue, item: s.VariableDecl) -> ExprValue:
        """A constant, which gets memory when its address is first taken."""
        if value.fields is not None:
            return value
        if value.type.comptime_only or value.type is t.VOID or isinstance(value.type, t.CslFunctionType):
            return ExprValue(value.type, value.const, loc=item.loc)
        allocated: list[GlobalVariable] = []

        def take() -> Pointer:
            if not allocated:
                allocated.append(self.unit.add_global(item.name, value.type, value.const, False, item.loc))
                allocated[0].addressed = True
            return Pointer(allocated[0], 0)

        return ExprValue(value.type, value.const, place=LValue(False, take=take), loc=item.loc)

    def _global(self, f: AnalysisContext, item: s.VariableDecl, type_: t.CslType | None) -> ExprValue:
        if item.value is not None:
            value = f.evaluate(item.value)
            value = coerce(f, value, type_, item.value.loc) if type_ is not None else value
        elif type_ is None:
            fail(item.loc, _UNINITIALISED)
        else:
            value = make_known(type_, make_zero(type_), item.loc)
        return self.unit.declare_variable(item.name, value, item.loc)

    def evaluate(self) -> None:
        """Evaluate the imports of the file, then its comptime blocks, and in the root file its layout block."""
        for item in self.file.items:
            if isinstance(item, s.VariableDecl) and isinstance(item.value, s.BuiltinCall) and _is_import(item.value):
                self.lookup(item.name, item.loc)
        kinds = ("comptime", "layout") if self.unit.is_layout and self is self.unit.root else ("comptime",)
        for item in self.file.items:
            if isinstance(item, s.TopLevelBlock) and item.kind in kinds:
                self._block(item)
        for item in self.file.items:
            if isinstance(item, s.VariableDecl) and "export" in item.flags:
                self.unit.export_variable(self, item)
            elif isinstance(item, s.FunctionDecl) and "export" in item.flags:
                self.unit.export_function(self, item)

    def _block(self, item: s.TopLevelBlock) -> None:
        f = self.frame()
        f.section = item.kind
        self.unit.in_block = item.kind == "comptime"
        f.run(item.body)
        self.unit.in_block = False


def _is_import(node: s.BuiltinCall) -> bool:
    return node.name == "@import_module"


# A compilation: the modules, globals, constants and functions of a PE program or of a layout.


LIBRARY_FOLDER = Path(__file__).parent.parent / "library"  # libraries written in CSL


class CompilationUnit:
    """One compilation. `layout` is the builder of a layout, or None for a PE program."""

    def __init__(self, options: CslOptions, rectangle: tuple[int, int] = (0, 0), layout: Any = None) -> None:
        self.options, self.rectangle, self.layout = options, rectangle, layout
        self.globals: list[GlobalVariable] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._count = 0
        self.instances: dict[Any, FunctionInstance] = {}
        self.constant_calls: dict[str, int] = {}  # the code of calls that return a constant, which are inlined
        self.tables = ComptimeTables()
        self.references: dict[int, FunctionValue] = {}
        self.pending: list[CslModule] = []
        self.modules: list[CslModule] = []
        self.depth = 0
        self.evaluated: set[int] = set()
        self.in_block = False
        self.comptime_iterations = 0
        self.root: CslModule | None = None
        self.state: dict[str, Any] = {}
        self.place: tuple[int, int] | None = None
        self.uses_coordinates = False
        self.sources: list[str] = []
        self._found: dict[tuple[str, str], Path | None] = {}  # the files of imports, by the importing file and name
        self.symbols: tuple[str, ...] = ()  # exported names of the layout, by number
        self.tensors: tuple[str, ...] = ()  # exported pointers
        self._keywords: set[str] = set()

    def get_coordinate(self, axis: int) -> int:
        """A PE coordinate at compile time. A program that reads it is not shared between PEs."""
        if self.place is None or not self.in_block:
            raise CslError(
                "comptime evaluation of PE coordinates is only valid while evaluating a top level comptime block"
            )
        self.uses_coordinates = True
        return self.place[axis]

    def serves(self, params: dict[str, ComptimeValue]) -> bool:
        """Whether the program serves another PE with these params, too."""
        return not self.uses_coordinates and self.root is not None and self.root.is_alike(params)

    def exported_by_keyword(self, name: str) -> bool:
        """Whether `export` precedes the declaration of a name."""
        return name in self._keywords

    def read(self, path: Path) -> s.SourceFile:
        """The syntax tree of a file of this compilation."""
        self.sources.append(str(path))
        return parse_file(path)

    @property
    def is_layout(self) -> bool:
        """Whether this is the compilation of a layout."""
        return self.layout is not None

    def start(self, path: Path, params: dict[str, ComptimeValue]) -> CslModule:
        """Compile the file at `path` as the root."""
        self.root = CslModule(self, self.read(path), params)
        self.modules.append(self.root)
        self.pending.append(self.root)
        while self.pending:
            self.pending.pop(0).evaluate()
        if not self.is_layout:
            for variable in self.globals:  # the list grows while functions that values refer to are compiled
                self.resolve(variable.initial)
            self._check_unused(self.root)
        return self.root

    def _check_unused(self, module: CslModule) -> None:
        """Check the functions of a PE program that nothing calls; what they need on the PE is discarded."""
        saved = len(self.globals), dict(self.instances), list(self.tables.fifos)
        constants, names, references = dict(self.constants), dict(self._names), dict(self.references)
        used = {id(i.value.decl) for i in self.instances.values()} | self.evaluated
        for item in module.items.values():
            if isinstance(item, s.FunctionDecl) and id(item) not in used and item.body is not None:
                operand = module.lookup(item.name, item.loc)
                assert operand is not None
                if not operand.const.generic and not compute_signature(operand.const).result.comptime_only:
                    self.compile_function(operand.const)
        del self.globals[saved[0] :]
        self.instances, self.tables.fifos = saved[1], saved[2]
        self.constants, self._names, self.references = constants, names, references

    def make_name(self, name: str) -> str:
        """A unique Python name."""
        self._count += 1
        return f"{name}_{self._count}"

    def add_global(self, name: str, type_: t.CslType, initial: Any, mutable: bool, loc: Location) -> GlobalVariable:
        """Allocate memory on the PE."""
        variable = GlobalVariable(len(self.globals), name, type_, initial, mutable, loc)
        self.globals.append(variable)
        return variable

    def add_variable(self, name: str, type_: t.CslType, initial: Any) -> ComptimeValue:
        """A variable of a library written in Python; `get_memory` returns its array on a PE."""
        variable = self.add_global(name, type_, initial, True, UNKNOWN)
        variable.addressed = True
        return ComptimeValue(type_, variable)

    def set_color(self, color: int, config: ColorConfig) -> None:
        """`@set_local_color_config` for a library written in Python."""
        self.tables.colors[color] = config

    def declare_variable(self, name: str, value: ExprValue, loc: Location) -> ExprValue:
        """A top-level `var`."""
        type_ = value.type
        if type_.comptime_only or type_ is t.VOID:
            fail(loc, f"variable of type '{type_}' must be const or comptime")
        initial = value.const.copy() if isinstance(value.const, np.ndarray) else value.const
        return make_variable(self.add_global(name, type_, initial, True, loc))

    def materialise(self, o: ExprValue, loc: Location) -> ExprValue:
        """Place a known value in memory, so that it can be indexed or pointed to at run time."""
        place = o.place
        where = place.take() if place is not None and place.take is not None else None
        if where is not None and isinstance(where.array, GlobalVariable):
            variable, index = where.array, where.index
        else:
            variable, index = self.add_global("constant", o.type, o.const, False, loc), 0
        variable.addressed = True
        place = LValue(variable.mutable, f"G{variable.number}", str(index), take=lambda: Pointer(variable, index))
        return make_runtime(o.type, f"G{variable.number}", loc, place)

    def add_constant(self, data: Any) -> str:
        """The name of an object in generated code."""
        if isinstance(data, GlobalVariable):
            data.addressed = True
            return f"G{data.number}"
        key = (type(data), data.tobytes()) if isinstance(data, np.generic) else (id(data), type(data))
        if key not in self._names:
            name = self._names[key] = f"k{len(self._names)}"
            self.constants[name] = data
        return self._names[key]

    def render_constant(self, o: ExprValue) -> str:
        """The code of a known value that has no literal."""
        if isinstance(o.const, FunctionValue):
            return self.compile_function(o.const).name
        if isinstance(o.const, NativeFunction):
            return self.bind_native(o.const)
        if isinstance(o.const, np.ndarray) and o.place is not None and o.place.take is not None:
            where = o.place.take()
            if isinstance(where.array, GlobalVariable) and where.index == 0:
                return self.add_constant(where.array)
        self.resolve(o.const)
        return self.add_constant(o.const)

    def resolve(self, data: Any) -> None:
        """Compile the functions that a value refers to."""
        if isinstance(data, FunctionValue):
            self.compile_function(data)
        elif isinstance(data, np.ndarray) and data.dtype == object:
            for item in data:
                self.resolve(item)

    def render_task_reference(self, value: FunctionValue) -> str:
        """The code of a task's id; the task may be bound later."""
        self.references.setdefault(id(value), value)
        return f"task_id({id(value)})"

    def bind_native(self, target: NativeFunction) -> str:
        """The name of a library function bound to the PE."""
        return self.add_constant(target)

    def compile_function(self, value: FunctionValue) -> FunctionInstance:
        """The compiled form of a function that is used as a value."""
        if value.generic:
            fail(value.decl.loc, "a generic function cannot be used as a value")
        frame = value.module.frame()
        args = tuple(make_runtime(_evaluate_type_expr(frame, p.type), "_") for p in value.decl.params)
        return self.specialise(value, args, _evaluate_type_expr(frame, value.decl.result))

    def specialise(self, value: FunctionValue, args: tuple[ExprValue, ...], result: t.CslType) -> FunctionInstance:
        """One specialisation of a function, compiled on first use."""
        versions = tuple(
            (o.type, make_hashable(o.const) if p.comptime else None)
            for p, o in zip(value.decl.params, args, strict=True)
        )
        key = (id(value.decl), id(value.module), versions)
        instance = self.instances.get(key)
        if instance is None:
            name = self.make_name(f"f_{value.decl.name}")
            instance = FunctionInstance(name, value, tuple(o.type for o in args), result)
            self.instances[key] = instance
            compile_instance(self, instance, args)
        elif not instance.done:
            # A recursive function is compiled as a generator, because it is not yet known whether it waits.
            instance.waits = True
        return instance

    def import_module(self, importer: CslModule, name: str, params: dict[str, ComptimeValue], loc: Location) -> Any:
        """Import a module from a library, the importer's folder or the search path."""
        factory = LIBRARIES.get(name)
        if factory is not None:
            received = ", ".join(f".{field} = '{value.type}'" for field, value in params.items())
            with name_argument_errors(name, loc, received):
                return NativeModule(name, factory(self, params))
        path = self.find(importer, name)
        if path is None:
            fail(loc, f"unable to find module '{name}'")
        module = CslModule(self, self.read(path), params)
        self.modules.append(module)
        self.pending.append(module)
        return module

    def find_exported(self, item: s.VariableDecl | s.FunctionDecl) -> ExprValue | None:
        """The variable or function that another module of the program exports under the name of an `extern` one."""
        for module in self.modules:
            other = module.items.get(item.name)
            if other is not None and other is not item and "export" in other.flags:
                return module.lookup(item.name, item.loc)
        return None

    def count_comptime_iteration(self, loc: Location) -> None:
        """Count one iteration of a loop at comptime; more than the limit is an error."""
        self.comptime_iterations += 1
        if self.comptime_iterations > MAX_COMPTIME_ITERATIONS:
            fail(loc, f"the loops at comptime exceed {MAX_COMPTIME_ITERATIONS:,} iterations")

    def find(self, importer: CslModule, name: str) -> Path | None:
        """The file that an import names."""
        key = importer.file.path, name
        if key not in self._found:
            self._found[key] = self._search(importer, name)
        return self._found[key]

    def _search(self, importer: CslModule, name: str) -> Path | None:
        """The first file of an import's name in the folders that are searched."""
        beside = Path(importer.file.path).parent
        bare, library = name.strip("<>"), name.startswith("<")
        folders: Sequence[Path] = [beside, *(Path(p) for p in self.options.import_paths)]
        folders = [LIBRARY_FOLDER, *folders] if library else folders
        names = (bare, f"{bare}.csl") if library else (bare,)
        return next((f / n for f in folders for n in names if (f / n).is_file() and self._may_read(f / n)), None)

    def _may_read(self, path: Path) -> bool:
        """Whether a file may be read: a confined program sees its own folder and the libraries alone."""
        root = self.options.confined_to
        return root is None or any(path.resolve().is_relative_to(f.resolve()) for f in (root, LIBRARY_FOLDER))

    def export_variable(self, module: CslModule, item: s.VariableDecl) -> None:
        """`export var`: the variable is visible to the host under its own name."""
        operand = module.lookup(item.name, item.loc)
        assert operand is not None and operand.place is not None and operand.place.take is not None
        self._keywords.add(item.name)
        if item.name in self.tables.exports:  # `@export_symbol` names it, too
            return
        element = operand.type.element if isinstance(operand.type, t.CslArray) else operand.type
        self.tables.exports[item.name] = (
            ExprValue(t.CslPointer("", element, operand.place.mutable is False, True), operand.place.take()),
            item.loc,
        )

    def export_function(self, module: CslModule, item: s.FunctionDecl) -> None:
        """`export fn`: the host can call the function under its own name."""
        operand = module.lookup(item.name, item.loc)
        assert operand is not None
        self._keywords.add(item.name)
        if item.name in self.tables.exports:
            return
        self.compile_function(operand.const)
        self.tables.exports[item.name] = (operand, item.loc)

    @property
    def memory_used(self) -> int:
        """The size of the PE's data in bytes."""
        return sum(g.type.size + g.type.size % 2 for g in self.globals)


def _evaluate_type_expr(frame: Any, node: s.SyntaxNode) -> t.CslType:
    return SEMANTIC_RULES[type(node)](frame, node).const
