"""The CSL libraries and hardware builtins that are written in Python."""
