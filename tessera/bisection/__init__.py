"""Bisection: the first step of a lowering after which results lie outside their bound, and what shows it."""

from tessera.bisection.reduce import Part, reduced
from tessera.bisection.walk import Verdict, walk

__all__ = ["Part", "Verdict", "reduced", "walk"]
