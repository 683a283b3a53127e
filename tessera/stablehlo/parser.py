"""Grammar of StableHLO text: attributes, types, source locations, and operations in both of their forms.

The pretty form of most operations is a sequence of operands, flags (`EQ`, `SIGNED`), attributes (`dims = [0, 1]`) and
types. One rule reads all of them; `while` and `reduce` have regions after it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location, ParseError
from tessera.core.types import TensorType, as_dtype
from tessera.stablehlo.text import (
    TOKEN_TYPE,
    HloFunction,
    HloModule,
    HloRegion,
    Lexer,
    Operation,
    RefusedType,
    TupleType,
    make_dense,
    parse_tensor_type,
    unquote,
)

_HEX = re.compile("0x([0-9a-fA-F]{2})*")
_MAX_DEPTH = 150  # of regions, attributes and locations inside one another


class Parser:
    """The parser of one text."""

    def __init__(self, text: str, file: str) -> None:
        self.lexer = Lexer(text, file)
        self.aliases: dict[str, Any] = {}  # of attributes
        self.places: dict[str, Location] = {}
        self.depth = 0
        self._collect_locations()

    # Locations: their aliases stand at both ends of a text, and refer to each other in any order.

    def _collect_locations(self) -> None:
        lexer = self.lexer
        starts = {
            lexer.lexemes[i].text: i + 3
            for i in range(len(lexer.lexemes) - 3)
            if lexer.lexemes[i].text.startswith("#loc")
            and lexer.lexemes[i + 1].text == "="
            and lexer.lexemes[i + 2].text == "loc"
        }
        self._location_starts = starts

    def _resolve_location(self, alias: str) -> Location:
        if alias not in self.places:
            self.places[alias] = UNKNOWN
            start = self._location_starts.get(alias)
            if start is not None:
                before, self.lexer.next = self.lexer.next, start
                self.lexer.expect("(")
                self.places[alias] = self._parse_location_body()
                self.lexer.next = before
        return self.places[alias]

    def _parse_location_body(self) -> Location:
        """The innermost file location of what stands between the parentheses of `loc(...)`, and the `)`."""
        lexer, found, level = self.lexer, UNKNOWN, 1
        while level and lexer.here.kind != "end":
            lexeme = lexer.take()
            level += (lexeme.text == "(") - (lexeme.text == ")")
            if found != UNKNOWN:
                continue
            if lexeme.kind == "alias":
                found = self._nested_location(lexeme.text)
            elif lexeme.kind == "string" and lexer.at(":") and lexer.ahead().kind == "number":
                found = self._parse_file_location(unquote(lexeme.text))
        return found

    def _nested_location(self, alias: str) -> Location:
        self._descend()
        found = self._resolve_location(alias) if alias.startswith("#loc") else UNKNOWN
        self.depth -= 1
        return found

    def _parse_file_location(self, file: str) -> Location:
        """`:line:column`, and ` to :column` or ` to :line:column`; MLIR's columns count from 0 here, as JAX's."""
        numbers = self._parse_colon_numbers()
        last: list[int] = []
        if self.lexer.accept("to"):
            last = self._parse_colon_numbers()
        line, column = (*numbers, 0)[:2]
        same = len(last) == 1 or (len(last) == 2 and last[0] == line)
        return Location(file, line, column + 1, last[-1] + 1 if last and same else 0)

    def _parse_colon_numbers(self) -> list[int]:
        numbers = []
        while self.lexer.at(":") and self.lexer.ahead().kind == "number":
            self.lexer.take()
            numbers.append(self.lexer.take_integer())
        return numbers

    def _parse_trailing_location(self) -> Location:
        if not (self.lexer.at("loc") and self.lexer.ahead().text == "("):
            return UNKNOWN
        self.lexer.expect("loc", "(")
        return self._parse_location_body()

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ParseError("the text nests too deeply", location=self.lexer.place(self.lexer.here.start))

    # Types.

    def parse_type(self) -> Any:
        """A type: TensorType, TupleType, RefusedType, or the text of another one."""
        lexer = self.lexer
        if lexer.here.kind == "tensor":
            return parse_tensor_type(lexer.take().text)
        if lexer.accept("tuple"):
            return TupleType(tuple(lexer.many("<", ">", self.parse_type)))
        if lexer.at("("):
            return self._parse_function_type()
        if lexer.here.kind not in ("alias", "word"):
            raise lexer.error("a type")
        name = lexer.take().text
        arguments = self._skip_brackets("<", ">") if lexer.at("<") else ""
        if name == TOKEN_TYPE:
            return TOKEN_TYPE
        return RefusedType(name + arguments, "this type is not supported") if name[0] == "!" or arguments else name

    def _parse_function_type(self) -> tuple[list[Any], list[Any]]:
        inputs = self.lexer.many("(", ")", self.parse_type)
        self.lexer.expect("->")
        return inputs, self._parse_type_list()

    def _parse_type_list(self) -> list[Any]:
        return self.lexer.many("(", ")", self.parse_type) if self.lexer.at("(") else [self.parse_type()]

    def _skip_brackets(self, open: str, close: str) -> str:
        """The text from one bracket to its partner."""
        level, parts = 0, []
        while self.lexer.here.kind != "end":
            lexeme = self.lexer.take()
            level += (lexeme.text == open) - (lexeme.text == close)
            parts.append(lexeme.text)
            if not level:
                break
        return "".join(parts)

    # Attributes.

    def parse_attribute(self, typed: bool = True) -> Any:
        """An attribute as a Python value; a number's type is read too where one may follow."""
        self._descend()
        try:
            return self._parse_attribute(typed)
        finally:
            self.depth -= 1

    def _parse_attribute(self, typed: bool) -> Any:
        lexer = self.lexer
        kind, text = lexer.here.kind, lexer.here.text
        if kind == "string":
            lexer.take()
            return self._skip_type(unquote(text), typed)
        if kind == "number":
            return self._parse_number(typed)
        if kind == "symbol":
            return self._parse_symbol()
        if kind == "alias" and text[0] == "#":
            return self._parse_dialect_attribute()
        if text == "[":
            return lexer.many("[", "]", lambda: self.parse_attribute())
        if text == "{":
            return self.parse_dictionary()
        if kind == "word":
            return self._parse_keyword(typed)
        return self.parse_type()

    def _skip_type(self, value: Any, typed: bool) -> Any:
        if typed and self.lexer.accept(":"):
            self.parse_type()
        return value

    def _parse_number(self, typed: bool) -> Any:
        start = self.lexer.here.start
        text = self.lexer.take().text
        name = self.parse_type() if typed and self.lexer.accept(":") else None
        try:
            if isinstance(name, str) and name[:1] in "fb" and "0x" in text:
                type = parse_tensor_type(f"tensor<{name}>")
                return float(make_dense(text, type)) if isinstance(type, TensorType) else type
            return int(text, 16) if "0x" in text else float(text) if set(text) & set(".eE") else int(text)
        except (ValueError, OverflowError):
            location = self.lexer.place(start)
            raise ParseError("this is no number", location=location, received=text[:60]) from None

    def _parse_symbol(self) -> str:
        name = self.lexer.take_kind("symbol")[1:]
        while self.lexer.at(":") and self.lexer.ahead().text == ":":
            self.lexer.expect(":", ":")
            name = self.lexer.take_kind("symbol")[1:]
        return unquote(name) if name.startswith('"') else name

    def _parse_keyword(self, typed: bool) -> Any:
        lexer = self.lexer
        word = lexer.here.text
        if word in ("true", "false"):
            lexer.take()
            return self._skip_type(word == "true", typed)
        if word == "dense" and lexer.ahead().text == "<":
            return self._parse_dense()
        if word == "array" and lexer.ahead().text == "<":
            lexer.expect("array", "<")
            self.parse_type()
            lexer.accept(":")
            items = []
            while not lexer.at(">"):
                items.append(self.parse_attribute(typed=False))
                lexer.accept(",")
            lexer.expect(">")
            return items
        if word == "loc" and lexer.ahead().text == "(":
            return self._parse_trailing_location()
        if word == "unit":
            lexer.take()
            return True
        return self.parse_type()

    def _parse_dense(self) -> Any:
        lexer = self.lexer
        lexer.expect("dense", "<")
        elements: Any = [] if lexer.at(">") else self._parse_elements()
        lexer.expect(">", ":")
        start = lexer.here.start
        type = self.parse_type()
        if not isinstance(type, TensorType):
            return type  # a refused type, which the constant's own type repeats
        try:
            return make_dense(elements, type)
        except (ValueError, TypeError, OverflowError):
            raise ParseError(
                "the elements of a constant do not fit its type", location=lexer.place(start), expected=str(type)
            ) from None

    def _parse_elements(self) -> Any:
        lexer = self.lexer
        if lexer.here.kind == "string":
            text = unquote(lexer.here.text)
            if text.startswith("0x") and not _HEX.fullmatch(text):
                raise lexer.error("pairs of hexadecimal digits")
            lexer.take()
            return bytes.fromhex(text[2:]) if text.startswith("0x") else b""
        if lexer.at("["):
            return lexer.many("[", "]", self._parse_elements)
        if lexer.at("("):  # a complex number
            return lexer.many("(", ")", self._parse_elements)
        return lexer.take().text

    def parse_dictionary(self, open: str = "{", close: str = "}") -> dict[str, Any]:
        """Named attributes."""
        return dict(self.lexer.many(open, close, self._parse_entry))

    def _parse_entry(self) -> tuple[str, Any]:
        lexer = self.lexer
        name = unquote(lexer.take().text) if lexer.here.kind == "string" else lexer.take_kind("word")
        return name, self.parse_attribute() if lexer.accept("=") else True

    def _parse_dialect_attribute(self) -> Any:
        """`#dialect.name<k = v>` as a dict, `#dialect<name VALUE>` as the value, an alias as what it stands for."""
        lexer = self.lexer
        name = lexer.take().text
        if not lexer.at("<"):
            return self.aliases.get(name, name)
        if name == "#stablehlo.conv":
            lexer.expect("<")
            found = self.parse_convolution_dimensions()
            lexer.expect(">")
            return found
        if lexer.ahead().kind == "word" and lexer.ahead(2).text == "=":
            return self._parse_parameters()
        if lexer.ahead(2).kind == "word" and lexer.ahead(3).text == ">":
            lexer.next += 2
            value = lexer.take().text
            lexer.expect(">")
            return value
        return name + self._skip_brackets("<", ">")

    def _parse_parameters(self) -> dict[str, Any]:
        lexer = self.lexer
        found: dict[str, Any] = {}
        lexer.expect("<")
        while not lexer.at(">"):
            name = lexer.take_kind("word")
            lexer.expect("=")
            found[name] = self.parse_attribute(typed=False)
            lexer.accept(",")
        lexer.expect(">")
        return found

    def parse_convolution_dimensions(self) -> list[list[str]]:
        """`[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]`: the labels of the operands and of the result."""
        labels = [self._parse_labels()]
        self.lexer.expect("x")
        labels.append(self._parse_labels())
        self.lexer.expect("->")
        return [*labels, self._parse_labels()]

    def _parse_labels(self) -> list[str]:
        return self.lexer.many("[", "]", lambda: self.lexer.take().text)

    # Modules and functions.

    def parse_module(self) -> HloModule:
        """The module of the text; functions that stand alone are a module too."""
        module = HloModule("module", {})
        while self.lexer.here.kind != "end":
            lexer = self.lexer
            if lexer.here.kind == "alias" and lexer.ahead().text == "=":
                self._parse_alias()
            elif lexer.at("module", "builtin.module"):
                self._parse_module_body(module)
            elif lexer.at('"builtin.module"'):
                self._add_generic_module(module, self.parse_operation())
            else:
                self._add_function(module, self.parse_operation())
        return module

    def _parse_alias(self) -> None:
        name = self.lexer.take().text
        self.lexer.expect("=")
        if name.startswith("#loc"):
            self._parse_trailing_location()
        elif name[0] == "#":
            self.aliases[name] = self.parse_attribute()
        else:
            self.parse_type()

    def _parse_module_body(self, module: HloModule) -> None:
        lexer = self.lexer
        lexer.take()
        module.name = self._parse_symbol() if lexer.here.kind == "symbol" else module.name
        if lexer.accept("attributes"):
            self.parse_dictionary()
        lexer.expect("{")
        while not lexer.accept("}"):
            self._add_function(module, self.parse_operation())
        self._parse_trailing_location()

    def _add_generic_module(self, module: HloModule, operation: Operation) -> None:
        module.name = str(operation.get("sym_name", module.name))
        for inner in operation.regions[0].operations:
            self._add_function(module, inner)

    def _add_function(self, module: HloModule, operation: Operation) -> None:
        if operation.name not in ("func.func", "func"):
            raise ParseError(
                f"a module holds {operation.name}", location=operation.location, expected="functions",
                suggestion="lower without sharding: programs for one device",
            )  # fmt: skip
        name = str(operation.attrs["sym_name"])
        hints = [_find_hint(a, "") for a in operation.get("arg_attrs", [])]
        results = [_find_hint(a, "") for a in operation.get("res_attrs", [])]
        module.functions[name] = HloFunction(name, operation.regions[0], hints, results)

    def _parse_function(self, operation: Operation) -> Operation:
        """`func.func public @name(%arg0: type {attrs}) -> (type {attrs}) attributes {...} {body}`."""
        lexer = self.lexer
        for word in ("public", "private", "nested"):
            lexer.accept(word)
        operation.attrs["sym_name"] = self._parse_symbol()
        region, hints = HloRegion(), []
        for name, type, attrs in lexer.many("(", ")", self._parse_parameter):
            region.params.append(name)
            region.types.append(type)
            hints.append(attrs)
        results: list[Any] = []
        if lexer.accept("->"):
            results = lexer.many("(", ")", self._parse_result) if lexer.at("(") else [(self.parse_type(), {})]
        if lexer.accept("attributes"):
            operation.attrs.update(self.parse_dictionary())
        if lexer.at("{"):
            region.operations = self._parse_body()
        operation.attrs.update(arg_attrs=hints, res_attrs=[a for _, a in results])
        operation.regions = [region]
        return operation

    def _parse_parameter(self) -> tuple[str, Any, dict[str, Any]]:
        name = self.lexer.take().text if self.lexer.here.kind == "value" else ""
        if name:
            self.lexer.expect(":")
        type, attrs = self._parse_result()
        location = self._parse_hint()
        return name, type, {**attrs, **({"hint": location} if location else {})}

    def _parse_hint(self) -> str:
        """The name in a location such as `loc("x")`."""
        lexer = self.lexer
        named = lexer.at("loc") and lexer.ahead(2).kind == "string" and lexer.ahead(3).text == ")"
        name = unquote(lexer.ahead(2).text) if named else ""
        self._parse_trailing_location()
        return name

    def _parse_result(self) -> tuple[Any, dict[str, Any]]:
        type = self.parse_type()
        return type, self.parse_dictionary() if self.lexer.at("{") else {}

    # Regions and operations.

    def parse_region(self) -> HloRegion:
        """`{ ^bb0(%a: type): operations }`."""
        region = HloRegion()
        self._descend()
        if self.lexer.ahead().kind == "label":
            self.lexer.expect("{")
            self.lexer.take()
            parameters = self.lexer.many("(", ")", self._parse_parameter) if self.lexer.at("(") else []
            region.params = [n for n, _, _ in parameters]
            region.types = [t for _, t, _ in parameters]
            self.lexer.expect(":")
            region.operations = self._parse_operations()
        else:
            region.operations = self._parse_body()
        self.depth -= 1
        return region

    def _parse_body(self) -> list[Operation]:
        self.lexer.expect("{")
        return self._parse_operations()

    def _parse_operations(self) -> list[Operation]:
        found = []
        while not self.lexer.accept("}"):
            if self.lexer.here.kind in ("end", "label"):
                raise self.lexer.error("an operation or }")
            found.append(self.parse_operation())
        return found

    def parse_operation(self) -> Operation:
        """One operation with its results and location."""
        lexer = self.lexer
        start = lexer.here.start
        results: list[tuple[str, int]] = []
        while lexer.here.kind == "value":
            name = lexer.take().text
            results.append((name, lexer.take_integer() if lexer.accept(":") else 1))
            if not lexer.accept(","):
                break
        if results:
            lexer.expect("=")
        if lexer.here.kind == "string":
            operation = self._parse_generic(Operation(unquote(lexer.take().text)))
        else:
            operation = self._parse_pretty(Operation(lexer.take_kind("word")), sum(n for _, n in results))
        operation.results = results
        operation.types = operation.types if results else []
        operation.location = self._parse_trailing_location()
        if operation.location == UNKNOWN:
            operation.location = lexer.place(start)
        return operation

    def _parse_generic(self, operation: Operation) -> Operation:
        lexer = self.lexer
        operation.operands = lexer.many("(", ")", lambda: lexer.take_kind("value"))
        if lexer.at("<"):
            lexer.expect("<")
            operation.attrs.update(self.parse_dictionary())
            lexer.expect(">")
        if lexer.at("("):
            operation.regions = lexer.many("(", ")", self.parse_region)
        if lexer.at("{"):
            operation.attrs.update(self.parse_dictionary())
        lexer.expect(":")
        operation.types = self._parse_function_type()[1]
        return operation

    def _parse_pretty(self, operation: Operation, count: int) -> Operation:
        if operation.name in ("func.func", "func"):
            return self._parse_function(operation)
        while self._parse_clause(operation):
            pass
        if operation.attrs.pop("paired", False):  # (%a init: %b), ...: the generic form has the inputs first
            operation.operands = [*operation.operands[::2], *operation.operands[1::2]]
        if self.lexer.accept(":"):
            operation.types = self._parse_result_types(count)
        if self.lexer.accept("attributes"):
            operation.attrs.update(self.parse_dictionary())
        if self.lexer.at("cond") and self.lexer.ahead().text == "{":
            self._parse_loop_regions(operation)
        if self.lexer.accept("reducer"):
            operation.regions = [self._parse_reducer()]
        return operation

    def _parse_result_types(self, count: int) -> list[Any]:
        """The types after the colon: a function type, or the types of operands or results, of which the last count."""
        lexer = self.lexer
        found: list[Any] = []
        if lexer.at("("):
            found = lexer.many("(", ")", self.parse_type)
        else:
            found = [self.parse_type()]
            while lexer.accept(","):
                found.append(self.parse_type())
        if lexer.accept("->"):
            return self._parse_type_list()
        return found[len(found) - count :] if 0 < count <= len(found) else found

    def _parse_clause(self, operation: Operation) -> bool:
        """One part of the pretty form before its types; False where there is none."""
        lexer = self.lexer
        kind, text, after = lexer.here.kind, lexer.here.text, lexer.ahead().text
        if kind == "value":
            return self._parse_operand(operation, after)
        if kind == "word":
            return self._parse_word_clause(operation, text, after)
        if kind == "symbol":
            operation.attrs["callee"] = self._parse_symbol()
        elif kind == "string":
            operation.attrs["name"] = unquote(lexer.take().text)
        elif text == "[":
            operation.attrs["ranges"] = lexer.many("[", "]", self._parse_range)
        elif text == "{":
            self._parse_braces(operation)
        elif text in ("(", ")", ","):
            lexer.take()
        else:
            return False
        return True

    def _parse_braces(self, operation: Operation) -> None:
        if self.lexer.ahead().kind == "label":
            operation.regions.append(self.parse_region())
        else:
            operation.attrs.update(self.parse_dictionary())

    def _parse_word_clause(self, operation: Operation, text: str, after: str) -> bool:
        if text == "dense" and after == "<":
            operation.attrs["value"] = self.parse_attribute()
            return self._end_constant(operation)
        if text == "attributes" and after == "{":
            self.lexer.take()
            operation.attrs.update(self.parse_dictionary())
            return True
        if (text, after) == ("loc", "(") or text in ("cond", "reducer"):
            return False
        return self._parse_named_clause(operation, self.lexer.take().text)

    def _end_constant(self, operation: Operation) -> bool:
        value = operation.attrs["value"]
        operation.types = [value] if isinstance(value, RefusedType) else [_type_of(value)]
        return self.lexer.at(",", "{")

    def _parse_operand(self, operation: Operation, after: str) -> bool:
        """`%a`, or `%param = %a` of a loop; not the result of the next operation."""
        lexer = self.lexer
        if after == "=" and lexer.ahead(2).kind == "value":
            operation.attrs.setdefault("params", []).append(lexer.take().text)
            lexer.expect("=")
        elif after in ("=", ":") and lexer.ahead(2).kind in ("word", "string", "number") and self._starts_line():
            return False
        operation.operands.append(lexer.take().text)
        return True

    def _starts_line(self) -> bool:
        start = self.lexer.here.start
        return not self.lexer.text[self.lexer.text.rfind("\n", 0, start) + 1 : start].strip()

    def _parse_range(self) -> list[int]:
        """`0:6:2` of a slice."""
        return [self.lexer.take_integer(), *self._parse_colon_numbers()]

    def _parse_named_clause(self, operation: Operation, word: str) -> bool:
        lexer = self.lexer
        if word == "applies":
            operation.regions = [_region_of(lexer.take_kind("word"))]
        elif word == "init":
            lexer.expect(":")
            operation.attrs["paired"] = True
        elif not lexer.at("="):
            operation.attrs.setdefault("flags", []).append(word)
        else:
            lexer.expect("=")
            operation.attrs[word] = self._parse_clause_value(word)
        return True

    def _parse_clause_value(self, word: str) -> Any:
        lexer = self.lexer
        if word == "dim_numbers":
            return self.parse_convolution_dimensions()
        if word == "window":
            return self.parse_dictionary()
        if word == "algorithm" and lexer.at("<"):
            return self._skip_brackets("<", ">")
        value = self.parse_attribute(typed=False)
        if lexer.at("x") and lexer.ahead().text == "[":  # `[0] x [1]`
            lexer.take()
            return [value, self.parse_attribute()]
        return value

    def _parse_loop_regions(self, operation: Operation) -> None:
        self.lexer.expect("cond")
        condition = self.parse_region()
        self.lexer.expect("do")
        body = self.parse_region()
        condition.params = body.params = operation.attrs.get("params", [])
        condition.types = body.types = operation.types
        operation.regions = [condition, body]

    def _parse_reducer(self) -> HloRegion:
        """`reducer(%a: t, %b: t) (%c: t, %d: t) {...}`: pairs of a left and a right parameter."""
        lefts, rights = [], []
        while self.lexer.at("("):
            left, right = self.lexer.many("(", ")", self._parse_parameter)
            lefts.append(left)
            rights.append(right)
        params = [*lefts, *rights]
        return HloRegion([n for n, _, _ in params], [t for _, t, _ in params], self._parse_body())


def _type_of(array: np.ndarray) -> TensorType:
    return TensorType(array.shape, as_dtype(array.dtype))


def _region_of(name: str) -> HloRegion:
    """The region of `applies stablehlo.add`."""
    made = Operation(name, operands=["%left", "%right"], results=[("%joined", 1)])
    return HloRegion(["%left", "%right"], [None, None], [made, Operation("stablehlo.return", operands=["%joined"])])


def _find_hint(attrs: dict[str, Any], default: str) -> str:
    found = attrs.get("hint") or attrs.get("jax.arg_name") or attrs.get("jax.result_info") or default
    return str(found)


def parse(text: str, file: str = "<stablehlo>") -> HloModule:
    """The functions of a text.

    Raises:
        ParseError: the text is not StableHLO; the error has the line and column.
    """
    parser = Parser(text, file)
    try:
        return parser.parse_module()
    except RecursionError:  # of types, which are not counted as they are read
        place = parser.lexer.place(parser.lexer.here.start)
        raise ParseError("the text nests too deeply", location=place) from None
