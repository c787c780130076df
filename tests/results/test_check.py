"""Repeating a results folder's first run gives equal records, or the check names what has changed."""

import json

import pytest
from conftest import ROOT

from cory.build import make_agents
from cory.command import load
from cory.errors import UserError
from cory.run.folder import read_rows
from cory.settings import as_config
from cory.task_kinds import find_kind
from cory.trainer import CoryTrainer
from imdb_train.config import IMDB, ImdbConfig
from results.check import check, command_line
from study.first_run import FIRST_RUN, keep


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with the toy models from the repository."""
    output = tmp_path_factory.mktemp("kept") / "run"
    batch = ["--ppo.batch_size", "8", "--ppo.mini_batch_size", "8", "--cory.reset_every", "1"]
    flags = [*batch, "--iterations", "2", "--device", "cpu", "--output", str(output)]
    config = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", flags)
    return CoryTrainer(config, make_agents(config), IMDB.make_task(config)).train().folder


@pytest.fixture
def results(run, tmp_path):
    """A results folder that keeps the run as its first run."""
    keep(run, tmp_path, threads=1)
    return tmp_path


def rewrite(results, change):
    """Applies `change` to the kept first run of a results folder."""
    content = json.loads((results / FIRST_RUN).read_text())
    change(content)
    (results / FIRST_RUN).write_text(json.dumps(content))


def test_the_first_records_come_out_equal(run, results):
    content = json.loads((results / FIRST_RUN).read_text())
    assert content["records"] == read_rows(run / "metrics.jsonl")[:3]
    assert "output" not in content["settings"] and "versions" not in content["settings"]
    # A metric that the kept records lack, since it was added later, is not compared.
    rewrite(results, lambda content: content["records"][0].pop("kl"))
    assert check(results) == (True, "equal")


def test_a_change_is_named_and_passes_on_another_processor(results, capsys):
    rewrite(results, lambda content: content["records"][2].update(kl=9.0))
    with pytest.raises(UserError):
        command_line([str(results)])
    assert "kl of record 3: 9.0 -> " in capsys.readouterr().out
    rewrite(results, lambda content: content["made_on"].update(processor="another one"))
    came_out, message = check(results)
    assert came_out and message.startswith("kl of record 3: 9.0 -> ")


def test_settings_that_no_longer_exist_are_named(results):
    rewrite(results, lambda content: content["settings"]["cory"].update(reset_on_exchange=False))
    came_out, message = check(results)
    assert not came_out and "reset_on_exchange" in message


@pytest.mark.parametrize("name", ["gsm8k_credit", "imdb_noise_sampled_kl"])
def test_the_current_code_repeats_the_repositorys_results(name):
    """Checks one results folder per task; `make check-results` checks all."""
    came_out, message = check(ROOT / "results" / name)
    assert came_out, message


def test_settings_of_kept_runs_still_exist():
    for file in (ROOT / "results").glob(f"*/{FIRST_RUN}"):
        kept = json.loads(file.read_text())
        as_config(find_kind(kept["task"]).config, kept["settings"], file)
