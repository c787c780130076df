"""What a run reads and writes: settings, folder, records, output, signals."""
