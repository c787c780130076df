"""Talks to the agents of a run: the base and the agents in their roles answer what is typed. See docs/share.md.

    python -m cory.chat runs/imdb_cory_tiny

A line is a prompt, or a row: a JSON object with `prompt`, and the columns that prompts and reward read besides.

    {"prompt": "What is 2 + 2?", "answer": "#### 4"}

The same prompt typed again is answered anew. Ctrl-D ends the chat.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from cory.cli.arguments import Arguments
from cory.cli.main import main
from cory.errors import UserError
from cory.evaluation.agents import Weights, agent_weights, run_agents
from cory.evaluation.lineup import reward_differs, with_prompts_of
from cory.evaluation.responses import LoadedModel, load, reply
from cory.identity import check_models, policy_models
from cory.parallel.devices import choose_device
from cory.prompts import check_prompt
from cory.report.escape import one_line, printable
from cory.rewards import MissingColumns, score, score_chains
from cory.run.settings import named, read_settings
from cory.tasks.kind import kind_of_run, run_config
from cory.tasks.python_files import announce_files


class Chat:
    """A run's agents in the roles that they began with, and the base of the first agent. All models stay in memory.

    Raises a UserError: the run has not ended or was made in Python, or its data or models are not those of the run.
    """

    def __init__(self, run: Path, device: str = "auto") -> None:
        settings = read_settings(run)
        fingerprint = settings.get("fingerprint") or {}
        kind = kind_of_run(settings)
        if kind is None:
            raise UserError(
                f"{run}: expected a run of cory.train or of a task's script, got one that was made in Python"
            )
        self.config = run_config(run).on(device)
        announce_files(run, self.config, set())
        self.agents = list(agent_weights(run_agents(run), self.config, {}).values())
        self.task = with_prompts_of(run, kind.make_task(self.config), {})
        models = policy_models(self.config) | self.task.models()
        check_models(fingerprint.get("models") or {}, models, str(run))
        self.warning = reward_differs(run, fingerprint, self.task)
        self.loaded: dict[str, LoadedModel] = {}  # by their weights, so that none is loaded twice
        self.answered = 0

    def answer(self, line: str) -> list[str]:
        """Lines to print: the response of the base and of each role, with their rewards.

        Raises a UserError if the line is a wrong row, or too long for a model.
        """
        row = self._row(line)
        self.answered += 1
        base = self.agents[0].base
        texts = [self._respond(Weights(base, None, base), row, [], role=0)]
        names = ["base"]
        for role in range(self.config.cory.num_roles):
            index = role % len(self.agents)
            read = texts[1:] if self.config.cory.knowledge_transfer else []
            texts.append(self._respond(self.agents[index], row, read, role))
            names.append(f"agent_{index + 1} as {self.task.prompts.name(role)}")

        rewards = [""] * len(texts)
        notes = []
        try:
            if self.task.rewards:
                rewards = [f"{reward:+.2f}" for reward in self._rewards(row, texts)]
            if self.task.team is not None:
                columns = _columns(row, 1)
                team_reward = score_chains(self.task.team, [row["prompt"]], [texts[1:]], columns)
                notes.append(f"team reward {team_reward.item():+.2f}")
        except MissingColumns as error:
            columns_of_row = ", ".join(f'"{name}": ...' for name in ["prompt", *error.names])
            notes.append(f"no reward for a prompt alone; type a row: {{{columns_of_row}}}")
        # Indented, as a response may look like the next one's line.
        shown = [printable(text).replace("\n", "\n  ") for text in texts]
        answers = [" ".join(parts) for parts in zip(names, rewards, shown, strict=True)]
        return [*answers, *notes]

    def _row(self, line: str) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": line}
        if line.lstrip().startswith("{"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"row: expected a JSON object, got {line!r} ({error})") from None
        missing = [name for name in ("prompt", *self.task.prompts.columns()) if name not in row]
        if missing:
            raise UserError(f"row: expected a JSON object with {', '.join(missing)}, got {line!r}")
        first = self.task.dataset[0]["prompt"]
        if isinstance(first, list) and isinstance(row["prompt"], str):
            system = takewhile(lambda message: message["role"] == "system", first)
            row["prompt"] = [*system, {"role": "user", "content": row["prompt"]}]
        check_prompt(row["prompt"], "prompt")
        return row

    def _respond(
        self, weights: Weights, row: Mapping[str, Any], read: Sequence[str], role: int
    ) -> str:
        """A response of a role that reads the earlier responses `read`."""
        weights = weights._replace(base=weights.model)  # as no KL is computed
        if str(weights) not in self.loaded:
            self.loaded[str(weights)] = load(weights, choose_device(self.config.device))
        responses = reply(
            self.loaded[str(weights)],
            self.task,
            {name: [value] for name, value in row.items()},
            self.config.sampling.after_training({}),
            [[text] for text in read] or None,
            role,
            seed=self.answered * self.config.cory.num_roles + role,
            chat_template=weights.model.chat_template,
            kl=False,
        )
        return responses.completions[0]

    def _rewards(self, row: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
        """The task rewards of the base's response, as the pioneer's, and of each role's."""
        roles = [0, *range(self.config.cory.num_roles)]
        columns = _columns(row, len(texts))
        columns["role"] = [self.task.prompts.name(role) for role in roles]
        return score(self.task.reward, [row["prompt"]] * len(texts), texts, columns).tolist()


def _columns(row: Mapping[str, Any], times: int) -> dict[str, list[Any]]:
    """What a row has besides its prompt, so many times."""
    return {name: [value] * times for name, value in row.items() if name != "prompt"}


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=str, help="folder of a run that has ended")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda or cuda:N")
    arguments = parser.of()
    chat = Chat(named(Path(arguments.run)), arguments.device)
    if chat.warning:
        print(one_line(chat.warning))
    with suppress(ImportError):
        import readline  # noqa: F401  (lets `input` edit lines)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        try:
            if line.strip():
                print("\n".join(chat.answer(line)), flush=True)
        except UserError as error:
            print(f"error: {one_line(str(error))}", flush=True)


if __name__ == "__main__":
    main(run)
