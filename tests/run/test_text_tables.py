"""The text tables at the end of a run. Model texts in them are shown unchanged, with control characters escaped."""

import re

import pytest
from markdown_it import MarkdownIt

from cory.run.tables import (
    interval_table,
    markdown,
    one_line,
    printable,
    summarise,
    summarise_roles,
    summary_table,
)
from study.cells import markdown_table


def record(iteration, agent, role, task_reward):
    numbers = {"task_reward": task_reward, "kl": 0.0, "combined_reward": task_reward}
    return {"iteration": iteration, "agent": agent, "role": role, **numbers}


# The pioneer earns nothing and the observer learns. The agents exchange roles after each iteration.
HISTORY = [
    record(k, f"agent_{1 + (k + position) % 2}", role, reward)
    for k in range(4)
    for position, (role, reward) in enumerate([("pioneer", 0.0), ("observer", k / 2)])
]


def test_roles_and_agents_are_summarised_separately():
    roles = summarise_roles(HISTORY)
    assert roles["pioneer"]["task_reward"] == {"start": 0.0, "end": 0.0, "change": 0.0}
    assert roles["observer"]["task_reward"] == {"start": 0.25, "end": 1.25, "change": 1.0}
    agents = summarise(HISTORY, ["agent_1", "agent_2"])
    lines = summary_table(agents, roles).splitlines()[2:-1]
    assert [line.split("  ")[0] for line in lines[::3]] == [
        "as pioneer", "as observer", "agent_1, all roles", "agent_2, all roles",
    ]  # fmt: skip


def test_an_agent_in_one_role_has_one_row():
    """Without role exchange, means by role and by agent are the same."""
    history = [row | {"agent": f"agent_{1 + (row['role'] == 'observer')}"} for row in HISTORY]
    table = summary_table(summarise(history, ["agent_1", "agent_2"]), summarise_roles(history))
    lines = table.splitlines()[2:-1]
    assert [line.split("  ")[0] for line in lines[::3]] == [
        "agent_1 as pioneer",
        "agent_2 as observer",
    ]


def test_one_role_is_summarised_by_agent_alone():
    history = [row for row in HISTORY if row["role"] == "pioneer"]
    assert summarise_roles(history) == {}
    assert "all roles" not in summary_table(summarise(history, ["agent_1"]), {})


def test_a_task_reward_of_0_is_not_shown_beside_a_team_reward():
    """A task reward other than 0 is shown together with the team reward."""
    for earned, shown in ((0.0, False), (1.0, True)):
        history = [record(k, "agent_1", "pioneer", earned) | {"team_reward": 0.5} for k in range(4)]
        table = summary_table(summarise(history, ["agent_1"]), {})
        assert ("task_reward" in table) == shown and "team_reward" in table


def test_a_table_of_an_evaluation_fits_the_terminal():
    titles = {name: f"metric {name}" for name in "abcde"}
    numbers = dict.fromkeys(titles, 1.0) | dict.fromkeys([f"{m}_ci" for m in titles], 0.5)
    rows = [{"name": name} | numbers for name in ("base", "a_run_of_mine/agent_2 after agent_1")]
    heading = {"name": "a name of a run that is wider than any terminal ".replace(" ", "_") * 2}
    wide = interval_table([rows[0], heading, rows[1]], titles, 80).splitlines()
    assert [line for line in wide if line != heading["name"]] == interval_table(
        rows, titles, 80
    ).splitlines()
    for width, parts in ((80, 2), (200, 1)):
        table = interval_table(rows, titles, width)
        assert max(map(len, table.splitlines())) <= width and len(table.split("\n\n")) == parts
        assert table.count("1.000 ± 0.500") == 10


HOSTILE = "| `x` **b** <script>alert(1)</script> [l](https://example.org) \n# h $y$ \x1b[31m \\"


def test_texts_in_all_languages_are_shown_unchanged():
    """French no-break spaces, the Japanese space, Persian joiners and joined emoji are kept."""
    for text in (
        "prix\xa0: 5\u202f€",
        "東京\u3000大阪",
        "می\u200cخواهم",
        "\U0001f469\u200d\U0001f467",
    ):
        assert one_line(text) == printable(text) == markdown(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\r\tback\x85\x9b", "\\x1b[31mred\\r\\tback\\x85\\x9b"),
        ("\u202e reversed \u2066\u200f", "\\u202e reversed \\u2066\\u200f"),
        ("a\u2028b\u2029c\ufeff", "a\\u2028b\\u2029c\\ufeff"),
        ("hidden \U000e0041", "hidden \\U000e0041"),
        ("half \ud800 of a character", "half \\ud800 of a character"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert one_line(text) == printable(text) == shown


def test_line_breaks_are_kept_only_in_multi_line_texts():
    assert printable("a\nb\r\n") == "a\nb\\r\n"
    assert one_line("a\nb") == "a\\nb"
    assert markdown("a\nb") == "a&#92;nb"


def test_markdown_in_a_text_does_not_act_in_a_table():
    table = markdown_table([{"a": HOSTILE, "b": "end"}])
    html = MarkdownIt("commonmark").enable("table").render(table)
    shown = HOSTILE.replace("\n", "\\n").replace("\x1b", "\\x1b")
    shown = shown.replace("<", "&lt;").replace(">", "&gt;")
    assert re.findall(r"<td>(.*?)</td>", html) == [shown.strip(), "end"]
