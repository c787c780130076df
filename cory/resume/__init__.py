"""How a run continues: the format of its checkpoints, which one `--resume` takes, and what may have changed since."""
