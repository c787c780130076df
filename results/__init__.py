"""Measured results, with scripts that judge the paper's claims and check that the code still gives the numbers."""
