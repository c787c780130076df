"""Names of runs and evaluations, for their folders."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cory.run.settings import FREE

LONGEST = 80  # bytes of a name; a longer one ends in a hash


def run_name(setting: str, changed: Mapping[str, Any]) -> str:
    """The name of a run: its setting, and what its flags have changed there, unless that may differ on resume.

    Args:
        setting: of the method and the configuration file, such as imdb_cory_tiny.
        changed: keys, dotted, and their values.

    >>> run_name("imdb_cory_tiny", {"cory.credit": "causal", "iterations": 20, "seed": 3})
    'imdb_cory_tiny-credit=causal-seed3'
    """
    parts = [setting]
    for key in sorted(changed, key=lambda key: (key == "seed", key)):
        if key in FREE or key.split(".")[0] in FREE:
            continue
        if key == "seed":  # as in the runs of an experiment, which reports put together
            parts.append(f"seed{changed[key]}")
        else:
            parts.append(f"{key.split('.')[-1]}={_value(changed[key])}")
    return _short("-".join(parts))


def evaluation_name(models: Sequence[str]) -> str:
    """The name of an evaluation: those of its runs, or of its models.

    >>> evaluation_name(["runs/imdb_cory_tiny", "runs/imdb_ppo_tiny"])
    'evaluation-imdb_cory_tiny-imdb_ppo_tiny'
    """
    return _short("-".join(["evaluation", *(Path(model).name for model in models)]))


def _value(value: Any) -> str:
    """A value in a name: of a path its last part, of a list (also of agents or roles) or a block a hash."""
    if isinstance(value, (list, dict)):
        return hashlib.sha256(
            json.dumps(value, sort_keys=True, default=asdict).encode()
        ).hexdigest()[:8]
    return Path(value).name if isinstance(value, str) else json.dumps(value)


def _short(name: str) -> str:
    """The name as that of a folder on any system; a long one with a hash in place of its end."""
    name = re.sub(r"[^\w.=+-]", "_", name)
    encoded = name.encode()
    if len(encoded) <= LONGEST:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{encoded[: LONGEST - 9].decode(errors='ignore')}-{digest}"
