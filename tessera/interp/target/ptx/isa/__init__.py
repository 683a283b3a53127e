"""tessera.interp.target.ptx.isa"""
