"""Passing a run on: what is uploaded to a stand-in for the Hub, and the model card."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, sentences
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import _http as hub_http
from markdown_it import MarkdownIt
from peft import PeftModel
from stand_in import hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from cory import evaluate
from cory.agents import make_agents
from cory.config import AgentConfig, Config, HubConfig, LoraConfig, ModelConfig
from cory.errors import UserError
from cory.evaluation.folder import trained
from cory.evaluation.settings import EvaluationConfig
from cory.prompts import RolePrompts
from cory.push.stage import stage
from cory.push.upload import push
from cory.push.use import is_folder
from cory.task import Task
from cory.tasks.config import OWN, OwnConfig, OwnTaskConfig
from cory.train import announce
from cory.trainer import CoryTrainer

REPO = "user/pair"
HUB = HubConfig(REPO)


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


TASK = Task.from_prompts(sentences(12), count_good, RolePrompts())


def train(config: Config, **changes) -> tuple[Path, Config]:
    config = replace(config, iterations=2, **changes)
    return CoryTrainer(config, make_agents(config), TASK).train().folder, config


@pytest.fixture
def server(monkeypatch):
    """The stand-in, to which huggingface_hub of this process uploads."""
    with hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        # Between repetitions of a request, half a minute in all.
        monkeypatch.setattr(hub_http, "time", SimpleNamespace(sleep=lambda seconds: None))
        yield served


def staged(
    run: Path, config: Config, hub: HubConfig = HUB, evaluation: Path | None = None
) -> dict[str, bytes]:
    """What is passed on, by its name in the repository."""
    with tempfile.TemporaryDirectory() as temporary:
        stage(Path(temporary), run, config, hub, evaluation)
        return files_of(Path(temporary))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_is_uploaded_private_and_once(config, server):
    run, config = train(config)
    assert push(run, config, HUB) == f"{server.url}/{REPO}"
    repo = server.repos[REPO]
    # A large file goes to storage, without.
    assert repo["private"] and server.tokens - {""} == {"Bearer hf_secret"}
    expected = staged(run, config)
    assert {
        name: repo["files"][name] for name in repo["files"] if name != ".gitattributes"
    } == expected
    model = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    agents = {f"{agent}/{name}" for agent in ("agent_1", "agent_2") for name in model}
    assert set(expected) == {"README.md", "curves.png"} | agents
    uploads = server.uploads
    push(run, config, HUB)
    assert len(repo["commits"]) == 1 and server.uploads == uploads == 3
    settings = EvaluationConfig(queries=4, output=str(run.parent / "evaluation"))
    evaluate([run], TASK, settings)
    push(run, config, HUB)
    assert repo["commits"][1:] == [["README.md"]]
    assert "± " in repo["files"]["README.md"].decode()


def test_an_interrupted_upload_is_repeated(config, server):
    run, config = train(config)
    server.refused = {2}
    with pytest.raises(
        UserError, match=r"hub\.push: the upload to 'user/pair' failed, and can be repeated: .*403"
    ):
        push(run, config, HUB)
    assert server.repos[REPO]["commits"] == [] and len(server.stored) == 2
    server.uploads, server.refused = 0, set()
    push(run, config, HUB)
    assert server.uploads == 1 and "agent_2/model.safetensors" in server.repos[REPO]["files"]


def test_a_public_repository_has_to_be_asked_for(config, server):
    run, config = train(config)
    push(run, config, replace(HUB, public=True))
    assert not server.repos[REPO]["private"]
    with pytest.raises(
        UserError,
        match="expected a private repository, or --public, got 'user/pair', which is public",
    ):
        push(run, config, HUB)
    server.repos[REPO]["private"] = True
    push(run, config, replace(HUB, public=True))
    assert not server.repos[REPO]["private"] and len(server.repos[REPO]["commits"]) == 1


def test_a_repository_holds_the_agents_of_the_last_push_alone(config, server):
    run, config = train(config)
    push(run, config, HUB)
    server.repos[REPO]["files"] |= {"agent_2/old.json": b"{}", "notes.txt": b"mine"}
    push(run, config, HUB)
    assert server.repos[REPO]["commits"][1:] == [["agent_2/old.json"]]
    assert server.repos[REPO]["files"]["notes.txt"] == b"mine"


def test_a_run_is_uploaded_at_its_end(config, server, capsys):
    run, _ = train(config, hub=HUB)
    assert f"Uploaded to {server.url}/{REPO}" in capsys.readouterr().out
    assert "agent_1/model.safetensors" in server.repos[REPO]["files"]
    server.refused = set(range(100))
    server.stored.clear()
    again = str(run.parent / "again")
    failed, _ = train(
        config, hub=HubConfig(REPO, public=True, base="org/base"), output=again, seed=1
    )
    said = capsys.readouterr().err
    assert (
        "failed, and can be repeated" in said
        and f"python -m cory.push {failed} {REPO} --public --base org/base\n" in said
    )
    assert (failed / "summary.json").exists()


def test_a_full_disk_while_a_run_is_uploaded_leaves_the_command(
    config, server, monkeypatch, capsys
):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    run, _ = train(config, hub=HUB)
    said = capsys.readouterr().err
    assert "OSError: [Errno 28] No space left on device\nThe run is complete. Upload it" in said
    assert (run / "summary.json").exists()


def test_resuming_a_finished_run_prints_the_command_that_uploads_it(config, server, capsys):
    run, config = train(config)
    assert "cory.push" not in capsys.readouterr().out
    train(config, resume=str(run), hub=replace(HUB, public=True))
    assert (
        f"To upload this run: python -m cory.push {run} {REPO} --public\n"
        in capsys.readouterr().out
    )
    assert not server.repos


def test_without_a_token_nothing_is_begun(config, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    wanted = replace(config, hub=HUB)
    for begin in (lambda: announce(wanted, "run"), lambda: train(config, hub=HUB)):
        with pytest.raises(
            UserError,
            match=r"hub\.push: expected a token to upload to 'user/pair', got none: run `hf",
        ):
            begin()
    assert not Path(config.output).exists()
    with pytest.raises(UserError, match=r"hub\.push: expected null or user/name, got '../name'"):
        HubConfig("../name")


@pytest.mark.parametrize("rank", [0, 2])
def test_nothing_of_the_machine_is_uploaded(config, rank, capsys, policy_folder, tmp_path):
    run, config = train(config, lora=LoraConfig(rank=rank))
    (run / "agent_1/optimizer.bin").write_bytes(b"state")
    (run / "agent_1/tokenizer_config.json").write_text(
        json.dumps(
            json.loads((run / "agent_1/tokenizer_config.json").read_text())
            | {"vocab_file": str(policy_folder)}
        )
    )
    capsys.readouterr()
    files = staged(run, config)
    said = capsys.readouterr().err
    assert (
        f"Not uploaded: {run}/agent_1/optimizer.bin" in said
        and "is a local folder, so nobody else" in said
    )
    for name, content in files.items():
        for place in (str(tmp_path), str(policy_folder), str(Path.home()) + "/"):
            assert place.encode() not in content, (name, place)
        text = name.endswith((".json", ".md"))
        assert not text or not re.search(
            rf"\b{re.escape(socket.gethostname())}\b", content.decode()
        ), name
    assert b"Adam" in files["README.md"] and not any("checkpoint" in name for name in files)
    for name, content in files.items():
        (tmp_path / "look" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "look" / name).write_bytes(content)
    if rank:
        assert (
            json.loads(files["agent_1/adapter_config.json"])["base_model_name_or_path"]
            == policy_folder.name
        )
        base = AutoModelForCausalLM.from_pretrained(policy_folder)
        model = PeftModel.from_pretrained(base, str(tmp_path / "look"), subfolder="agent_1")
        assert (
            b'PeftModel.from_pretrained(base, "user/pair", subfolder="agent_1")'
            in files["README.md"]
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "look", subfolder="agent_1")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "look", subfolder="agent_1")
    assert (
        model.generate(**tokenizer("the film", return_tensors="pt"), max_new_tokens=2).shape[1] > 2
    )


def test_the_card_says_what_it_is_about(config, policy_folder, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(policy_folder, base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    run, config = train(replace(config, model=replace(config.model, name=str(base))))
    evaluation = evaluate(
        [run], TASK, EvaluationConfig(queries=4, output=str(run.parent / "evaluation"))
    )
    card = ModelCard(staged(run, config, replace(HUB, base="org/base"))["README.md"].decode())
    data = card.data.to_dict()
    assert (
        data["base_model"] == "org/base"
        and data["license"] == "apache-2.0"
        and data["library_name"] == "transformers"
    )
    page = MarkdownIt("commonmark").enable("table").render(card.text)
    for heading in ("Use", "Training", "Evaluation", "Samples", "Limits", "Settings"):
        assert f"<h2>{heading}</h2>" in page
    assert (
        "[org/base](https://huggingface.co/org/base)" in card.text
        and '<img src="curves.png"' in page
    )
    row = next(row for row in evaluation.rows if row["name"].endswith("agent_2 after agent_1"))
    assert (
        f"<td>agent_2 after agent_1</td>\n<td>{row['task_reward']:.3f} ± {row['task_reward_ci']:.3f}</td>"
        in page
    )
    # One row of numbers, one of costs.
    assert card.text.count("\n| base |") == 2
    # Trained on: another evaluation's results are not this run's.
    settings = json.loads((evaluation.folder / "settings.json").read_text())
    (evaluation.folder / "settings.json").write_text(
        json.dumps(settings | {"trained": {str(run): "other"}})
    )
    assert "not evaluated on held-out" in staged(run, config)["README.md"].decode()
    with pytest.raises(UserError, match="evaluation: expected the folder of an evaluation of"):
        staged(run, config, HUB, evaluation.folder)


def test_a_card_has_the_rows_of_its_run_and_of_the_bases_alone(config):
    run, config = train(config)
    folder = run.parent / "evaluation"
    folder.mkdir()
    settings = {"trained": {"elsewhere/two": trained([str(run)])[str(run)], "other": "another"}}
    (folder / "settings.json").write_text(json.dumps(settings))
    of_run = [
        "base",
        "base after itself",
        "base of two/agent_2",
        "two/agent_1",
        "two/agent_1 after itself",
        "two/agent_2 after agent_1",
        "two/agent_3 after agent_2 after agent_1",
    ]
    others = [
        "org/base",
        "base of other/agent_2",
        "other/agent_1",
        "other/agent_2 after two/agent_1",
        "two/agent_2 after other/agent_1",
        "also_two/agent_1",
    ]

    def rows_on_card(names):
        rows = [{"name": name, "task_reward": 1.0} for name in names]
        results = {"said": "4 queries", "titles": {"task_reward": "task reward"}, "rows": rows}
        (folder / "evaluation.json").write_text(json.dumps(results))
        return re.findall(r"^\| (.+) \| 1 \|$", staged(run, config)["README.md"].decode(), re.M)

    assert rows_on_card([*others, *of_run]) == [name.replace("two/", "") for name in of_run]
    assert rows_on_card([*others, *of_run[:3]]) == []  # the run's agents were not evaluated yet


def test_a_run_is_pushed_with_the_base_that_its_settings_name(
    config, command, tmp_path, monkeypatch
):
    run, config = train(config, lora=LoraConfig(rank=2), hub=HubConfig(base="org/base"))
    monkeypatch.chdir(run)
    for flags, base in (((), "org/base"), (("--base", "org/other"), "org/other")):
        look = tmp_path / base.replace("/", "_")
        ended = command("cory.push", ".", REPO, "--look", look, *flags)
        assert ended.status == 0, ended.error
        adapter = json.loads((look / "agent_1/adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == base
        assert "nobody else" not in ended.error


def test_one_base_of_the_hub_cannot_stand_for_two_local_ones(config, policy_folder, tmp_path):
    folders = [shutil.copytree(policy_folder, tmp_path / name) for name in ("a", "b")]
    agents = [AgentConfig(model={"name": str(folder)}) for folder in folders]
    run, config = train(config, lora=LoraConfig(rank=2), agents=agents)
    with pytest.raises(
        UserError,
        match=r"hub\.base: expected null for agents on different local bases, \['.*/a', '.*/b'\], got 'org/base'",
    ):
        staged(run, config, replace(HUB, base="org/base"))
    with pytest.raises(UserError, match=r"hub\.base: expected null"):  # and before training
        train(config, hub=replace(HUB, base="org/base"), output=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    bases = [
        json.loads(staged(run, config)[f"{agent}/adapter_config.json"])["base_model_name_or_path"]
        for agent in ("agent_1", "agent_2")
    ]
    assert bases == ["a", "b"]


def test_what_is_local_is_not_taken_for_a_repository(config, policy_folder, tmp_path, monkeypatch):
    """Names such as models/gpt2, from a folder in which they are not."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(policy_folder, "models/gpt2")
    Path("data/films").mkdir(parents=True)
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in sentences(12))
    Path("data/films/train.jsonl").write_text(rows)
    Path("rewards.py").write_text("def good(completions):\n    return [0.5] * len(completions)\n")
    task = OwnTaskConfig(dataset="data/films", reward="rewards.py:good")
    changes = {"iterations": 1, "model": ModelConfig("models/gpt2"), "lora": LoraConfig(rank=2)}
    own = OwnConfig(**{**vars(config), **changes, "task": task})
    run = CoryTrainer(own, make_agents(own), OWN.make_task(own)).train().folder

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    card = ModelCard(staged(run, own)["README.md"].decode())
    assert not {"base_model", "datasets"} & card.data.to_dict().keys()
    assert 'from_pretrained("path/to/gpt2"' in card.text and "huggingface.co/m" not in card.text


