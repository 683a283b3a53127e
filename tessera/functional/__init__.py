"""Functions put together: composition, partial application, optional values, caches, overloads by element type."""

from tessera.functional.caches import memoize, persistent_cache
from tessera.functional.combine import compose, curry, pipe
from tessera.functional.function import current_device, function, specialize_for
from tessera.functional.maybe import Just, Maybe, Nothing, maybe
from tessera.functional.polymorphic import polymorphic

__all__ = [
    "Just",
    "Maybe",
    "Nothing",
    "compose",
    "current_device",
    "curry",
    "function",
    "maybe",
    "memoize",
    "persistent_cache",
    "pipe",
    "polymorphic",
    "specialize_for",
]
