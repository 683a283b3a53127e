"""The interpreters, one for each level: they are the meaning of the language."""
