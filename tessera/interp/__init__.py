"""The interpreters: what each level of a program means, on NumPy."""
