"""How an LLM is loaded, shared and sampled.

PEFT imports bitsandbytes if it is installed, which takes seconds and prints to stderr; only 4 bit
models need it. So PEFT is imported here with bitsandbytes hidden; `load.quantization` reverts
that.
"""

import sys

_hidden = "bitsandbytes" not in sys.modules and "peft" not in sys.modules
if _hidden:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # importlib then finds no such package

from peft import import_utils  # noqa: E402

# PEFT remembers what they say.
AVAILABLE = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)
for _available in AVAILABLE:
    _available()
if _hidden:
    del sys.modules["bitsandbytes"]
