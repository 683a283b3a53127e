"""The command line: `tessera run | build | inspect | conformance | doctor`."""
