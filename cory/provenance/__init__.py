"""What a run was made of, as its config.yaml records it: versions, the task's sources and data, the models."""
