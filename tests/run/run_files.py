"""Reads the files of a run's folder for comparisons."""

import json
from pathlib import Path

AGENTS = ["agent_1", "agent_2"]


def outcome(folder: Path, agents=AGENTS):
    """Returns the files that must be equal to the bit: metrics, samples, final weights."""
    files = [folder / "metrics.jsonl", folder / "samples.jsonl"]
    files += [file for agent in agents for file in sorted((folder / agent).glob("*.safetensors"))]
    assert len(files) > 2
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def same(a, b):
    """Asserts that two runs have the same outcome."""
    a, b = outcome(a), outcome(b)
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def content(folder: Path) -> dict[str, bytes]:
    """Returns all files of a run that are not hidden."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def summary_of(folder: Path):
    return json.loads((folder / "summary.json").read_text())
