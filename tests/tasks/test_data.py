"""Data sets are read without changing values, and errors name a broken file and its line."""

import gzip
import json

import datasets
import pytest

from cory.data import load_dataset
from cory.errors import UserError


def refuses(message):
    return pytest.raises(UserError, match=f"task.dataset: .*{message}")


ROWS = [{"text": "2026-01-31", "at": None}, {"text": "007", "at": "2026-01-31T10:00:00Z"}]
ROWS += [{"text": "a\u2028b", "at": "null"}]


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.jsonl.gz", "train.json.gz"])
def test_json_texts_stay_texts(tmp_path, name):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"
    if "jsonl" not in name:
        text = json.dumps(ROWS, indent=1)
    content = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for path in (tmp_path, tmp_path / name):
        rows = load_dataset(str(path), "train", ["text"])
        assert rows.to_list() == ROWS


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz"])
def test_csv_cells_are_texts(tmp_path, name):
    content = b'prompt,answer\nNA,007\n"a, b\nc",\nnull,2026-01-31\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    rows = load_dataset(str(tmp_path / name), "train", ["prompt", "answer"])
    assert rows["prompt"][:] == ["NA", "a, b\nc", "null"]
    assert rows["answer"][:] == ["007", "", "2026-01-31"]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl, line 3"),
        ("a.jsonl", '{"text": "x"}\n7\n', "a.jsonl, line 2"),
        ("a.json", '[{"text": "x"}, "y"]', "a.json, row 2"),
        ("a.jsonl", '["x"]\n["y"]\n', "a.jsonl: expected an object per line"),
        ("a.jsonl", '{"text": "x"}\n{"text": ["x"]}', "row 2, column 'text'"),
        ("a.jsonl", '{"text": null}\n{"text": "x"}\n{"text": 7}', "row 3, column 'text'"),
        ("a.json", '[{"text": [{"n": 1}]}, {"text": [{"n": "1"}]}]', "row 2, column 'text'"),
        ("a.jsonl", '{"text": "x", "n": 1}\n{"text": "x"}', "row 2: .*'n'"),
        ("a.jsonl", '{"text": "x"}\n{"text": "y", "text": "z"}', "a.jsonl, line 2"),
        ("a.json", '[{"text": "y", "text": "z"}]', "a.json: .*'text', 'text'"),
        ("a.csv", "text,text\na,b\n", "a.csv: .*'text', 'text'"),
        ("a.csv", "text,other\na,b\na\n", "a.csv, line 3"),
        ("a.csv", "text,other\na,b\na,b,c\n", "a.csv, line 3"),
        ("a.csv", 'text\n"a"b\n', "a.csv, line 2"),
        ("a.parquet", "no parquet", "a.parquet"),
        ("a.jsonl.gz", '{"text": "x"}\n', "a.jsonl.gz"),
        ("a.csv", "text\n", "a.csv"),
        ("a.txt", "text", "a.txt"),
    ],
)
def test_a_broken_file_is_named_with_the_place(tmp_path, name, text, place):
    (tmp_path / name).write_text(text)
    with refuses(place):
        load_dataset(str(tmp_path / name), "train", ["text"])


def test_parquet_files_and_saved_datasets_are_read(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [0, 1]})
    rows.to_parquet(tmp_path / "train.parquet")
    rows.save_to_disk(tmp_path / "single")
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(tmp_path / "splits")
    for name in ("", "train.parquet", "single", "splits"):
        assert load_dataset(str(tmp_path / name), "train").to_list() == rows.to_list()
    assert load_dataset(str(tmp_path / "splits"), "test")["text"][:] == ["two"]
    with refuses("split 'valid'"):
        load_dataset(str(tmp_path / "splits"), "valid")


def test_a_split_is_one_file_or_its_numbered_parts(tmp_path):
    names = ["train", "train_small", "train-dev", "train.old"]
    names += ["part-00000-of-00002", "part-00001-of-00002"]
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    assert load_dataset(str(tmp_path), "train")["text"][:] == ["train"]
    assert load_dataset(str(tmp_path), "part")["text"][:] == names[-2:]
    (tmp_path / "part-00000-of-00002.jsonl").unlink()
    with refuses("expected 2 parts of part"):
        load_dataset(str(tmp_path), "part")
    with refuses("valid"):
        load_dataset(str(tmp_path), "valid")
    (tmp_path / "train.json").write_text('{"text": "x"}')
    with refuses("train.json', 'train.jsonl"):
        load_dataset(str(tmp_path), "train")


def test_missing_files_and_columns_are_named(tmp_path):
    for name in ("/nowhere/data.csv", "nowhere.jsonl.gz", "./nowhere"):
        with refuses(f"got '{name}'"):
            load_dataset(name, "train")
    (tmp_path / "a.csv").write_text("text\na\n")
    with refuses("column 'review'"):
        load_dataset(str(tmp_path / "a.csv"), "train", ["review"])


def test_hub_data_sets_are_read_by_the_datasets_library(monkeypatch):
    with refuses("'some/data'"):  # the tests run offline
        load_dataset("some/data", "train")

    def library(name, subset, split):
        return datasets.Dataset.from_dict({"text": [f"{name} {subset} {split}"]})

    monkeypatch.setattr(datasets, "load_dataset", library)
    assert load_dataset("some/data", "test", subset="main")["text"][:] == ["some/data main test"]
