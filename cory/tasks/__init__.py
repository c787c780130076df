"""Tasks that are made of settings alone: own prompts and own reward files, with `cory.train` and `cory.evaluate`."""
