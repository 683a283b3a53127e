"""The simulator's replacement for the vendor's host package; only `cs_python` adds this folder to sys.path."""
