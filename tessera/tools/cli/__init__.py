"""The command line: `tessera run | build | check | debug | inspect | conformance | ptx | csl | doctor`."""
