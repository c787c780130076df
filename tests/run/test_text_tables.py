"""The tables at the end of a run."""

from cory.run.tables import interval_table, sample_table, summarise, summarise_roles, summary_table


def record(iteration, agent, role, task_reward):
    numbers = {"task_reward": task_reward, "kl": 0.0, "combined_reward": task_reward}
    return {"iteration": iteration, "agent": agent, "role": role, **numbers}


# A pioneer that earns nothing and an observer that learns; the agents exchange roles after each iteration.
HISTORY = [
    record(k, f"agent_{1 + (k + place) % 2}", role, reward)
    for k in range(4)
    for place, (role, reward) in enumerate([("pioneer", 0.0), ("observer", k / 2)])
]


def test_roles_are_summarised_apart_from_the_agents_that_hold_them():
    roles = summarise_roles(HISTORY)
    assert roles["pioneer"]["task_reward"] == {"start": 0.0, "end": 0.0, "change": 0.0}
    assert roles["observer"]["task_reward"] == {"start": 0.25, "end": 1.25, "change": 1.0}
    agents = summarise(HISTORY, ["agent_1", "agent_2"])
    lines = summary_table(agents, roles).splitlines()[2:]
    assert [line.split("  ")[0] for line in lines[::3]] == [
        "as pioneer", "as observer", "agent_1, all roles", "agent_2, all roles",
    ]  # fmt: skip


def test_one_role_is_summarised_by_agent_alone():
    history = [row for row in HISTORY if row["role"] == "pioneer"]
    assert summarise_roles(history) == {}
    assert "all roles" not in summary_table(summarise(history, ["agent_1"]), {})


def test_a_table_of_an_evaluation_fits_the_terminal():
    titles = {name: f"metric {name}" for name in "abcde"}
    numbers = dict.fromkeys(titles, 1.0) | dict.fromkeys([f"{m}_ci" for m in titles], 0.5)
    rows = [{"name": name} | numbers for name in ("base", "a_run_of_mine/agent_2 after agent_1")]
    for width, parts in ((80, 2), (200, 1)):
        table = interval_table(rows, titles, width)
        assert max(map(len, table.splitlines())) <= width and len(table.split("\n\n")) == parts
        assert table.count("1.000 ± 0.500") == 10


def test_samples_show_each_agent_before_and_after():
    def sample(agent, role, text):
        known = {"agent": agent, "role": role, "query": "q", "columns": {"year": 1999}}
        return known | {"completion": text, "task_reward": 1.0}

    one, two = sample("agent_1", "pioneer", "one"), sample("agent_2", "observer", "two")
    before = {"agent_1": [one], "agent_2": [sample("agent_2", "pioneer", "uno")]}
    before["chain"] = [one, two]
    shown = sample_table(before, before)
    counts = (("+1.00  one", 2), ("+1.00  two", 2), ("+1.00  uno", 1), ("year: 1999", 1))
    for text, count in counts:
        assert shown.count(text) == count
