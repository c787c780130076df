"""The frame of a command: settings from flags and YAML files, `--help`, messages. It does not import torch."""
