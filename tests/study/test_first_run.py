"""An experiment keeps its first run, if others can repeat it."""

from study import first_run
from study.first_run import FIRST_RUN, keep


def test_a_run_with_files_that_git_does_not_have_is_not_kept(finished, tmp_path):
    """Its model is a folder that the tests have made."""
    keep(finished.folder, tmp_path, threads=1)
    assert not (tmp_path / FIRST_RUN).exists()


def test_a_file_in_a_list_that_git_does_not_have_is_of_this_machine(tmp_path):
    here = tmp_path / "rewards.py"
    here.touch()
    assert first_run._is_local({"task": {"reward": [f"{here}:praise"]}})
    assert first_run._is_local({"agents": [{"model": {"name": str(tmp_path)}}]})
    assert not first_run._is_local({"model": {"name": "gpt2"}, "roles": [], "output": None})
