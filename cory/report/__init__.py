"""How a run, an evaluation or a comparison is shown."""
