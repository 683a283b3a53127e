"""tessera.ops.tensor"""
