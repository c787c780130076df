"""Tasks defined by settings alone: your own prompts and reward files, with `cory.train` and `cory.evaluation`."""
