"""Code generators: the backend contract, the registry, artifacts; one folder for each target."""
