"""The first run of a folder of results comes out equal, or what has changed is named."""

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
    """The folder of a run of the toy models, which every clone has."""
    output = tmp_path_factory.mktemp("kept") / "run"
    batch = ["--ppo.batch_size", "8", "--ppo.mini_batch_size", "8", "--cory.reset_every", "1"]
    flags = [*batch, "--iterations", "2", "--device", "cpu", "--output", str(output)]
    config = load(ImdbConfig, ROOT / "configs/imdb/tiny.yaml", flags)
    return CoryTrainer(config, make_agents(config), IMDB.make_task(config)).train().folder


@pytest.fixture
def results(run, tmp_path):
    """A folder of results that keeps the run."""
    keep(run, tmp_path, threads=1)
    return tmp_path


def rewrite(results, change):
    """Changes what a folder of results keeps."""
    content = json.loads((results / FIRST_RUN).read_text())
    change(content)
    (results / FIRST_RUN).write_text(json.dumps(content))


def test_the_first_records_come_out_equal(run, results):
    content = json.loads((results / FIRST_RUN).read_text())
    assert content["records"] == read_rows(run / "metrics.jsonl")[:3]
    assert "output" not in content["settings"] and "versions" not in content["settings"]
    rewrite(results, lambda content: content["records"][0].pop("kl"))  # a metric of later on
    assert check(results) == (True, "equal")


def test_what_has_changed_is_named_and_is_no_failure_on_another_processor(results, capsys):
    rewrite(results, lambda content: content["records"][2].update(kl=9.0))
    with pytest.raises(UserError):
        command_line([str(results)])
    assert "kl of record 3: 9.0 -> " in capsys.readouterr().out
    rewrite(results, lambda content: content["made_on"].update(processor="another one"))
    came_out, message = check(results)
    assert came_out and message.startswith("kl of record 3: 9.0 -> ")


def test_settings_that_are_none_any_more_are_named(results):
    rewrite(results, lambda content: content["settings"]["cory"].update(reset_on_exchange=False))
    came_out, message = check(results)
    assert not came_out and "reset_on_exchange" in message


@pytest.mark.parametrize("name", ["gsm8k_credit", "imdb_noise_sampled_kl"])
def test_results_of_the_repository_are_those_of_the_current_code(name):
    """Of one folder of each task; `make check-results` repeats all."""
    came_out, message = check(ROOT / "results" / name)
    assert came_out, message


def test_settings_of_results_are_settings_still():
    for file in (ROOT / "results").glob(f"*/{FIRST_RUN}"):
        kept = json.loads(file.read_text())
        as_config(find_kind(kept["task"]).config, kept["settings"], file)
