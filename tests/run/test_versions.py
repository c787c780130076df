"""The commit that a run records."""

import shutil
import subprocess

import pytest

from cory import identity as versions


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_a_commit_with_changes_is_named_but_not_for_rows_of_results(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    (tmp_path / "results").mkdir()
    (tmp_path / "cory").mkdir()
    code, rows = tmp_path / "cory" / "code.py", tmp_path / "results" / "runs.csv"
    code.write_text("1")
    rows.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    unchanged = versions.commit(code.parent)
    assert len(unchanged) == 40

    rows.write_text("2")
    (tmp_path / "cory" / "untracked.py").write_text("1")
    assert versions.commit(code.parent) == unchanged
    code.write_text("2")
    assert versions.commit(code.parent) == f"{unchanged}-dirty"
