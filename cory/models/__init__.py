"""Loading, sharing and sampling of language models.

PEFT imports bitsandbytes if it is installed, which takes seconds and prints to stderr, though only 4-bit models need
it. PEFT is therefore imported here with bitsandbytes hidden; `load.quantization` reverts that.
"""

import sys

_hidden = "bitsandbytes" not in sys.modules and "peft" not in sys.modules
if _hidden:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # importlib then finds no such package

from peft import import_utils  # noqa: E402

# PEFT caches the results of these functions.
AVAILABLE = (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available)
for _available in AVAILABLE:
    _available()
if _hidden:
    del sys.modules["bitsandbytes"]
