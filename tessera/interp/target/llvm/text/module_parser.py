"""Module parser: functions, global variables and metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.core.errors import UnsupportedOpError
from tessera.interp.target.llvm.text.instruction_parser import TERMINATORS, parse_instruction
from tessera.interp.target.llvm.text.operand_parser import (
    LlvmLexer,
    LlvmTypeCursor,
    parse_value,
    skip_attributes,
    starts_value,
)
from tessera.interp.target.llvm.text.syntax import (
    VOID,
    BasicBlock,
    LlvmFunction,
    LlvmGlobal,
    LlvmInstruction,
    LlvmParameter,
    MetadataNode,
    ParsedModule,
)
from tessera.interp.target.llvm.text.verifier import verify_calls, verify_function
from tessera.interp.target.tokens import deep_nesting

_BY_VALUE_ATTRIBUTES = ("byval", "inalloca", "preallocated")


class _ModuleCursor(LlvmTypeCursor):
    """A cursor that collects the module's definitions."""

    def __init__(self, lexer: LlvmLexer) -> None:
        super().__init__(lexer)
        self.program = ParsedModule({}, {}, {})


def parse_module(text: str, file: str = "<llvm>") -> ParsedModule:
    """The module of a text."""
    p = _ModuleCursor(LlvmLexer(text, file))
    with deep_nesting(p.place):
        return _parse_definitions(p)


def _parse_definitions(p: _ModuleCursor) -> ParsedModule:
    while p.here.kind != "end":
        token = p.here
        reader = _DEFINITION_KEYWORDS.get(token.text) if token.kind == "word" else _DEFINITION_TOKENS.get(token.kind)
        if reader is None:
            p.fail("expected a definition")
        reader(p)
    verify_calls(p.program.functions)
    return p.program


def _skip_line(p: _ModuleCursor) -> None:
    p.skip_line()


def _skip_assembly(p: _ModuleCursor) -> None:
    raise UnsupportedOpError("module assembly is not supported", location=p.place())


def _skip_definition(p: _ModuleCursor) -> None:
    """`attributes #0 = { ... }`"""
    while not p.at("{"):
        if p.take().kind == "end":
            p.fail("expected '{'")
    p.skip_group()


def _parse_type_name(p: _ModuleCursor) -> None:
    """`%T = type ...`: the cursor has located its body before."""
    p.take()
    p.expect("=")
    p.expect("type")
    if not p.accept("opaque"):
        p.type()


def _parse_declare(p: _ModuleCursor) -> None:
    p.take()
    _skip_linkage(p)
    function = _parse_header(p)
    p.program.functions.setdefault(function.name, function)
    if p.line() == p.line(p.tokens[p.index - 1]):
        p.skip_line()


def _skip_linkage(p: _ModuleCursor) -> None:
    while p.here.kind == "meta":  # declare !dbg !5 ...
        p.take()
        p.take()
    skip_attributes(p)


def _parse_header(p: _ModuleCursor) -> LlvmFunction:
    where, result = p.place(), p.type()
    skip_attributes(p)
    name = p.expect_kind("global")
    p.expect("(")
    parameters: list[LlvmParameter] = []
    unnamed = 0
    while not p.at(")"):
        if p.accept("..."):
            break
        value = _parse_parameter(p, str(unnamed))
        unnamed += value.name == str(unnamed)
        parameters.append(value)
        if not p.accept(","):
            break
    p.expect(")")
    return LlvmFunction(name, result, tuple(parameters), where=where)


def _parse_parameter(p: _ModuleCursor, number: str) -> LlvmParameter:
    type, first = p.type(), p.index
    skip_attributes(p)
    by_value = any(t.text in _BY_VALUE_ATTRIBUTES for t in p.tokens[first : p.index])
    return LlvmParameter(type, p.take().text if p.here.kind == "local" else number, by_value)


