"""tessera.interp.target.ptx.text"""
