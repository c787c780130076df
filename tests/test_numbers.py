"""Numbers that README and docs quote are those of the files under results/.

A quotation is a piece of a page in which each number is an expression in braces over the results. It is rendered and must
be found on the page, spaces and line breaks aside.
"""

import csv
import json
import re
from functools import cache
from statistics import mean

import pytest
from conftest import ROOT
from study.tables import over_seeds

RESULTS = ROOT / "results"


@cache
def evaluation(folder: str) -> dict[str, dict]:
    """The rows of an evaluation, those of several seeds as one, by name."""
    rows = json.loads((RESULTS / folder / "evaluation.json").read_text())["rows"]
    return {row["name"].split(", ")[0]: row for row in over_seeds(rows)}


@cache
def groups(folder: str) -> dict[str, list[str]]:
    """The rows of "By group" of a comparison: n, policy optimality, difference to the baseline, collapse rate."""
    text = (RESULTS / folder / "comparison.md").read_text()
    table = text.split("## By group")[1].split("\n\n")[1]
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in table.splitlines())}


def number(text: str) -> float:
    return float(re.match(r"[-+]?[\d.]+", text).group())


class Quoted:
    """What may stand in braces."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def held(self, row: str, metric: str = "combined_reward", digits: int = 2) -> str:
        """Held out: mean of a metric over seeds."""
        return f"{evaluation(self.folder)[row][metric]:.{digits}f}"

    def spread(self, row: str, metric: str = "combined_reward", digits: int = 2) -> str:
        """Held out: mean ± standard deviation over seeds."""
        return f"{self.held(row, metric, digits)} ± {evaluation(self.folder)[row][metric + '_ci']:.{digits}f}"

    def percent(self, row: str, metric: str = "pass@1") -> str:
        return f"{100 * evaluation(self.folder)[row][metric]:.0f}"

    def percents(self, row: str, metric: str = "pass@1") -> str:
        return f"{self.percent(row, metric)} ± {100 * evaluation(self.folder)[row][metric + '_ci']:.0f}"

    def end(self, group: str, digits: int = 2) -> str:
        """End of training, over agents and roles: combined reward."""
        rows = csv.DictReader((RESULTS / self.folder / "runs.csv").open())
        return f"{mean(float(row['combined_reward']) for row in rows if row['group'] == group):.{digits}f}"

    def difference(self, group: str) -> str:
        """... against the baseline, in percent, without sign."""
        return f"{abs(number(groups(self.folder)[group][2])):.0f}"

    def interval(self, group: str) -> str:
        low, high = re.findall(r"([-+]?\d+)%", groups(self.folder)[group][2])[1:]
        return f"{int(low)} to {int(high)}"

    def below(self, group: str) -> str:
        """The interval of a difference that is below zero, as shares below."""
        low, high = re.findall(r"([-+]?\d+)%", groups(self.folder)[group][2])[1:]
        return f"{-int(high)} to {-int(low)}"

    def collapsed(self, group: str) -> str:
        n, rate = int(groups(self.folder)[group][0]), number(groups(self.folder)[group][3])
        return ["none", "one", "two", "three", "four", "five"][round(n * rate / 100)]


Q = {folder.name: Quoted(folder.name) for folder in RESULTS.iterdir() if folder.is_dir()}
NAMES = {
    **Q,
    "ppo": "imdb_ppo_tiny/agent_1",
    "twice": "imdb_ppo_tiny/agent_1 after itself",
    "one": "imdb_cory_tiny/agent_1",
    "two": "imdb_cory_tiny/agent_2",
    "chain": "imdb_cory_tiny/agent_2 after agent_1",
    "niahc": "imdb_cory_tiny/agent_1 after agent_2",
    "gppo": "gsm8k_ppo_tiny/agent_1",
    "gtwice": "gsm8k_ppo_tiny/agent_1 after itself",
    "credit": lambda mode, agents, task="imdb": f"{task}_cory_tiny-credit={mode}/{agents}",
    "learner": lambda name, agents, method="cory", more="", task="imdb": (
        f"{task}_{method}_tiny-algorithm={name}{more}-group_size=4/{agents}"
    ),
}
A1, A2, A21, A12, SELF = "agent_1", "agent_2", "agent_2 after agent_1", "agent_1 after agent_2", "agent_1 after itself"
NAMES |= {"A1": A1, "A2": A2, "A21": A21, "A12": A12, "SELF": SELF, "CAUSAL": "-credit=causal"}

QUOTATIONS = {
    "README.md": [
        "| base | {imdb_curves.held('base')} | | {gsm8k_curves.percent('base')} % |",
        "| PPO | {imdb_curves.spread(ppo)} | after itself: **{imdb_curves.spread(twice)}**"
        " | **{gsm8k_curves.percents(gppo)} %** | after itself: {gsm8k_curves.percents(gtwice)} % |",
        "| {imdb_curves.spread(one)}, {imdb_curves.spread(two)} | {imdb_curves.spread(chain)}, {imdb_curves.spread(niahc)} |"
        " {gsm8k_curves.percents('gsm8k_cory_tiny/'+A1)} %, {gsm8k_curves.percents('gsm8k_cory_tiny/'+A2)} % |"
        " {gsm8k_curves.percents('gsm8k_cory_tiny/'+A21)} %, {gsm8k_curves.percents('gsm8k_cory_tiny/'+A12)} % |",
        "| {imdb_credit.spread(credit('causal',A1))}, {imdb_credit.spread(credit('causal',A2))} |"
        " {imdb_credit.spread(credit('causal',A21))}, {imdb_credit.spread(credit('causal',A12))} |"
        " {gsm8k_credit.percents(credit('causal',A1,'gsm8k'))} %, {gsm8k_credit.percents(credit('causal',A2,'gsm8k'))} % |"
        " {gsm8k_credit.percents(credit('causal',A21,'gsm8k'))} %, {gsm8k_credit.percents(credit('causal',A12,'gsm8k'))} % |",
    ],
    "results/imdb_curves/README.md": [
        "have a KL of {imdb_curves.held(one,'kl',1)} and {imdb_curves.held(two,'kl',1)}, PPO's agent {imdb_curves.held(ppo,'kl',1)}",
        "CORY's have {imdb_curves.held(chain,'kl',1)} and {imdb_curves.held(niahc,'kl',1)}, PPO's agent after itself"
        " {imdb_curves.held(twice,'kl',1)}",
    ],
    "results/imdb_curves_full_kl/README.md": [
        "to {imdb_curves_full_kl.end('CORY',1)}; PPO's falls to {imdb_curves_full_kl.end('PPO',1)}. CORY's is"
        " {imdb_curves_full_kl.difference('CORY')} % better ({imdb_curves_full_kl.interval('CORY')} %)",
        "{imdb_curves_full_kl.collapsed('PPO').capitalize()} of five PPO runs and {imdb_curves_full_kl.collapsed('CORY')} CORY run",
        "{imdb_curves_full_kl.held('base','distinct_2')} before training, {imdb_curves_full_kl.held(ppo,'distinct_2')} after PPO,"
        " and {imdb_curves_full_kl.held(one,'distinct_2')} and {imdb_curves_full_kl.held(two,'distinct_2')} after CORY, at KLs of"
        " {imdb_curves_full_kl.held(ppo,'kl',0)}, {imdb_curves_full_kl.held(one,'kl',0)} and"
        " {imdb_curves_full_kl.held(two,'kl',0)}",
    ],
    "results/imdb_curves_real/README.md": [
        "from {imdb_curves_real.held('base')} to {imdb_curves_real.held(ppo)} with PPO",
    ],
    "results/imdb_curves_real_full_kl/README.md": [
        "ends at {imdb_curves_real_full_kl.end('PPO',1)} with PPO and at {imdb_curves_real_full_kl.end('CORY',1)} with CORY:"
        " {imdb_curves_real_full_kl.difference('CORY')} % better ({imdb_curves_real_full_kl.interval('CORY')} %)."
        " {imdb_curves_real_full_kl.collapsed('PPO').capitalize()} of three runs of either method collapse",
    ],
    "results/imdb_ablations/README.md": [
        "({imdb_ablations.end('CORY, no transfer')} against {imdb_ablations.end('CORY')})",
        "They end at {imdb_ablations.end('CORY, neither')}, PPO at {imdb_ablations.end('PPO')}",
    ],
    "results/imdb_learning_rate/README.md": [
        "{imdb_learning_rate.difference('CORY, learning_rate 3e-05')} % above PPO's at 3e-5"
        " ({imdb_learning_rate.interval('CORY, learning_rate 3e-05')} %)",
    ],
    "results/imdb_learning_rate_full_kl/README.md": [
        "by {imdb_learning_rate_full_kl.difference('CORY, learning_rate 1.5e-05')} %"
        " ({imdb_learning_rate_full_kl.interval('CORY, learning_rate 1.5e-05')} %),"
        " {imdb_learning_rate_full_kl.difference('CORY, learning_rate 3e-05')} %"
        " ({imdb_learning_rate_full_kl.interval('CORY, learning_rate 3e-05')} %) and"
        " {imdb_learning_rate_full_kl.difference('CORY, learning_rate 5e-05')} %"
        " ({imdb_learning_rate_full_kl.interval('CORY, learning_rate 5e-05')} %)",
        "{imdb_learning_rate_full_kl.collapsed('CORY, learning_rate 3e-05')} of three CORY runs and"
        " {imdb_learning_rate_full_kl.collapsed('PPO, learning_rate 3e-05')} of three PPO runs do",
    ],
    "results/imdb_cooperation/README.md": [
        "{imdb_cooperation.difference('CORY, other_coef 0.5')} to {imdb_cooperation.difference('CORY, other_coef -0.5')} %"
        " above PPO's",
    ],
    "results/imdb_budget/README.md": [
        "to {imdb_budget.end('PPO, twice the queries')}: {imdb_budget.difference('PPO, twice the queries')} % above PPO",
        "above CORY's {imdb_budget.end('CORY')}.",
        "it comes to {imdb_budget.end('PPO, twice the epochs')} at a higher KL, with both (twice the iterations) to"
        " {imdb_budget.end('PPO, twice the iterations')}.",
    ],
    "results/gsm8k_curves/README.md": [
        "from {gsm8k_curves.percent('base')} % to {gsm8k_curves.percent(gppo)} % with PPO, and to"
        " {gsm8k_curves.percent('gsm8k_cory_tiny/'+A1)} and {gsm8k_curves.percent('gsm8k_cory_tiny/'+A2)} % with CORY's agents",
        "solves {gsm8k_curves.percent('base','greedy')} % before training, {gsm8k_curves.percent(gppo,'greedy')} % after PPO, and"
        " {gsm8k_curves.percent('gsm8k_cory_tiny/'+A1,'greedy')} and {gsm8k_curves.percent('gsm8k_cory_tiny/'+A2,'greedy')} %"
        " after CORY",
    ],
    "results/imdb_credit/README.md": [
        "| PPO | {imdb_credit.end('PPO')} | | {imdb_credit.held(ppo)} | {imdb_credit.held(twice)} after itself |",
        *(
            f"`{mode}`{note} | {{imdb_credit.end('{mode}')}} | +{{imdb_credit.difference('{mode}')}} %"
            f" ({{imdb_credit.interval('{mode}')}}) |"
            for mode, note in (("causal", ""), ("counterfactual", ""), ("own", ""))
        ),
        "| one LLM in both roles, `own` | {imdb_credit.end('own, one LLM in both roles')} |"
        " +{imdb_credit.difference('own, one LLM in both roles')} % ({imdb_credit.interval('own, one LLM in both roles')}) |"
        " {imdb_credit.held('imdb_cory_tiny-chain_length=2-credit=own-num_agents=1/agent_1')} |",
    ],
    "results/gsm8k_credit/README.md": [
        "| PPO | {gsm8k_credit.end('PPO')} | | {gsm8k_credit.percent(gppo)} % | {gsm8k_credit.percent(gtwice)} % after itself |",
        *(
            f"| {{gsm8k_credit.end('{mode}')}} | {{gsm8k_credit.difference('{mode}')}} % below ({{gsm8k_credit.below('{mode}')}})"
            f" | {{gsm8k_credit.percent({row}{A1}'))}}, {{gsm8k_credit.percent({row}{A2}'))}} % |"
            f" {{gsm8k_credit.percent({row}{A21}'))}}, {{gsm8k_credit.percent({row}{A12}'))}} % |"
            for mode, row in (
                ("collective", "('gsm8k_cory_tiny/"),
                *((mode, f"('gsm8k_cory_tiny-credit={mode}/") for mode in ("causal", "counterfactual", "own")),
            )
        ),
    ],
    "results/imdb_learners/README.md": [
        *(
            f"| {name.upper()} | one agent | {{imdb_learners.end('{name.upper()}')}} |"
            f" {{imdb_learners.held(learner('{name}',A1,'ppo'))}} | {{imdb_learners.held(learner('{name}',SELF,'ppo'))}} after itself |"
            for name in ("rloo", "grpo")
        ),
        *(
            f"`{mode}` | {{imdb_learners.end('CORY with {name.upper()}{label}')}} |"
            f" {{imdb_learners.held(learner('{name}',A1,more='{more}'))}}, {{imdb_learners.held(learner('{name}',A2,more='{more}'))}} |"
            f" {{imdb_learners.held(learner('{name}',A21,more='{more}'))}},"
            f" {{imdb_learners.held(learner('{name}',A12,more='{more}'))}} |"
            for name in ("rloo", "grpo")
            for mode, label, more in (("collective", "", ""), ("causal", ", causal", "-credit=causal"))
        ),
    ],
    "results/gsm8k_learners/README.md": [
        *(
            f"| {name.upper()} | one | {{gsm8k_learners.end('{name.upper()}')}} |"
            f" {{gsm8k_learners.percent(learner('{name}',A1,'ppo',task='gsm8k'))}} % |"
            f" {{gsm8k_learners.percent(learner('{name}',SELF,'ppo',task='gsm8k'))}} % after itself |"
            f" | {name.upper()} | two, `collective` | {{gsm8k_learners.end('CORY with {name.upper()}')}} |"
            f" {{gsm8k_learners.percent(learner('{name}',A1,task='gsm8k'))}},"
            f" {{gsm8k_learners.percent(learner('{name}',A2,task='gsm8k'))}} % |"
            f" {{gsm8k_learners.percent(learner('{name}',A21,task='gsm8k'))}},"
            f" {{gsm8k_learners.percent(learner('{name}',A12,task='gsm8k'))}} % |"
            for name in ("rloo", "grpo")
        ),
    ],
    "results/gsm8k_learning_rate/README.md": [
        "{gsm8k_learning_rate.difference('CORY, learning_rate 0.0002')} % below PPO's at 2e-4,"
        " {gsm8k_learning_rate.difference('CORY, learning_rate 0.0006')} % at 6e-4 and"
        " {gsm8k_learning_rate.difference('CORY, learning_rate 0.002')} % at 2e-3",
    ],
    "results/gsm8k_ablations/README.md": [
        "is {gsm8k_ablations.end('PPO')}, CORY's {gsm8k_ablations.end('CORY')}. With each agent's own reward alone it is"
        " {gsm8k_ablations.end('CORY, own reward')}, without knowledge transfer {gsm8k_ablations.end('CORY, no transfer')},"
        " without exchange {gsm8k_ablations.end('CORY, no exchange')}",
    ],
    "docs/why_not_ahead.md": [
        "falls from {imdb_cooperation.end('CORY, other_coef 0.0')} to {imdb_cooperation.end('CORY, other_coef 1.0')};"
        " PPO has {imdb_cooperation.end('PPO')}",
        "the combined reward is {imdb_ablations.end('CORY, neither')}",
        "| combined reward | {imdb_cooperation.end('CORY, other_coef 1.0')} | {imdb_cooperation.end('CORY, other_coef 0.5')} |"
        " {imdb_cooperation.end('CORY, other_coef 0.0')} | {imdb_cooperation.end('CORY, other_coef -0.5')} |"
        " {imdb_cooperation.end('CORY, other_coef -1.0')} |",
        "from {imdb_budget.end('PPO')} to {imdb_budget.end('PPO, twice the queries')}",
        "CORY is {imdb_learning_rate.difference('CORY, learning_rate 3e-05')} % ahead of PPO at 3e-5, level at 1e-4 and"
        " {imdb_learning_rate.difference('CORY, learning_rate 0.0003')} % behind at 3e-4",
        "CORY has {gsm8k_ablations.end('CORY')}, PPO {gsm8k_ablations.end('PPO')}.",
        "is {imdb_ablations_full_kl.end('CORY, no transfer')} without transfer, {imdb_ablations_full_kl.end('CORY')} with it, and"
        " {imdb_ablations_full_kl.end('PPO')} with PPO",
    ],
}


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def rendered(template: str) -> str:
    return re.sub(r"\{([^{}]*)\}", lambda match: str(eval(match[1], dict(NAMES))), template)


@pytest.mark.parametrize("page", QUOTATIONS)
def test_quoted_numbers_are_those_of_results(page):
    text = plain((ROOT / page).read_text())
    for template in QUOTATIONS[page]:
        assert plain(rendered(template)) in text, f"{page} should have: {rendered(template)}"


def test_table_of_when_is_that_of_results():
    """Each row of docs/when.md has the dependence, slope, chain and advantage of results/when/advantage.md."""
    rows = {}
    for line in (RESULTS / "when/advantage.md").read_text().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0].lower()] = cells
    page = (ROOT / "docs/when.md").read_text()
    fog = {"all in clear weather": "0 % in fog", "all in fog": "100 % in fog"}
    seen = 0
    for line in page.split("## Use CORY when")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        label = cells[0].lower().removeprefix("lookout, ")
        label = ("lookout, " if "lookout" in cells[0] else "") + fog.get(label, label)
        row = rows.get(f"{label}, eq. 4")
        if row is None:
            continue
        seen += 1
        for text, source in ((cells[1], row[2]), (cells[2], row[3]), (cells[4], row[7]), (cells[5], row[8])):
            assert number(text) == pytest.approx(number(source), abs=0.0051), line
    assert seen == 7
