"""The tables at the end of a run."""

from cory.run.tables import interval_table, sample_table, summarise, summarise_roles, summary_table


def record(iteration, agent, role, task_reward):
    numbers = {"task_reward": task_reward, "kl": 0.0, "combined_reward": task_reward}
    return {"iteration": iteration, "agent": agent, "role": role, **numbers}


def sample(agent, role, text, task_reward, query="q"):
    return {
        "agent": agent,
        "role": role,
        "query": query,
        "columns": {},
        "completion": text,
        "task_reward": task_reward,
    }


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


def test_samples_show_the_chain_first_and_mark_solo_answers():
    before = {
        "agent_1": [
            sample("agent_1", "pioneer", "one", 0.0),
            sample("agent_1", "pioneer", "two", 0.0, "r"),
        ],
        "agent_2": [
            sample("agent_2", "pioneer", "uno", 0.0),
            sample("agent_2", "pioneer", "due", 0.0, "r"),
        ],
    }
    before["chain"] = before["agent_1"] + [
        sample("agent_2", "observer", "three", 1.0),
        sample("agent_2", "observer", "four", 2.0, "r"),
    ]
    lines = [line.split() for line in sample_table(before, before).splitlines()]
    assert lines == [
        [],
        ["q"],
        ["before:", "agent_1", "as", "pioneer", "+0.00", "one"],
        ["before:", "agent_2", "as", "observer", "+1.00", "three"],
        ["after:", "agent_1", "as", "pioneer", "+0.00", "one"],
        ["after:", "agent_2", "as", "observer", "+1.00", "three"],
        ["after:", "agent_2", "solo", "+0.00", "uno"],
        [],
        ["r"],
        ["before:", "agent_1", "as", "pioneer", "+0.00", "two"],
        ["before:", "agent_2", "as", "observer", "+2.00", "four"],
        ["after:", "agent_1", "as", "pioneer", "+0.00", "two"],
        ["after:", "agent_2", "as", "observer", "+2.00", "four"],
        ["after:", "agent_2", "solo", "+0.00", "due"],
    ]


def test_what_prompts_read_besides_the_query_stands_below_it():
    samples = {"agent_1": [sample("agent_1", "pioneer", "text", 1.0) | {"columns": {"year": 1999}}]}
    assert sample_table(samples, samples).splitlines()[1:3] == ["q", "year: 1999"]


def test_samples_of_a_single_agent_need_no_marks():
    samples = {"agent_1": [sample("agent_1", "pioneer", "text", 1.0)]}
    assert [line.split()[0] for line in sample_table(samples, samples).splitlines()[2:]] == [
        "before",
        "agent_1",
    ]


def test_a_table_of_an_evaluation_breaks_between_metrics():
    titles = {name: f"metric {name}" for name in "abcde"}
    rows = [{"name": name} | dict.fromkeys(titles, 1.0) | dict.fromkeys([f"{m}_ci" for m in titles], 0.5)
            for name in ("base", "a_run_of_mine/agent_2 after agent_1")]  # fmt: skip
    narrow, wide = interval_table(rows, titles, 80), interval_table(rows, titles, 200)
    assert max(map(len, narrow.splitlines())) <= 80 and len(wide.splitlines()) == 3
    parts = [part.splitlines() for part in narrow.split("\n\n")]
    assert len(parts) == 2 and all(
        [line[:35].strip() for line in part] == ["", *(r["name"] for r in rows)] for part in parts
    )
    assert sum(line.count("1.000 ± 0.500") for part in parts for line in part) == 10
    longest = interval_table(
        [rows[1] | {"name": "x" * 90}], titles, 80
    )  # a metric at a time, where even one does not fit
    assert len(longest.split("\n\n")) == 5
