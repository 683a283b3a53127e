"""PTX instruction set: one module for each family of instructions."""
