"""Tables in pages are written from the files under results/."""

import pytest

from cory.errors import UserError
from study import tables
from study.frame import read_study


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one page and one experiment's results: a chain and its rivals.

    A chain is two agents that answer one after the other; rivals are models compared with it.
    """
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: [tmp_path / "README.md"])
    (tmp_path / "results").mkdir()
    (tmp_path / "results/credit").symlink_to(ROOT / "results/imdb_rivals")
    return tmp_path


ROOT = tables.ROOT


def test_a_table_is_written_and_a_changed_number_is_found(repository, capsys):
    page = repository / "README.md"
    page.write_text(
        '# Page\n\n<!-- table: held_out credit groups="PPO" -->\nold\n<!-- end -->\n\nProse.\n'
    )
    with pytest.raises(UserError, match="README"):
        tables.command_line(["--check"])
    assert "old" in page.read_text()
    tables.command_line([])
    text = page.read_text()
    held_out = read_study(ROOT / "results/imdb_rivals").held_out
    ppo = held_out[(held_out["group"] == "PPO") & (held_out["calls"] == 1)]["combined_reward"]
    mean = f"{ppo.mean():.2f}"
    assert (
        f"| PPO | {len(ppo)} | {mean} ± " in text
        and "| CORY, causal |" not in text
        and text.endswith("\n\nProse.\n")
    )
    tables.command_line(["--check"])
    page.write_text(text.replace(mean, "9.99"))
    with pytest.raises(UserError, match="README"):
        tables.command_line(["--check"])


def test_a_table_without_its_end_is_refused_and_nothing_is_written(repository):
    page = repository / "README.md"
    table = "<!-- table: held_out credit groups=PPO -->\n"
    for text in (f"{table}Prose.\n", f"{table}Prose.\n\n{table}<!-- end -->\n"):
        page.write_text(text)
        with pytest.raises(UserError, match=r"README\.md: .*end.* held_out credit groups=PPO"):
            tables.command_line([])
        assert page.read_text() == text


def test_a_chain_is_compared_with_its_rivals(repository):
    page = repository / "README.md"
    rivals = "PPO: agent_1|base (untrained): base after itself"
    described = f'rivals credit chain="CORY, causal: agent_2 after agent_1" rivals="{rivals}" metric=combined_reward'
    page.write_text(f"<!-- table: {described} -->\n<!-- end -->\n")
    tables.command_line([])
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    held_out = read_study(ROOT / "results/imdb_rivals").held_out.set_index(["group", "answers"])
    chain = held_out.loc[("CORY, causal", "agent_2 after agent_1")].set_index("seed")[
        "combined_reward"
    ]
    ppo = held_out.loc[("PPO", "agent_1")].set_index("seed")["combined_reward"]
    base = held_out.loc[("base (untrained)", "base after itself"), "combined_reward"]
    assert rows[0][4] == '"CORY, causal" minus this row (over seeds)' and rows[1][4] == ""
    assert rows[1][:3] == ["| CORY, causal", "agent_2 after agent_1", str(len(chain))]
    assert rows[2][:2] == ["| PPO", "agent_1"]
    assert rows[2][4].startswith(f"{(chain - ppo).mean():+.2f} (")
    assert rows[3][2:4] == ["", f"{base:.2f}"]
    assert rows[3][4].startswith(f"{chain.mean() - base:+.2f} (")

    # If only the last answer's KL counts, the chain's combined reward rises and a single agent's stays the same.
    rows_by_seed = held_out.loc[("CORY, causal", "agent_2 after agent_1")].set_index("seed")
    last_call = rows_by_seed["task_reward"] - 0.05 * rows_by_seed["kl"]
    assert rows[0][5:] == [
        "combined reward, own KL",
        '"CORY, causal" minus this row, own KL (over seeds) |',
    ]
    assert rows[1][5].startswith(f"{last_call.mean():.2f} ± ")
    assert rows[2][5] == rows[2][3] and rows[3][5] == rows[3][3]
    assert rows[2][6].startswith(f"{(last_call - ppo).mean():+.2f} (")


def test_a_chain_is_compared_with_the_better_of_two_answers(repository):
    page = repository / "README.md"
    chain = "CORY, causal: agent_2 after agent_1"
    described = f'rivals credit chain="{chain}" rivals="PPO: agent_1, better of two"'
    page.write_text(f"<!-- table: {described} metric=task_reward -->\n<!-- end -->\n")
    tables.command_line([])
    (row,) = [line.split(" | ") for line in page.read_text().splitlines() if "| PPO |" in line]
    held_out = read_study(ROOT / "results/imdb_rivals").held_out.set_index(["group", "answers"])
    ppo = held_out.loc[("PPO", "agent_1")].set_index("seed")
    last = held_out.loc[("CORY, causal", "agent_2 after agent_1")].set_index("seed")["task_reward"]
    better = ppo["best_of_2"]
    assert better.mean() > ppo["task_reward"].mean()
    assert row[:2] == ["| PPO", "agent_1, better of two"] and row[3].startswith(
        f"{better.mean():.2f} "
    )
    assert row[4].startswith(f"{(last - better).mean():+.2f} (")


def test_tables_of_several_folders_are_joined_under_one_heading(repository):
    (repository / "results/later").symlink_to(ROOT / "results/imdb_noise_full_kl")
    page = repository / "README.md"
    described = 'held_out "one rate: credit|another: later" groups=PPO'
    page.write_text(f"<!-- table: {described} -->\n<!-- end -->\n")
    tables.command_line([])
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| setting", *["| one rate"] * 2, *["| another"] * 2]
    assert [row[1] for row in rows[1:]] == ["base (untrained)", "PPO"] * 2
    alone = [line for line in tables.table("held_out later groups=PPO").splitlines()]
    assert [" | ".join(row[1:]) for row in rows[3:]] == [line[2:] for line in alone[2:]]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("held_aut credit", "held_aut"),
        ("held_out nowhere", "nowhere"),
        ("held_out credit metrik=kl", "metrik"),
        ("held_out credit metric=kll", "kll"),
        ("held_out credit metric='kl", ""),
        ("collapses credit groups='PPO|owned'", "owned"),
        ("held_out_by_agent credit metrics=kl answers='agent_1 afer itself'", "afer"),
        ("rivals credit chain='PPO: agent_1' rivals='CORY, causal: agent_3'", "agent_3"),
        (
            "rivals credit chain='PPO: agent_1' rivals='PPO: agent_1, better of two' metric=kl",
            "only task_reward, got kl",
        ),
    ],
)
def test_an_error_in_a_tables_description_names_the_page(repository, description, message):
    (repository / "README.md").write_text(f"<!-- table: {description} -->\n<!-- end -->\n")
    with pytest.raises(UserError, match=rf"README.md: .*{message}"):
        tables.command_line([])
