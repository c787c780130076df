"""Results keep the beginning of their first run, which the current code repeats."""

import json
import subprocess
from dataclasses import asdict

import pytest
from conftest import ROOT, make_config

from cory.config import CoryConfig
from cory.errors import UserError
from study import check_results
from study.check_results import FIRST_RUN, check, difference, keep


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
    from cory.agent import make_agents
    from cory.trainer import CoryTrainer

    run = CoryTrainer(config, make_agents(config), OWN.make_task(config)).train()
    keep(run.folder, folder, threads=1)
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
    assert content["records"] == records[:3]
    assert "output" not in content["settings"] and "versions" not in content["settings"]
    assert set(content["needs"]) == set(folders) and str(kept) not in (kept / FIRST_RUN).read_text()
    # As many folders of results are repeated at once, one of them may need what another does not.
    elsewhere = folders | {"task.eval_dataset": "elsewhere"}
    assert check(kept, elsewhere) == (True, "3 records, exactly")


def test_what_git_has_is_in_every_clone(tmp_path, monkeypatch):
    assert check_results._is_local("/models/small") and not check_results._is_local("models/small")
    assert not check_results._is_local("examples/notes/rewards.py:reward")
    assert not check_results._is_local("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "models/small").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setattr(check_results, "ROOT", tmp_path)
    assert check_results._is_local("models/small")


def test_on_another_processor_the_first_reward_is_compared(kept, folders, monkeypatch):
    here = check_results.conditions(1)
    other = here | {"processor": "another one"}
    monkeypatch.setattr(check_results, "conditions", lambda threads: other)
    came_out, message = check(kept, folders)
    made_on = f"made with another processor {here['processor']}"
    assert came_out and message == f"first task reward within 0.05 ({made_on})"


def test_what_has_changed_is_named(kept, folders, tmp_path, capsys):
    content = json.loads((kept / FIRST_RUN).read_text())
    records = json.loads(json.dumps(content["records"]))
    assert not difference(content, [record | {"a_new_metric": 1.0} for record in records], True)
    records[1]["kl"] += 1e-9
    assert difference(content, records, exactly=True).startswith("kl of record 2: ")
    assert not difference(content, records, exactly=False)
    records[0]["task_reward"] += 0.1
    assert difference(content, records, exactly=False).startswith("task_reward of record 1: ")

    content["records"][2]["task_reward"] += 1
    (tmp_path / FIRST_RUN).write_text(json.dumps(content))
    with pytest.raises(UserError, match="1 of 1 folders of results are not those of this code"):
        check_results.command_line([str(tmp_path), *flags(folders)])
    assert "CHANGED, task_reward of record 3: " in capsys.readouterr().out


def flags(folders):
    return [word for key, folder in folders.items() for word in ("--set", f"{key}={folder}")]


def test_a_run_that_needs_a_folder_and_one_of_a_frozen_page_are_left_out(
    kept, folders, tmp_path, capsys
):
    check_results.command_line([str(kept)])
    assert "left out, as it needs --set of model.name, task." in capsys.readouterr().out

    content = json.loads((kept / FIRST_RUN).read_text())
    content["records"][0]["task_reward"] += 1
    (tmp_path / FIRST_RUN).write_text(json.dumps(content))
    (tmp_path / "README.md").write_text("# Old\n\n<!-- frozen: c0f7e9e -->\n")
    check_results.command_line([str(tmp_path), *flags(folders)])
    assert "left out, as its page is frozen at c0f7e9e" in capsys.readouterr().out


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
    came_out, message = check(file.parent, {})
    assert came_out, message
    if message.startswith("left out"):
        pytest.skip(message)
