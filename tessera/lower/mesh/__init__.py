"""Graph to a mesh of processing elements: one tile program that each of them runs on its piece of every tensor."""

from tessera.lower.mesh.pieces import Mesh
from tessera.lower.mesh.to_mesh import to_mesh

__all__ = ["Mesh", "to_mesh"]
