"""tessera.codegen.csl.text"""
