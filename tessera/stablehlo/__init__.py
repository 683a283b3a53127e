"""StableHLO bridge: programs of JAX and of others in this exchange format become functions of Tessera, and back.

>>> import tessera as ts
>>> double = ts.stablehlo.load('''
... func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
...   %0 = stablehlo.add %x, %x : tensor<2xf32>
...   return %0 : tensor<2xf32>
... }''')
>>> double(ts.Tensor([1.0, 2.0]))
Tensor([2., 4.], f32)
"""

from tessera.stablehlo.exporter import export
from tessera.stablehlo.importer import load

__all__ = ["export", "load"]
