"""An experiment keeps its first run if others can repeat it."""

from study import first_run
from study.first_run import FIRST_RUN, keep


def test_a_run_with_files_outside_git_is_not_kept(finished, tmp_path):
    """The run's model is in a temporary folder."""
    keep(finished.folder, tmp_path, threads=1)
    assert not (tmp_path / FIRST_RUN).exists()


def test_files_outside_git_are_found_in_lists_of_settings(tmp_path):
    local_file = tmp_path / "rewards.py"
    local_file.touch()
    assert first_run._is_local({"task": {"reward": [f"{local_file}:praise"]}})
    assert first_run._is_local({"agents": [{"model": {"name": str(tmp_path)}}]})
    assert not first_run._is_local({"model": {"name": "gpt2"}, "roles": [], "output": None})
