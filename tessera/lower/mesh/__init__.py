"""Graph to a mesh of processing elements: one tile program (SPMD) that each of them runs on its piece of every
tensor."""

from tessera.lower.mesh.layout_search import to_mesh
from tessera.lower.mesh.mesh_lowering import MeshShape

__all__ = ["MeshShape", "to_mesh"]
