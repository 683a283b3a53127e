"""PTX text: lexer, parser, syntax tree and constant expressions."""
