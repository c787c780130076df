"""Experiments, comparisons and tables, for scientific statements about runs. `cory` never imports this package."""
