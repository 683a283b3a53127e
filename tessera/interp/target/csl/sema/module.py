"""A module: one CSL file with values for its params, its names resolved when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.coerce import coerce, zero
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.functions import FunctionValue, signature
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import Operand, Place, from_value, known
from tessera.interp.target.csl.values import Global, Pointer, Value

if TYPE_CHECKING:
    from tessera.interp.target.csl.sema.unit import Unit

_UNSET = "only 'var' and 'extern const' variables may be uninitialized"


class Module:
    """One import of a file. Each import is a copy of its own, with its own variables."""

    def __init__(self, unit: Unit, file: s.File, params: dict[str, Value]) -> None:
        self.unit, self.file, self.params = unit, file, params
        self.loc = Location(file.path, 1, 1)
        self.title = file.path.rsplit("/", 1)[-1]
        self.items: dict[str, s.Declare | s.Function] = {}
        self.symbols: dict[str, Operand] = {}
        self._resolving: set[str] = set()
        for item in file.items:
            if isinstance(item, (s.Declare, s.Function)):
                self._add(item)

    def _add(self, item: s.Declare | s.Function) -> None:
        if item.name in self.items:
            fail(item.loc, f"redeclaration of '{item.name}'")
        if item.name in t.NAMED:
            fail(item.loc, f"declaration of '{item.name}' shadows builtin type")
        if self.unit.options.sdk != "1.4" and t.integer(item.name):
            fail(item.loc, f"declaration of '{item.name}' shadows builtin type")
        self.items[item.name] = item

    def lookup(self, name: str, loc: Location) -> Operand | None:
        """What a top-level name means, or None."""
        if name in self.symbols:
            return self.symbols[name]
        item = self.items.get(name)
        if item is None:
            return None
        if name in self._resolving:
            fail(loc, f"dependency loop: the value of '{name}' depends on itself")
        self._resolving.add(name)
        try:
            found = self._function(item) if isinstance(item, s.Function) else self._variable(item)
        finally:
            self._resolving.discard(name)
        self.symbols[name] = found
        return found

    def _function(self, item: s.Function) -> Operand:
        value = FunctionValue(self, item)
        return known(signature(value), value, item.loc)

    def frame(self) -> Frame:
        """A frame for evaluation at compile time in this module."""
        return Frame(self.unit, self, True)

    def _variable(self, item: s.Declare) -> Operand:
        f = self.frame()
        type_ = type_of(f, item.type) if item.type is not None else None
        if item.kind == "var":
            return self._global(f, item, type_)
        value = self._initial(f, item)
        if type_ is not None:
            value = coerce(f, value, type_, item.value.loc if item.value else item.loc)
        return self.constant(value, item)

    def _initial(self, f: Frame, item: s.Declare) -> Operand:
        if item.kind == "param" and item.name in self.params:
            return from_value(self.params[item.name], item.loc)
        if item.value is None:
            fail(item.loc, _UNSET, suggestion=f"give param '{item.name}' a value where the file is used")
        return f.value(item.value)

    def constant(self, value: Operand, item: s.Declare) -> Operand:
        """A constant, which gets memory when its address is first taken."""
        if value.fields is not None:
            return value
        if value.type.comptime_only or value.type is t.VOID or isinstance(value.type, t.Fn):
            return Operand(value.type, value.const, loc=item.loc)
        made: list[Global] = []

        def take() -> Pointer:
            if not made:
                made.append(self.unit.add_global(item.name, value.type, value.const, False, item.loc))
                made[0].addressed = True
            return Pointer(made[0], 0)

        return Operand(value.type, value.const, place=Place(False, take=take), loc=item.loc)

    def _global(self, f: Frame, item: s.Declare, type_: t.Type | None) -> Operand:
        if item.value is not None:
            value = f.value(item.value)
            value = coerce(f, value, type_, item.value.loc) if type_ is not None else value
        elif type_ is None:
            fail(item.loc, _UNSET)
        else:
            value = known(type_, zero(type_), item.loc)
        return self.unit.declared(item.name, value, item.loc)

    def evaluate(self) -> None:
        """Import what the file imports, then run its comptime blocks (and its layout block, at the root)."""
        for item in self.file.items:
            if isinstance(item, s.Declare) and isinstance(item.value, s.Builtin) and _imports(item.value):
                self.lookup(item.name, item.loc)
        kinds = ("comptime", "layout") if self.unit.is_layout and self is self.unit.root else ("comptime",)
        for item in self.file.items:
            if isinstance(item, s.TopBlock) and item.kind in kinds:
                self._block(item)
        for item in self.file.items:
            if isinstance(item, s.Declare) and "export" in item.flags:
                self.unit.export_variable(self, item)
            elif isinstance(item, s.Function) and "export" in item.flags:
                self.unit.export_function(self, item)

    def _block(self, item: s.TopBlock) -> None:
        f = self.frame()
        f.section = item.kind
        self.unit.in_block = item.kind == "comptime"
        f.run(item.body)
        self.unit.in_block = False


def _imports(node: s.Builtin) -> bool:
    return node.name == "@import_module"
