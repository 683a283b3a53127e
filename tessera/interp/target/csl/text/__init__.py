"""CSL text: tokens, syntax tree, recursive-descent parser, diagnostics."""
