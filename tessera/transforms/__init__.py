"""Function transforms: automatic differentiation, vectorisation, control flow, numeric policies and function
combinators."""
