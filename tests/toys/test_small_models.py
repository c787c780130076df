"""A small model's folder is complete or absent, and other files are not overwritten."""

import pytest

from cory.errors import UserError
from toys.small_models import cached


def test_models_are_only_written_into_an_empty_folder(tmp_path):
    def make(partial):
        (partial / "config.json").write_text("{}")

    (tmp_path / "model").mkdir()
    cached(tmp_path / "model", make)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/policy").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match=r"^output: "):
            cached(tmp_path / name, make)
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert texts == {"config.json": "{}", "policy": "mine", "file": "mine"}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "mine", "file"}
