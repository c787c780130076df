"""How an LLM is loaded, shared and sampled.

PEFT imports bitsandbytes wherever it is installed: seconds, and a line on stderr, which only 4 and 8 bit models need. So
PEFT is told here that it is not there; `load.quantization` takes that back.
"""

import sys

from peft import import_utils

AVAILABLE = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)  # PEFT asks, and remembers the answer

if "bitsandbytes" not in sys.modules:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # importlib then finds no such package
    for available in AVAILABLE:
        available.cache_clear()
        available()
    del sys.modules["bitsandbytes"]
