"""Parsing of the text of other compilers, and the locations of syntax errors."""

import re

import numpy as np
import pytest

from tessera.core.errors import OutOfBoundsError, ParseError, ResourceError, UnsupportedOpError
from tessera.interp.target.llvm import LlvmModule
from tessera.interp.target.llvm.text import instruction_memo
from tessera.interp.target.llvm.text.module_parser import parse_module

# As clang writes it at -O2 -g.
CLANG = """; ModuleID = 'saxpy.c'
source_filename = "saxpy.c"
target datalayout = "e-m:e-p270:32:32-i64:64-f80:128-n8:16:32:64-S128"
target triple = "x86_64-unknown-linux-gnu"

$unused = comdat any
%struct.node = type { i32, ptr }
@.str = private unnamed_addr constant [4 x i8] c"%d\\0A\\00", align 1, !dbg !0

; Function Attrs: nofree norecurse nosync nounwind memory(argmem: readwrite) uwtable
define dso_local void @saxpy(i32 noundef %0, float noundef %1, ptr noalias nocapture noundef readonly %2, ptr noalias nocapture noundef %3) local_unnamed_addr #0 !dbg !9 {
    #dbg_value(i32 %0, !17, !DIExpression(), !23)
  %5 = icmp sgt i32 %0, 0, !dbg !24
  br i1 %5, label %6, label %8, !dbg !25

6:                                                ; preds = %4
  %7 = zext nneg i32 %0 to i64, !dbg !24
  br label %9, !dbg !25

8:                                                ; preds = %9, %4
  ret void, !dbg !26

9:                                                ; preds = %6, %9
  %10 = phi i64 [ 0, %6 ], [ %16, %9 ]
  call void @llvm.dbg.value(metadata i64 %10, metadata !21, metadata !DIExpression()), !dbg !23
  %11 = getelementptr inbounds nuw float, ptr %2, i64 %10, !dbg !27
  %12 = load float, ptr %11, align 4, !dbg !27, !tbaa !29
  %13 = getelementptr inbounds nuw float, ptr %3, i64 %10, !dbg !33
  %14 = load float, ptr %13, align 4, !dbg !33, !tbaa !29
  %15 = tail call fast nofpclass(nan inf) float @llvm.fmuladd.f32(float %1, float noundef %12, float %14), !dbg !34
  store float %15, ptr %13, align 4, !dbg !34, !tbaa !29
  %16 = add nuw nsw i64 %10, 1, !dbg !35
  %17 = icmp eq i64 %16, %7, !dbg !24
  br i1 %17, label %8, label %9, !dbg !25, !llvm.loop !36
}

; Function Attrs: mustprogress
declare float @llvm.fmuladd.f32(float, float, float) #1
declare void @llvm.dbg.value(metadata, metadata, metadata) #1
declare !dbg !50 i32 @printf(ptr noundef, ...) local_unnamed_addr

attributes #0 = { nofree "min-legal-vector-width"="0" "target-cpu"="x86-64" }
attributes #1 = { mustprogress }

!llvm.dbg.cu = !{!2}
!llvm.module.flags = !{!5, !6}

!0 = !DIGlobalVariableExpression(var: !1, expr: !DIExpression())
!2 = distinct !DICompileUnit(language: DW_LANG_C11, file: !3, producer: "clang", isOptimized: true)
!3 = !DIFile(filename: "saxpy.c", directory: "/src", checksumkind: CSK_MD5, checksum: "abc")
!5 = !{i32 7, !"Dwarf Version", i32 5}
!6 = !{i32 2, !"Debug Info Version", i32 3}
!9 = distinct !DISubprogram(name: "saxpy", scope: !3, file: !3, line: 1, type: !10, spFlags: DISPFlagDefinition | DISPFlagOptimized, unit: !2)
!22 = distinct !DILexicalBlock(scope: !9, file: !3, line: 2, column: 3)
!27 = !DILocation(line: 3, column: 16, scope: !28)
!28 = distinct !DILexicalBlock(scope: !22, line: 2, column: 31)
!36 = distinct !{!36, !25}
"""  # noqa: E501


def test_clang():
    m = LlvmModule(CLANG)
    x, y = np.arange(7, dtype="f4"), np.ones(7, "f4")
    m.call("saxpy", [7, 2.0, x, y])
    assert m.functions == ["saxpy"] and (y == 2 * x + 1).all()
    m.call("saxpy", [0, 2.0, x, y])


