"""Numbers that README and docs quote are those of the files under results/.

A quotation (quotations.yaml) is a piece of a page in which each number is an expression in braces over the results. It
is rendered and must be found on the page, spaces and line breaks aside.
"""

import csv
import json
import re
from functools import cache
from statistics import mean

import pytest
import yaml
from conftest import ROOT

from study.statistics import bootstrap
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
    return {
        cells[0]: cells[1:]
        for cells in ([c.strip() for c in line.strip("|").split("|")] for line in table.splitlines())
    }


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
        return self.final(group, "combined_reward", digits)

    def both(self, chain: str, pioneer: str, kl_coef: float = 0.05, digits: int = 2) -> str:
        """Held out: combined reward of a chain in which the KL of the first response counts, too."""
        last, first = evaluation(self.folder)[chain], evaluation(self.folder)[pioneer]
        return f"{last['combined_reward'] - kl_coef * first['kl']:.{digits}f}"

    def ahead(self, row: str, rival: str) -> str:
        """Held out: difference in combined reward, and its interval over seeds."""
        rows = json.loads((RESULTS / self.folder / "evaluation.json").read_text())["rows"]
        runs = [
            [r["combined_reward"] for r in rows if re.sub(r"-seed\d+", "", r["name"]) == name] for name in (row, rival)
        ]
        value, low, high = bootstrap(lambda mine, others: mean(mine) - mean(others), *runs)
        return f"{value:.2f} ({low:.2f} to {high:.2f})"

    def difference(self, group: str) -> str:
        """... against the baseline, in percent, without sign."""
        return f"{abs(number(groups(self.folder)[group][2])):.0f}"

    def interval(self, group: str) -> str:
        low, high = re.findall(r"([-+]?\d+)%", groups(self.folder)[group][2])[1:]
        return f"{int(low)} to {int(high)}"

    def apart(self, group: str) -> str:
        """... where it is absolute: the difference and its interval."""
        value, low, high = (float(x) for x in re.findall(r"[-+][\d.]+", groups(self.folder)[group][2]))
        return f"{value:.2f} ({low:.2f} to {high:.2f})"

    def final(self, group: str, metric: str, digits: int = 2) -> str:
        """End of training, over agents and roles: mean of a metric over seeds."""
        rows = csv.DictReader((RESULTS / self.folder / "runs.csv").open())
        return f"{mean(float(row[metric]) for row in rows if row['group'] == group):.{digits}f}"

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
    "smol": lambda agents, method="cory", more="": f"imdb_{method}_smollm2_135m_cpu{more}/{agents}",
    "credit": lambda mode, agents, task="imdb": f"{task}_cory_tiny-credit={mode}/{agents}",
    "learner": lambda name, agents, method="cory", more="", task="imdb": (
        f"{task}_{method}_tiny-algorithm={name}{more}-group_size=4/{agents}"
    ),
}
A1, A2, A21, A12, SELF = "agent_1", "agent_2", "agent_2 after agent_1", "agent_1 after agent_2", "agent_1 after itself"
NAMES |= {
    "A1": A1,
    "A2": A2,
    "A21": A21,
    "A12": A12,
    "SELF": SELF,
    "CAUSAL": "-credit=causal",
    "FIXED": "-exchange_period=0",
    "HALF": "-init_kl_coef=0.025",
}


@cache
def advantages() -> dict[str, dict[str, str]]:
    """The rows of results/when/advantage.md, by setting in lower case."""
    lines = (RESULTS / "when/advantage.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns = table[0]
    return {cells[0].lower(): dict(zip(columns, cells, strict=True)) for cells in table[2:]}


NAMES["lookout"] = lambda fog, column: advantages()[f"lookout, {fog} % in fog, eq. 4"][column]

QUOTATIONS = yaml.safe_load((ROOT / "tests/quotations.yaml").read_text())


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
    """Each row of docs/when.md has dependence, slope, best rival, chain and advantage of results/when/advantage.md."""
    page = (ROOT / "docs/when.md").read_text()
    fog = {"all in clear weather": "0 % in fog", "all in fog": "100 % in fog"}
    seen = 0
    for line in page.split("## Use CORY when")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        label = cells[0].lower().removeprefix("lookout, ")
        label = ("lookout, " if "lookout" in cells[0] else "") + fog.get(label, label)
        row = advantages().get(f"{label}, eq. 4")
        if row is None:
            continue
        seen += 1
        rivals = {
            number(row["one agent, alone"]): "alone",
            number(row["one agent, after itself"]): "after itself",
            number(row["untrained, after itself"]): "untrained, after itself",
        }
        assert cells[3] == f"{max(rivals):.2f} {rivals[max(rivals)]}", line
        for at, column in {1: "dependence", 2: "slope", 4: "chain", 5: "advantage"}.items():
            assert number(cells[at]) == pytest.approx(number(row[column]), abs=0.0051), line
    assert seen == 8


@pytest.mark.parametrize("page", ["claims.md", "claims_smollm2.md"])
def test_claims_are_counted(page):
    text = (RESULTS / page).read_text()
    verdicts = re.findall(r"(contradicted|undecided|reproduced|not tested)\)? \|$", text, re.MULTILINE)
    tally = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    assert f"Of {len(verdicts)} judgements: {tally}." in text
