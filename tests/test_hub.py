"""Sharing a run on the Hub: the uploaded files (here, to a stand-in for the Hub) and the text of the model card."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_config, sentences
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from cory.build import make_agents
from cory.config import AgentConfig, LoraConfig, ModelConfig, RoleConfig
from cory.errors import UserError
from cory.hub import upload
from cory.models.load import load_policy
from cory.roles import RolePrompts
from cory.run.card import model_card
from cory.task import Task
from cory.trainer import CoryTrainer

REPOSITORY = "user/pair"


@pytest.fixture(scope="module")
def adapters(policy_folder, tmp_path_factory):
    """The folder of a run with LoRA adapters."""
    config = make_config(policy_folder, tmp_path_factory.mktemp("adapters"))
    config = replace(config, iterations=1, lora=LoraConfig(rank=2))
    task = Task.from_prompts(sentences(8), lambda prompts: [0.0] * len(prompts), RolePrompts())
    return CoryTrainer(config, make_agents(config), task).train().folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the Hub."""

    class Api:
        endpoint = "https://hub"
        private = None  # no repository has been created
        folder = tmp_path / "hub"

        def create_repo(self, repository, private, exist_ok):
            assert repository == REPOSITORY and exist_ok
            hub.private = private

        def upload_folder(self, repo_id, folder_path, **_):
            assert repo_id == REPOSITORY
            shutil.copytree(folder_path, hub.folder, dirs_exist_ok=True)

    hub = Api()
    monkeypatch.setattr("cory.hub.HfApi", lambda: hub)
    return hub


def executed(card: str, paths: dict) -> dict:
    """Executes a card's code, with its paths replaced, and returns the names that it defines."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for path, real_path in paths.items():
        assert path in code
        code = code.replace(path, str(real_path))
    names = {}
    exec(compile(code, "card", "exec"), names)
    return names


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_the_cards_code_loads_the_agents_and_no_local_path_is_uploaded(
    finished, adapters, policy_folder, hub, kind
):
    run = finished.folder if kind == "full" else adapters
    assert upload(run, REPOSITORY, public=False) == f"https://hub/{REPOSITORY}"
    assert hub.private
    base = {"path/to/gpt2": policy_folder} if kind == "adapters" else {}
    card = (hub.folder / "README.md").read_text()
    names = executed(card, {REPOSITORY: hub.folder, **base})
    ids = torch.tensor([[3, 7, 11, 19]])
    for agent in ("agent_1", "agent_2"):
        paths = {f"path/to/{agent}": run / agent, **base}
        alone = executed((run / agent / "README.md").read_text(), paths)[agent]
        model, _ = load_policy(ModelConfig(str(run / agent)))
        with torch.no_grad():
            logits = model.eval()(ids).logits
            for loaded in (names[agent], alone):
                assert torch.allclose(loaded.eval()(ids).logits, logits, atol=1e-5)
        assert names[agent.replace("agent", "tokenizer")](sentences(1)[0])["input_ids"]

    files = [file for file in hub.folder.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} == {"hub", "agent_1", "agent_2"}
    for file in [*files, *run.glob("agent_*/README.md")]:
        for path in (run.parent, policy_folder, Path.home()):
            assert f"{path}/".encode() not in file.read_bytes(), file
            assert f'{path}"'.encode() not in file.read_bytes(), file


def test_a_link_in_an_agents_folder_is_refused(adapters, hub, tmp_path):
    run = shutil.copytree(adapters, tmp_path / "run")
    (tmp_path / "token").write_text("secret")
    (run / "agent_1/notes.txt").symlink_to(tmp_path / "token")
    with pytest.raises(UserError, match=r"agent_1/notes\.txt: "):
        upload(run, REPOSITORY, public=False)
    assert not hub.folder.exists()


def test_the_cards_code_names_the_revision_of_the_base(config, adapters):
    agents = [AgentConfig(model={"name": "org/base", "revision": "abc"}), AgentConfig()]
    card = model_card({"agent_1": adapters / "agent_1"}, replace(config, agents=agents), {}, 3)
    assert 'AutoModelForCausalLM.from_pretrained("org/base", revision="abc", dtype=' in card


def test_look_uploads_nothing_and_writes_the_files_of_an_upload(
    finished, hub, command, monkeypatch, tmp_path
):
    run = finished.folder
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = command("cory.hub", run, REPOSITORY, "--look")
    folder = Path(ended.out.strip().rpartition(" ")[2])
    assert ended.status == 0 and (folder / "agent_2/model.safetensors").exists()
    upload(run, REPOSITORY, public=True)
    assert hub.private is False
    for file in hub.folder.rglob("*.*"):
        assert (folder / file.relative_to(hub.folder)).read_bytes() == file.read_bytes()
    ended = command("cory.hub", run, "../pair", "--look")
    assert ended.status == 2 and ended.error.startswith("error: repository: ")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_agent_that_cannot_be_loaded_is_not_shared(finished, tmp_path, name):
    run = shutil.copytree(finished.folder, tmp_path / "run")
    os.truncate(run / "agent_2" / name, 1000 if name == "model.safetensors" else 20)
    with pytest.raises(UserError, match="agent_2"):
        upload(run, REPOSITORY, public=False)


def test_an_adapter_that_cannot_be_loaded_is_not_shared(adapters, tmp_path):
    run = shutil.copytree(adapters, tmp_path / "run")
    os.truncate(run / "agent_1/adapter_model.safetensors", 1000)
    with pytest.raises(UserError, match="agent_1"):
        upload(run, REPOSITORY, public=False)


def test_an_unreachable_hub_gives_one_line(finished, hub, command, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network\nat all")

    monkeypatch.setattr(hub, "create_repo", fail)
    with pytest.raises(UserError, match=r"^repository: 'user/pair'.*no network\\nat all"):
        upload(finished.folder, REPOSITORY, public=False)


def test_the_card_states_models_prompts_and_reward(config):
    fingerprint = {
        "prompts": {"pioneer": "{prompt}", "observer": "better than {response}: {prompt}"},
        "reward": "good.py:count_good",
        "rows": 12,
    }
    agents = [AgentConfig(model={"name": "org/base"}), AgentConfig(trained=False)]
    folders = {name: Path(name) for name in ("agent_1", "agent_2")}
    card = ModelCard(model_card(folders, replace(config, agents=agents), fingerprint, 3))
    assert card.data.base_model == ["org/base"] and card.data.library_name == "transformers"
    for text in ("good.py:count_good", "'better than {response}: {prompt}'", "not trained"):
        assert text in card.text


def test_texts_in_a_card_act_neither_as_markdown_nor_as_html(config):
    hostile = "```\n# Heading\n<script>alert(1)</script> ![](https://example.org/x.png) ````\n---\n{prompt}"
    config = replace(config, roles=[RoleConfig(prompt=hostile), RoleConfig()])
    fingerprint = {"reward": hostile, "rows": 1}
    card = model_card({"agent_1": Path("agent_1")}, config, fingerprint, 1, REPOSITORY)
    page = MarkdownIt("commonmark").enable("table").render(ModelCard(card).text)
    assert "alert(1)" in page and "<script>" not in page and "<img" not in page
    assert "Heading" not in " ".join(re.findall(r"<h\d>(.*?)</h\d>", page))
