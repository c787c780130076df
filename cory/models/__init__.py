"""Loading, sharing and sampling of language models.

If bitsandbytes is installed, PEFT imports it, which takes seconds and prints to stderr. Only 4-bit models need it, so
PEFT is imported here with bitsandbytes hidden. `load.quantization` makes it visible again.
"""

import sys

_hidden = "bitsandbytes" not in sys.modules and "peft" not in sys.modules
if _hidden:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # importlib then finds no such package

from peft import import_utils  # noqa: E402

# PEFT caches the results of these functions, so they are called while bitsandbytes is hidden.
AVAILABLE = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)
for _available in AVAILABLE:
    _available()
if _hidden:
    del sys.modules["bitsandbytes"]
