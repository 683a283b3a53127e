"""Code generators: the contract with the compiler, artifacts, host plans; one package for each target."""
