"""Pure functions from facts to findings, one module per subject."""