def test_a_model_of_the_hub_stays_one_beside_a_folder_of_its_name(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/model").mkdir(parents=True)
    assert not is_folder(config, "org/model", "commit:abc")
    assert is_folder(config, "org/model", "")  # of a run that could not identify it


def test_a_response_acts_neither_as_markdown_nor_as_html(config):
    run, config = train(config)
    summary = json.loads((run / "summary.json").read_text())
    hostile = "```\n# Heading\n<script>alert(1)</script> ![](https://example.org/x.png) ````\n---\n"
    for part in summary["samples"].values():
        for samples in part.values():
            samples[0] |= {"query": hostile, "completion": hostile}
    (run / "summary.json").write_text(json.dumps(summary))
    text = ModelCard(staged(run, config)["README.md"].decode()).text
    page = MarkdownIt("commonmark").enable("table").render(text)
    assert "alert(1)" in page and "<script>" not in page
    assert "Heading" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)
    assert re.findall(r'<img src="([^"]+)"', page) == ["curves.png"]


def test_the_command(config, tmp_path):
    """As a process of its own: a folder to look at, a run without a token, an upload, a run that has not ended."""
    run, config = train(config)

    def command(*words, **variables):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path / "hf"),
            **variables,
        }
        environment.pop("HF_TOKEN" if "HF_TOKEN" not in variables else "", None)
        words = [sys.executable, "-m", "cory.push", str(run), *words]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    assert command(REPO, "--look", str(tmp_path / "look")).returncode == 0
    assert files_of(tmp_path / "look") == staged(run, config)
    # It may be sent to somebody else.
    assert not any(path.is_symlink() for path in (tmp_path / "look").rglob("*"))
    done = command(REPO)
    assert (
        done.returncode == 2
        and "expected a token" in done.stderr
        and "Traceback" not in done.stderr
    )
    with hub() as served:
        online = {
            "HF_ENDPOINT": served.url,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_x",
            "HF_HUB_DISABLE_XET": "1",
        }
        done = command(REPO, "--public", **online)
        assert (
            done.stdout.strip().endswith(f"{served.url}/{REPO}")
            and not served.repos[REPO]["private"]
        ), done.stderr
        assert "hf_x" not in done.stdout + done.stderr
    done = command(REPO, HF_TOKEN="hf_x")  # offline, as the tests are
    assert (
        done.returncode == 2
        and "failed, and can be repeated" in done.stderr
        and "Traceback" not in done.stderr
    )
    (run / "summary.json").unlink()
    done = command(REPO, HF_TOKEN="hf_x")
    assert (
        done.returncode == 2
        and "expected a run with saved agents, got one that has not ended" in done.stderr
    )
