"""An agent's tensors in safetensors files: one file, or of a sharded agent one by each process with
its part.

A sharded tensor is cut into rows, in the order of the processes. A reader that joins them has it
whole, so any number of processes can read the files, also one that does not shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from cory.parallel import distributed


def file_names(agents: Sequence[str], count: int) -> list[str]:
    """The files of agents that are cut into `count` parts."""
    suffixes = [f"-{index + 1}-of-{count}" for index in range(count)] if count > 1 else [""]
    return [f"{agent}{suffix}.safetensors" for agent in agents for suffix in suffixes]


def write(tensors: Mapping[str, Tensor], folder: Path, agent: str) -> None:
    """Writes what this process has to write of an agent's tensors: of sharded ones its rows.

    Tensors that are whole in all processes are written by the main one. Raises an OSError or
    SafetensorError.
    """
    sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
    if not sharded and not distributed.is_main():
        return
    held = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            held[name] = tensor.to_local().contiguous()
        elif distributed.is_main():
            held[name] = tensor
    files = file_names([agent], distributed.world_size() if sharded else 1)
    save_file(held, folder / files[distributed.rank()])


class Saved(Mapping[str, Tensor]):
    """An agent's tensors in the files of a checkpoint, each read when it is asked for.

    Raises a SafetensorError or OSError if a file cannot be read.
    """

    def __init__(self, folder: Path, agent: str) -> None:
        count = max(1, len(list(folder.glob(f"{agent}-*-of-*.safetensors"))))
        files = [safe_open(folder / name, "pt") for name in file_names([agent], count)]
        self.parts: dict[str, list] = {}
        for file in files:
            for name in file.keys():  # noqa: SIM118  # a file is no mapping
                self.parts.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> Tensor:
        rows = [file.get_tensor(name) for file in self.parts[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
