"""Reference interpreters, one for each IR level: they define what programs mean."""
