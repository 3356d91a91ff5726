"""Run the authors' code of published methods from a checkout, to compare with."""
