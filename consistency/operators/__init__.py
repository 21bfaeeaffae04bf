"""One file per operator: numeric contract, formula, kernel call, gradient."""
