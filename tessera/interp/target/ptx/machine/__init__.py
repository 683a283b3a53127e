"""tessera.interp.target.ptx.machine"""
