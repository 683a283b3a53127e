"""Function combinators: composition, partial application and optional values, as a namespace of their own.

>>> pipe(abs, float)(-3)
3.0
"""

from tessera.transforms.functional import Just, Maybe, Nothing, compose, curry, maybe, pipe

__all__ = ["Just", "Maybe", "Nothing", "compose", "curry", "maybe", "pipe"]
