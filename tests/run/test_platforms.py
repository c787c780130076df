"""Other machines than Linux with or without CUDA, as far as one of those can tell."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cory.models.drawing import draw
from cory.parallel.devices import choose_device
from cory.streams import Purpose, Stream


def run(code: str, *arguments: str) -> str:
    """What a program prints, run in a process of its own: the first device that one chooses stays."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


PRINT = """
from cory.cli.main import main
main(lambda: print("Le caf\u00e9"))
"""


def test_a_terminal_without_a_letter_shows_its_number(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert run(PRINT) == "Le caf\\xe9\n"


# Apple

CHOOSE = """
import sys, torch
true = lambda: True
torch.backends.mps.is_available = torch.backends.mps.is_built = torch.accelerator.is_available = true
from cory.parallel.devices import choose_device
print(choose_device(sys.argv[1]).type)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto takes this machine's GPU")
def test_auto_is_the_cpu_where_there_is_an_apple_gpu():
    assert run(CHOOSE, "auto") == "cpu\n"


def test_an_apple_gpu_can_be_asked_for():
    assert run(CHOOSE, "mps") == "mps\n"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_absent_apple_gpu():
    from cory.errors import UserError

    with pytest.raises(
        UserError,
        match="device: expected a device of this machine, which has no Apple GPU, got 'mps'",
    ):
        choose_device("mps")


class WithoutFloat64(TorchDispatchMode):
    """Raises for a float64 tensor on an Apple GPU, as PyTorch does there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and result.device.type == "mps"
            and result.dtype == torch.float64
        ):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


def test_tokens_for_an_apple_gpu_are_drawn_without_its_float64():
    """On fake tensors: devices and types are those of the operations, without a device or numbers."""
    with FakeTensorMode():
        probabilities = torch.rand(3, 10, device="mps")
        generator = Stream(0, Purpose.SAMPLING).torch("mps")
        with WithoutFloat64():
            tokens = draw(probabilities, generator)
    assert tokens.device.type == "mps" and tokens.shape == (3, 1) and tokens.dtype == torch.int64
