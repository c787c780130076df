"""Sharing a run: what is uploaded to a stand-in for the Hub, and what the model card says."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import sentences
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from cory import evaluate
from cory.agent import make_agents
from cory.config import AgentConfig, EvaluationConfig, LoraConfig, RoleConfig
from cory.hub import model_card, upload, write_folder
from cory.roles import RolePrompts
from cory.task import Task
from cory.trainer import CoryTrainer

REPOSITORY = "user/pair"


def count_good(prompts, completions):
    return [float(completion.count("good")) for completion in completions]


TASK = Task.from_prompts(sentences(12), count_good, RolePrompts())


def trained(config, **changes):
    config = replace(config, iterations=1, **changes)
    agents = make_agents(config)
    return CoryTrainer(config, agents, TASK).train().folder, agents


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the Hub."""

    class Api:
        endpoint = "https://hub"
        private = None  # there is no repository
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


def executed(card: str, places: dict) -> dict:
    """The names that the code of a card defines, its places replaced."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    for place, real in places.items():
        assert place in code
        code = code.replace(place, str(real))
    names = {}
    exec(compile(code, "card", "exec"), names)
    return names


@pytest.mark.parametrize("rank", [0, 2])
def test_the_cards_load_the_agents(config, hub, rank):
    run, agents = trained(config, lora=LoraConfig(rank=rank))
    assert upload(run, REPOSITORY, public=False) == f"https://hub/{REPOSITORY}"
    assert hub.private
    base = {"path/to/gpt2": config.model.name} if rank else {}
    names = executed((hub.folder / "README.md").read_text(), {REPOSITORY: hub.folder, **base})
    ids = torch.tensor([[3, 7, 11, 19]])
    for agent in agents:
        agent.activate()
        places = {f"path/to/{agent.name}": run / agent.name, **base}
        alone = executed((run / agent.name / "README.md").read_text(), places)
        with torch.no_grad():
            logits = agent.policy.eval()(ids).logits
            for loaded in (names[agent.name], alone[agent.name]):
                assert torch.allclose(loaded.eval()(ids).logits, logits, atol=1e-5)
        assert names[agent.name.replace("agent", "tokenizer")](sentences(1)[0])["input_ids"]


@pytest.mark.parametrize("rank", [0, 2])
def test_nothing_of_the_machine_is_passed_on(config, hub, rank, tmp_path, policy_folder):
    run, _ = trained(config, lora=LoraConfig(rank=rank))
    upload(run, REPOSITORY, public=False)
    files = [file for file in hub.folder.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} == {"hub", "agent_1", "agent_2"}
    for file in [*files, *run.glob("agent_*/README.md")]:
        for place in (tmp_path, policy_folder, Path.home()):
            assert f"{place}/".encode() not in file.read_bytes(), file
            assert f'{place}"'.encode() not in file.read_bytes(), file


def test_a_look_uploads_nothing_and_says_where_it_is(config, hub, command, monkeypatch, tmp_path):
    run, _ = trained(config)
    monkeypatch.setattr("huggingface_hub.HfApi", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = command("cory.hub", run, REPOSITORY, "--look")
    folder = Path(ended.out.strip().rpartition(" ")[2])
    assert ended.status == 0 and (folder / "agent_2/model.safetensors").exists()
    upload(run, REPOSITORY, public=False)
    for file in hub.folder.rglob("*.*"):
        assert (folder / file.relative_to(hub.folder)).read_bytes() == file.read_bytes()
    ended = command("cory.hub", run, "../pair", "--look")
    assert (
        ended.status == 2
        and ended.error == "error: repository: expected user/name, got '../pair'\n"
    )


@pytest.mark.parametrize("public", [True, False])
def test_a_new_repository_is_as_private_as_asked_for(config, hub, public):
    run, _ = trained(config)
    upload(run, REPOSITORY, public)
    assert hub.private != public


def card_of(run: Path) -> ModelCard:
    folder = run.parent / "look"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_folder(folder, run, REPOSITORY)
    return ModelCard((folder / "README.md").read_text())


def test_the_card_says_what_the_agents_are(config):
    fingerprint = {
        "prompts": {"pioneer": "{prompt}", "observer": "better than {response}: {prompt}"},
        "reward": "good.py:count_good",
        "rows": 12,
    }
    own = replace(
        config, agents=[AgentConfig(model={"name": "org/base"}), AgentConfig(trained=False)]
    )
    card = ModelCard(
        model_card({"agent_1": Path("agent_1"), "agent_2": Path("agent_2")}, own, fingerprint, 3)
    )
    assert card.data.base_model == ["org/base"] and card.data.library_name == "transformers"
    shown = " ".join(card.text.split())
    for text in (
        "* agent_1: trained from org/base * agent_2: not trained, a copy of gpt2 (a local folder",
        "1 of them frozen ([paper](https://arxiv.org/abs/2410.06101)), 3 iterations",
        "credit collective, weight 1",
        "12 queries, reward good.py:count_good",
        "observer: 'better than {response}: {prompt}'",
    ):
        assert text in shown


def test_the_card_has_the_rows_of_its_run_as_it_is_now(config):
    run, _ = trained(config)
    assert "Held-out" not in card_of(run).text
    other, _ = trained(config, output=str(run.parent / "also_run"), seed=1)
    evaluation = evaluate(
        [run, other], TASK, EvaluationConfig(queries=4, output=str(run.parent / "evaluation"))
    )
    page = MarkdownIt("commonmark").enable("table").render(card_of(run).text)
    row = next(row for row in evaluation.rows if row["name"] == "run/agent_2 after agent_1")
    assert f"<td>{row['task_reward']:.3f} ± {row['task_reward_ci']:.3f}</td>" in page
    assert re.findall(r"<tr>\n<td>(.*)</td>", page) == [
        "base",
        "run/agent_1",
        "run/agent_2",
        "base after itself",
        "run/agent_2 after agent_1",
        "run/agent_1 after agent_2",
    ]
    settings = json.loads((evaluation.folder / "settings.json").read_text())
    settings["trained"][str(run)] = "before"
    (evaluation.folder / "settings.json").write_text(json.dumps(settings))
    assert "Held-out" not in card_of(run).text


def test_texts_of_a_card_act_neither_as_markdown_nor_as_html(config):
    hostile = "```\n# Heading\n<script>alert(1)</script> ![](https://example.org/x.png) ````\n---\n{prompt}"
    own = replace(config, roles=[RoleConfig(prompt=hostile), RoleConfig()])
    fingerprint = {"reward": hostile, "rows": 1}
    card = model_card({"agent_1": Path("agent_1")}, own, fingerprint, 1, REPOSITORY, "")
    page = MarkdownIt("commonmark").enable("table").render(ModelCard(card).text)
    assert "alert(1)" in page and "<script>" not in page and "<img" not in page
    assert re.findall(r"<h\d>(.*?)</h\d>", page) == ["user/pair", "Load", "Prompts of the roles"]