def test_error_names_the_source():
    x, y = np.arange(7, dtype="f4"), np.ones(8, "f4")
    with pytest.raises(OutOfBoundsError) as error:
        LlvmModule(CLANG, "saxpy.ll").call("saxpy", [8, 2.0, x, y])
    assert str(error.value).startswith("/src/saxpy.c:3:16: OutOfBoundsError")
    assert "[load at saxpy.ll:27:3]" in str(error.value)


def body(line):
    return f"define i32 @f(i32 %x) {{\n{line}\n  ret i32 %x\n}}"


@pytest.mark.parametrize("line,place,message", [
    ("  %y = add i32 %x", "3:3", "expected ',', found 'ret'"),
    ("  %y = frobnicate i32 %x", "2:8", "expected an instruction, found 'frobnicate'"),
    ("  %y = add i33x %x, 1", "2:12", "expected a type, found 'i33x'"),
    ("  %y = fadd float 1.0, 0.1", "2:24", "expected a literal that is exact in float, found '0.1'"),
    ("  %y = add i32 %x, ?", "2:20", "unexpected character '?'"),
    ("  br label %nowhere\nb:", "2:3", "there is no basic block %nowhere"),
    ("  %y = add i32 %x, %z", "2:3", "%z is not defined"),
    ("  %x = add i32 1, 1", "2:3", "%x is defined twice"),
    ("b:\nc:", "3:1", "the block has no terminator"),
])  # fmt: skip
def test_parse_error(line, place, message):
    with pytest.raises(ParseError) as error:
        LlvmModule(body(line), "t.ll").call("f", [1])
    text = str(error.value)
    assert message in text and text.startswith(f"t.ll:{place}: ")


@pytest.mark.parametrize("line,message", [
    ("  %y = va_arg ptr null, i32", "'va_arg' is not supported"),
    ("  %y = call i32 @mystery(i32 %x)", "@mystery is not supported [call mystery at t.ll:2:3]"),
    ("  %y = call i32 %x()", "a call through a pointer is not supported"),
    ("  %y = fadd fp128 poison, poison", "fp128 is not supported [fadd at t.ll:2:3]"),
    ("  %y = add i128 1, 1", "wider than 64 bits are not supported: i128 [add at t.ll:2:3]"),
    ("  %y = call i32 @llvm.x86.mystery(i32 %x)", "@llvm.x86.mystery is not supported"),
])  # fmt: skip
def test_unsupported(line, message):
    with pytest.raises(UnsupportedOpError) as error:
        LlvmModule(body(line), "t.ll").call("f", [1])
    assert message in str(error.value) and str(error.value).startswith("t.ll:2:")


@pytest.mark.parametrize("value,want", [
    ("float 0x3FB99999A0000000", np.float32(0.1)), ("float -1.5e+00", -1.5), ("half 0xH3C00", 1),
    ("bfloat 0xR4049", 3.140625), ("double 0x400921FB54442D18", np.pi), ("float 0x7FF0000000000000", np.inf),
    ("i8 -1", -1), ("i8 255", -1), ("i1 true", True), ("i64 9223372036854775807", 2**63 - 1),
    ("i32 zeroinitializer", 0),
    ("i64 ptrtoint (ptr null to i64)", 0), ("i64 add (i64 2, i64 3)", 5),
])  # fmt: skip
def test_constant(value, want):
    assert LlvmModule(f"define {value.split()[0]} @f() {{ ret {value} }}").call("f", [])[0] == want


def test_names():
    text = """define i32 @"a b"(i32 %"x y", i32 %0) {
  %2 = add i32 %"x y", %0
  br label %"to here"
"to here":
  call void @llvm.assume(i1 true) [ "align"(ptr null, i64 8) ]
  %3 = mul i32 %2, 2
  ret i32 %3
}
declare void @llvm.assume(i1)"""
    assert LlvmModule(text).call("a b", [3, 4])[0] == 14


def test_typed_pointers_and_recursive_types():
    text = """%node = type { i32, %node* }
define i32 @f(i32* %p) {
  %n = alloca %node
  %q = getelementptr inbounds %node, %node* %n, i32 0, i32 1
  store %node* null, %node** %q
  %v = load i32, i32* %p, align 4
  ret i32 %v
}"""
    assert LlvmModule(text).call("f", [np.array([6], "i4")])[0] == 6


