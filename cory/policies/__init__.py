"""How an LLM is loaded, shared and sampled.

PEFT imports bitsandbytes wherever it is installed: seconds, and a line on stderr, which only 4 and 8 bit models need.
So PEFT is imported here as if it were not there; `load.quantization` takes that back.
"""

import sys

_hidden = "bitsandbytes" not in sys.modules and "peft" not in sys.modules
if _hidden:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # importlib then finds no such package

from peft import import_utils  # noqa: E402

AVAILABLE = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)  # PEFT remembers what they say
for _available in AVAILABLE:
    _available()
if _hidden:
    del sys.modules["bitsandbytes"]
