"""What runs on the host: the driver, launches and their graphs, reports, and the interpreter in place of a GPU."""
