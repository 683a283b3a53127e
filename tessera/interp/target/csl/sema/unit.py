"""One compilation: the modules, globals, constants and functions of a PE program or of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import UNKNOWN, Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError, fail, located
from tessera.interp.target.csl.parser import parse_file
from tessera.interp.target.csl.sema.frame import MEANING
from tessera.interp.target.csl.sema.functions import FunctionValue, Instance, compile_instance, signature
from tessera.interp.target.csl.sema.module import Module
from tessera.interp.target.csl.sema.operand import Operand, Place, runtime
from tessera.interp.target.csl.sema.registry import LIBRARIES, NativeModule, variable_operand
from tessera.interp.target.csl.sema.tables import Options, Tables
from tessera.interp.target.csl.values import ColorConfig, Global, NativeFunction, Pointer, Value, frozen

LIBRARY = Path(__file__).parent.parent / "library"  # the libraries that are written in CSL
_files: dict[tuple[str, int], s.File] = {}


def load(path: Path) -> s.File:
    """The syntax tree of a file, read once for each change of it."""
    key = (str(path), path.stat().st_mtime_ns)
    if key not in _files:
        _files[key] = parse_file(path)
    return _files[key]


class Unit:
    """One compilation. `layout` is the builder of a layout, or None for the program of a PE."""

    def __init__(self, options: Options, rectangle: tuple[int, int] = (0, 0), layout: Any = None) -> None:
        self.options, self.rectangle, self.layout = options, rectangle, layout
        self.globals: list[Global] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._count = 0
        self.instances: dict[Any, Instance] = {}
        self.tables = Tables()
        self.references: dict[int, FunctionValue] = {}
        self.pending: list[Module] = []
        self.depth = 0
        self.evaluated: set[int] = set()
        self.in_block = False
        self.root: Module | None = None
        self.state: dict[str, Any] = {}
        self.place: tuple[int, int] | None = None
        self.placed = False
        self.sources: list[str] = []
        self.symbols: tuple[str, ...] = ()  # what the layout exports, by number
        self.tensors: tuple[str, ...] = ()  # those of them that are pointers
        self._keywords: set[str] = set()

    def coordinate(self, axis: int) -> int:
        """A coordinate of the PE at compile time; its program is then not shared with other PEs."""
        if self.place is None or not self.in_block:
            raise CslError(
                "comptime evaluation of PE coordinates is only valid while evaluating a top level comptime block"
            )
        self.placed = True
        return self.place[axis]

    def exported_by_keyword(self, name: str) -> bool:
        """Whether `export` stands before the declaration of a name."""
        return name in self._keywords

    def read(self, path: Path) -> s.File:
        """The syntax tree of a file of this compilation."""
        self.sources.append(str(path))
        return load(path)

    @property
    def is_layout(self) -> bool:
        """Whether this is the compilation of a layout."""
        return self.layout is not None

    def start(self, path: Path, params: dict[str, Value]) -> Module:
        """Compile the file at `path` as the root."""
        self.root = Module(self, self.read(path), params)
        self.pending.append(self.root)
        while self.pending:
            self.pending.pop(0).evaluate()
        if not self.is_layout:
            self._check_unused(self.root)
        return self.root

    def _check_unused(self, module: Module) -> None:
        """Refuse wrong functions of a PE program that nothing calls; what they would need on the PE is not kept."""
        kept = len(self.globals), dict(self.instances), list(self.tables.fifos)
        used = {id(i.value.decl) for i in self.instances.values()} | self.evaluated
        for item in module.items.values():
            if isinstance(item, s.Function) and id(item) not in used and item.body is not None:
                found = module.lookup(item.name, item.loc)
                assert found is not None
                if not found.const.generic and not signature(found.const).result.comptime_only:
                    self.function(found.const)
        del self.globals[kept[0] :]
        self.instances, self.tables.fifos = kept[1], kept[2]

    def fresh(self, name: str) -> str:
        """A Python name that nothing else has."""
        self._count += 1
        return f"{name}_{self._count}"

    def add_global(self, name: str, type_: t.Type, initial: Any, mutable: bool, loc: Location) -> Global:
        """Reserve memory on the PE."""
        found = Global(len(self.globals), name, type_, initial, mutable, loc)
        self.globals.append(found)
        return found

    def variable(self, name: str, type_: t.Type, initial: Any) -> Value:
        """A variable of a library written in Python; `pe.memory` of the value is its array on a PE."""
        made = self.add_global(name, type_, initial, True, UNKNOWN)
        made.addressed = True
        return Value(type_, made)

    def set_color(self, color: int, config: ColorConfig) -> None:
        """`@set_local_color_config` for a library written in Python."""
        self.tables.colors[color] = config

    def declared(self, name: str, value: Operand, loc: Location) -> Operand:
        """A `var` at the top level."""
        type_ = value.type
        if type_.comptime_only or type_ is t.VOID:
            fail(loc, f"variable of type '{type_}' must be const or comptime")
        initial = value.const.copy() if isinstance(value.const, np.ndarray) else value.const
        return variable_operand(self.add_global(name, type_, initial, True, loc))

    def materialised(self, o: Operand, loc: Location) -> Operand:
        """A known value in memory, so that it can be indexed or pointed to at run time."""
        place = o.place
        where = place.take() if place is not None and place.take is not None else None
        if where is not None and isinstance(where.array, Global):
            made, index = where.array, where.index
        else:
            made, index = self.add_global("constant", o.type, o.const, False, loc), 0
        made.addressed = True
        place = Place(made.mutable, f"G{made.number}", str(index), take=lambda: Pointer(made, index))
        return runtime(o.type, f"G{made.number}", loc, place)

    def constant(self, data: Any) -> str:
        """The name of an object in generated code."""
        if isinstance(data, Global):
            data.addressed = True
            return f"G{data.number}"
        key = (type(data), data.tobytes()) if isinstance(data, np.generic) else (id(data), type(data))
        if key not in self._names:
            name = self._names[key] = f"k{len(self._names)}"
            self.constants[name] = data
        return self._names[key]

    def constant_code(self, o: Operand) -> str:
        """The code of a known value that has no literal."""
        if isinstance(o.const, FunctionValue):
            return self.function(o.const).name
        if isinstance(o.const, NativeFunction):
            return self.native(o.const)
        if isinstance(o.const, np.ndarray) and o.place is not None and o.place.take is not None:
            where = o.place.take()
            if isinstance(where.array, Global) and where.index == 0:
                return self.constant(where.array)
        self.resolve(o.const)
        return self.constant(o.const)

    def resolve(self, data: Any) -> None:
        """Compile the functions that a value refers to."""
        if isinstance(data, FunctionValue):
            self.function(data)
        elif isinstance(data, np.ndarray) and data.dtype == object:
            for item in data:
                self.resolve(item)

    def task_reference(self, value: FunctionValue) -> str:
        """The code of the id that a task is bound to, which may be bound later."""
        self.references.setdefault(id(value), value)
        return f"task_id({id(value)})"

    def native(self, target: NativeFunction) -> str:
        """The name of a library function with the PE already given."""
        return self.constant(target)

    def function(self, value: FunctionValue) -> Instance:
        """The compiled form of a function that is used as a value."""
        if value.generic:
            fail(value.decl.loc, "a generic function cannot be used as a value")
        frame = value.module.frame()
        args = tuple(runtime(_type(frame, p.type), "_") for p in value.decl.params)
        return self.instance(value, args, _type(frame, value.decl.result))

    def instance(self, value: FunctionValue, args: tuple[Operand, ...], result: t.Type) -> Instance:
        """One version of a function, compiled when first asked for."""
        versions = tuple(
            (o.type, frozen(o.const) if p.comptime else None) for p, o in zip(value.decl.params, args, strict=True)
        )
        key = (id(value.decl), id(value.module), versions)
        found = self.instances.get(key)
        if found is None:
            name = self.fresh(f"f_{value.decl.name}")
            found = Instance(name, value, tuple(o.type for o in args), result)
            self.instances[key] = found
            compile_instance(self, found, args)
        elif not found.done:
            # A function that calls itself: whether it waits is not known yet, so it is made a generator.
            found.waits = True
        return found

    def import_module(self, importer: Module, name: str, params: dict[str, Value], loc: Location) -> Any:
        """A module from a library, a file beside the importer, or a file on the search path."""
        factory = LIBRARIES.get(name)
        if factory is not None:
            with located(loc):
                return NativeModule(name, factory(self, params))
        path = self.find(importer, name)
        if path is None:
            fail(loc, f"unable to find module '{name}'")
        module = Module(self, self.read(path), params)
        self.pending.append(module)
        return module

    def find(self, importer: Module, name: str) -> Path | None:
        """The file that an import names."""
        beside = Path(importer.file.path).parent
        bare, library = name.strip("<>"), name.startswith("<")
        folders: Sequence[Path] = [beside, *(Path(p) for p in self.options.import_paths)]
        folders = [LIBRARY, *folders] if library else folders
        names = (bare, f"{bare}.csl") if library else (bare,)
        return next((f / n for f in folders for n in names if (f / n).is_file()), None)

    def export_variable(self, module: Module, item: s.Declare) -> None:
        """`export var`: visible to the host under its own name."""
        found = module.lookup(item.name, item.loc)
        assert found is not None and found.place is not None and found.place.take is not None
        self._keywords.add(item.name)
        element = found.type.element if isinstance(found.type, t.Array) else found.type
        self.tables.exports[item.name] = (
            Operand(t.Pointee("", element, found.place.mutable is False, True), found.place.take()),
            item.loc,
        )

    def export_function(self, module: Module, item: s.Function) -> None:
        """`export fn`: callable by the host under its own name."""
        found = module.lookup(item.name, item.loc)
        assert found is not None
        self._keywords.add(item.name)
        self.function(found.const)
        self.tables.exports[item.name] = (found, item.loc)

    @property
    def memory_used(self) -> int:
        """Bytes of data on the PE."""
        return sum(g.type.size + g.type.size % 2 for g in self.globals)


def _type(frame: Any, node: s.Syntax) -> t.Type:
    return MEANING[type(node)](frame, node).const