def test_source_line():
    m = LlvmModule(CLANG)
    load = m.program.functions["saxpy"].blocks[3].body[3]
    assert m.source_line(load).startswith("%12 = load float, ptr %11, align 4")


BIG = "9" * 5000
REFUSED = [
    (f"%y = add i32 1, {BIG}", "a number of 5,000 characters"),
    (f"%y = add i{BIG} 1, 1", "a number of 5,001 characters"),
    ("%y = add i32 1.5, 1", "expected an integer"),
    ("%y = add <2 x i32> <i32 1>, <i32 1, i32 2>", "the elements of a constant are not those of <2 x i32>"),
    ("%y = add <2 x i32> splat (i64 1), zeroinitializer", "the elements of a constant are not those of"),
    ("%y = fadd i32 1, 2", "fadd does not take these operands"),
    ("%y = fadd double 0x11112222333344445, 1.0", "at most 16 digits"),
    ("%y = select i1 true", "expected 3 operands"),
    ("%y = select i32 1, i32 2, i32 3", "select does not take these operands"),
    ("%y = select <2 x i1> zeroinitializer, <4 x i32> zeroinitializer, <4 x i32> undef", "select does not take"),
    ("%y = shufflevector <2 x i32> undef, <2 x i32> undef, i32 3", "a vector as the mask"),
    ("%y = shufflevector <2 x i32> undef, <2 x i32> undef, <1 x i32> <i32 9>", "shufflevector does not take"),
    ("%y = zext i32 %x to i32", "zext does not take these operands"),
    ("%y = zext i64 %x to i128", "zext: %x is i32, not i64"),
    ("%y = add <9999999 x i32> zeroinitializer, zeroinitializer", "a vector has 1 to 65536 elements"),
    ("store i32 1, i64 0", "store does not take these operands"),
    ("%y = call float @llvm.fabs.f32(float 1.0, float 2.0)", "the call does not fit @llvm.fabs.f32"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_wrong_operands_are_refused_at_their_line(line, message):
    text = f"declare float @llvm.fabs.f32(float)\n{body(f'  {line}')}"
    with pytest.raises(ParseError, match=re.escape(message)) as error:
        LlvmModule(text, "t.ll")
    assert error.value.location.line == 3


@pytest.mark.parametrize(("open", "close"), [("[2 x ", "]"), ("{", "}")])
def test_deep_types_are_refused(open, close):
    with pytest.raises(ParseError, match="nests too deep"):
        LlvmModule(body(f"  %y = load {open * 5000}i32{close * 5000}, ptr null"))


def test_an_alloca_that_no_machine_holds():
    with pytest.raises(ResourceError, match="asks for 100,000,000,016 bytes"):
        LlvmModule(body("  %y = alloca [99999999999 x i8]")).call("f", [1])


@pytest.mark.parametrize("text", ["attributes #0", "declare !dbg", "define void @f("])
def test_a_text_that_ends_early(text):
    with pytest.raises(ParseError):
        LlvmModule(text)


def test_a_splat_has_a_limit():
    with pytest.raises(ParseError, match="a splat has at most"):
        LlvmModule("@x = constant <999999999999 x i32> splat (i32 9)\n")


BODY = "define i64 @f(i64 %a) {\n  %s = add i64 %a, 7, !dbg !3\n  ret i64 %s\n}\n"


@pytest.mark.parametrize(
    "text",
    [
        BODY,
        "\n" + BODY.replace("!3", "!4"),
        BODY.replace("  ret", "    ret"),
        BODY.replace(", !dbg !3", "\n  , !dbg !3"),
        BODY.replace(", !dbg !3", " ; a comment\n ; another\n, !dbg !3"),
        "%a = type i64\n" + BODY,
        '@g = constant [28 x i8] c"\n  %s = add i64 %a, 7\n"\n' + BODY,
    ],
)
def test_a_line_parsed_before_means_the_same(monkeypatch, text):
    monkeypatch.setattr(instruction_memo, "_LINES", {})
    first = parse_module(text)
    instruction_memo._LINES.clear()
    parse_module(BODY)
    assert parse_module(text) == first and parse_module(text) == first


def test_an_error_after_a_line_parsed_before_is_at_its_place():
    for _ in range(2):
        with pytest.raises(ParseError, match="expected '=', found '}'") as caught:
            parse_module(BODY.replace("  ret i64 %s", "  ret i64 %s\n  %b"))
        assert caught.value.location is not None and caught.value.location.line == 5
        parse_module(BODY)
