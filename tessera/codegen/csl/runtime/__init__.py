"""Host side of the CSL target: the script that runs a program, and simulated runs."""
