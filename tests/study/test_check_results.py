"""Results keep the beginning of their first run, which the current code repeats."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import ROOT, make_config

from cory.config import CoryConfig
from cory.errors import UserError
from study import check_results
from study.check_results import FIRST_RUN, Changed, check, compare, keep


@pytest.fixture(scope="module")
def kept(policy_folder, tmp_path_factory):
    """A folder of results with the first run of a pair, on prompts of its own."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"the film was {word}"}) + "\n" for word in "abcdefgh")
    )
    (folder / "reward.py").write_text(
        "def count(prompts, completions):\n    return [float(len(text)) for text in completions]\n"
    )
    config = make_config(policy_folder, folder)
    settings = asdict(config) | {
        "cory": asdict(CoryConfig(reset_every=1)),
        "task": {
            "dataset": str(folder / "prompts.jsonl"),
            "reward": f"{folder / 'reward.py'}:count",
        },
    }
    from cory.cli.load import as_config
    from cory.tasks.config import OWN

    config = as_config(OWN.config, settings, folder)
    from cory.agents import make_agents
    from cory.trainer import CoryTrainer

    run = CoryTrainer(config, make_agents(config), OWN.make_task(config)).train()
    keep(run.folder, folder, key="abc", threads=1)
    return folder


@pytest.fixture(scope="module")
def folders(kept, policy_folder):
    """What the run needs."""
    reward = f"{kept / 'reward.py'}:count"
    return {
        "model.name": str(policy_folder),
        "task.dataset": str(kept / "prompts.jsonl"),
        "task.reward": reward,
    }


def test_the_first_records_come_out_exactly(kept, folders):
    content = json.loads((kept / FIRST_RUN).read_text())
    records = [json.loads(line) for line in (kept / "run/metrics.jsonl").open()]
    assert content["records"] == records[:3] and content["key"] == "abc"
    assert "output" not in content["settings"] and "versions" not in content["settings"]
    assert set(content["needs"]) == set(folders) and str(kept) not in (kept / FIRST_RUN).read_text()
    # As many folders of results are repeated at once, one of them may need what another does not.
    assert check(kept, folders | {"task.eval_dataset": "elsewhere"}) == "3 records, exactly"


def test_folders_beside_the_repositorys_files_are_needed_too(monkeypatch, tmp_path):
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "imdb_train").symlink_to(ROOT / "imdb_train")
    assert check_results._is_local("/models/small") and not check_results._is_local("models/small")
    monkeypatch.setattr(check_results, "ROOT", tmp_path)
    monkeypatch.setattr(check_results, "_is_tracked", lambda path: path.name != "small")
    assert check_results._is_local(["models/small"])
    assert check_results._is_local([{"model": {"name": "models/small"}}])
    assert not check_results._is_local("imdb_train/weights")
    assert not check_results._is_local("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_what_git_has_is_in_every_clone():
    assert check_results._is_tracked(Path("examples/notes/rewards.py"))
    assert not check_results._is_tracked(Path("examples/notes/out"))


def test_on_another_processor_the_first_reward_is_compared(kept, folders, monkeypatch):
    monkeypatch.setattr(check_results, "processor", lambda: "another one")
    said = check(kept, folders)
    assert said.startswith("first task reward within 0.05 (made with another processor ")


def test_what_has_changed_is_named(kept, folders, tmp_path, capsys):
    content = json.loads((kept / FIRST_RUN).read_text())
    records = json.loads(json.dumps(content["records"]))
    compare(content, [record | {"a_new_metric": 1.0} for record in records], exactly=True)
    records[1]["kl"] += 1e-9
    with pytest.raises(Changed, match=r"kl of record 2: "):
        compare(content, records, exactly=True)
    compare(content, records, exactly=False)
    records[0]["task_reward"] += 0.1
    with pytest.raises(Changed, match="task_reward of the first record"):
        compare(content, records, exactly=False)

    content["records"][2]["task_reward"] += 1
    (tmp_path / FIRST_RUN).write_text(json.dumps(content))
    with pytest.raises(UserError, match="1 of 1 folders of results are not those of this code"):
        check_results.command_line([str(tmp_path), *flags(folders)])
    assert "CHANGED, task_reward of record 3: " in capsys.readouterr().out


def flags(folders):
    return [word for key, folder in folders.items() for word in ("--set", f"{key}={folder}")]


def test_folders_that_a_run_needs_are_asked_for(kept, capsys):
    with pytest.raises(UserError, match="1 of 1 folders"):
        check_results.command_line([str(kept)])
    said = capsys.readouterr().out
    assert "NOT REPEATED, --set: expected the local folders of model.name" in said


def test_settings_that_are_none_any_more_are_named(kept, folders, tmp_path, capsys):
    content = json.loads((kept / FIRST_RUN).read_text())
    content["settings"]["cory"]["reset_on_exchange"] = False
    (tmp_path / FIRST_RUN).write_text(json.dumps(content))
    with pytest.raises(UserError, match="1 of 1 folders"):
        check_results.command_line([str(tmp_path), *flags(folders)])
    assert "NOT REPEATED" in (said := capsys.readouterr().out) and "reset_on_exchange" in said
    with pytest.raises(UserError, match=f"expected folders with a {FIRST_RUN}, got"):
        check_results.command_line([str(tmp_path / "none")])


@pytest.mark.parametrize("file", sorted((ROOT / "results").glob(f"*/{FIRST_RUN}")), ids=str)
def test_results_of_the_repository_are_those_of_the_current_code(file):
    if json.loads(file.read_text())["needs"]:
        pytest.skip("needs models or data that are not in the repository")
    assert check(file.parent)
