"""One element: its conversions, the table of pointwise ops, and the scalar functions as formulas."""
