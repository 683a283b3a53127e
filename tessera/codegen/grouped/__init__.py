"""Whole-function vectorisation of groups: the tiles of a group as one program, one vector lane for each tile."""

from tessera.codegen.grouped import control_flow, diagnostics, suspension_points, vectoriser
from tessera.codegen.grouped.vectoriser import ungroup_launches, vectorise_groups

assert control_flow and vectoriser and suspension_points and diagnostics
__all__ = ["ungroup_launches", "vectorise_groups"]