def _parse_define(p: _ModuleCursor) -> None:
    p.take()
    _skip_linkage(p)
    head = _parse_header(p)
    while not p.at("{"):
        if p.take().kind == "end":
            p.fail("expected '{'")
    p.take()
    blocks = _FunctionBodyParser(p, sum(q.name.isdigit() for q in head.parameters)).parse_blocks()
    function = LlvmFunction(head.name, head.type, head.parameters, blocks, head.where)
    verify_function(function)
    p.program.functions[head.name] = function


class _FunctionBodyParser:
    """Parses the blocks of one function, and numbers unnamed values."""

    def __init__(self, p: _ModuleCursor, number: int) -> None:
        self.p = p
        self.number = number

    def _make_name(self, given: str) -> str:
        """The given name, or the next number."""
        name = given or str(self.number)
        self.number = int(name) + 1 if name.isdigit() else self.number
        return name

    def parse_blocks(self) -> tuple[BasicBlock, ...]:
        """Every basic block up to the closing brace."""
        result = []
        while not self.p.accept("}"):
            given = self.p.take().text if self.p.here.kind == "label" else ""
            result.append(BasicBlock(self._make_name(given), self._parse_instructions()))
        if not result:
            self.p.fail("expected a basic block")
        return tuple(result)

    def _parse_instructions(self) -> tuple[LlvmInstruction, ...]:
        body: list[LlvmInstruction] = []
        while not body or body[-1].op not in TERMINATORS:
            if self.p.here.kind == "record":  # #dbg_value(...)
                self.p.skip_line()
                continue
            if self.p.at("}") or self.p.here.kind in ("label", "end"):
                self.p.fail("expected an instruction: the block has no terminator")
            body.append(self._parse_instruction())
        return tuple(body)

    def _parse_instruction(self) -> LlvmInstruction:
        value = parse_instruction(self.p)
        if value.type == VOID or value.op in TERMINATORS:
            return value
        name = self._make_name(value.result)
        return value if name == value.result else replace(value, result=name)


def _parse_variable(p: _ModuleCursor) -> None:
    """`@name = internal unnamed_addr constant [4 x i8] c"...", align 4`"""
    name = p.take().text
    p.expect("=")
    while not p.at("constant", "global"):
        if p.at("alias", "ifunc") or p.here.kind == "end":
            raise UnsupportedOpError(f"@{name} is an alias or ifunc, which is not supported", location=p.place())
        p.take()
        if p.at("("):
            p.skip_group()
    constant = p.take().text == "constant"
    type = p.type()
    initial = parse_value(p, type) if starts_value(p) else None
    align = 0
    while p.accept(","):
        align = _parse_variable_tail(p) or align
    p.program.variables[name] = LlvmGlobal(name, type, initial, constant, align)


def _parse_variable_tail(p: _ModuleCursor) -> int:
    """An alignment; section, comdat and metadata are skipped."""
    if p.accept("align"):
        return p.integer()
    p.take()
    if p.at("("):
        p.skip_group()
    elif p.here.kind in ("string", "meta"):
        p.take()
    return 0


def _parse_metadata(p: _ModuleCursor) -> None:
    """`!7 = distinct !DILocation(line: 3, column: 5, scope: !4)`"""
    name = p.take().text
    p.expect("=")
    p.accept("distinct")
    kind = p.take().text
    if kind == "!":
        p.skip_group()
        return
    first = p.index
    p.skip_group()
    inside = p.tokens[first : p.index]
    fields = {t.text: after.text for t, after in zip(inside, inside[1:], strict=False) if t.kind == "label"}
    p.program.nodes[name] = MetadataNode(kind[1:], fields)


_DefinitionParser = Callable[[_ModuleCursor], None]

_DEFINITION_KEYWORDS: dict[str, _DefinitionParser] = {
    "define": _parse_define,
    "declare": _parse_declare,
    "attributes": _skip_definition,
    "target": _skip_line,
    "source_filename": _skip_line,
    "uselistorder": _skip_line,
    "module": _skip_assembly,
}

_DEFINITION_TOKENS: dict[str, _DefinitionParser] = {
    "global": _parse_variable,
    "local": _parse_type_name,
    "meta": _parse_metadata,
    "comdat": _skip_line,
    "group": _skip_line,
}
