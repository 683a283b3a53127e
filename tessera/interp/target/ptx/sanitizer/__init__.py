"""tessera.interp.target.ptx.sanitizer"""
