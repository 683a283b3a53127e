"""Static analyses of index arithmetic over use-def chains: affine forms, intervals and divisors."""
