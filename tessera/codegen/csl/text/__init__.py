"""Text of a CSL program: context, statements, tasks, DSDs, routes and files."""
