"""What a run reads and writes: settings, folder, checkpoints, processes, signals."""
