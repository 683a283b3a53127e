"""Tools: the command line, the debugger, bisection, static checking and performance models."""
