"""Measured results, and what judges them: the paper's claims, and whether the code still gives the numbers."""
