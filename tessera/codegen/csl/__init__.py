"""Programs for a mesh of processing elements, through CSL."""

from tessera.codegen.csl.generator import Csl

BACKEND = Csl()
