"""Chats with a run: the untrained model, and the run's agents in their roles, answer each line of input.

    python -m cory.chat runs/imdb_cory_tiny

A line is a prompt (text, or chat messages as JSON), or a JSON object with `prompt` and the other dataset columns that
the prompts and the reward use:

    {"prompt": "What is 2 + 2?", "answer": "#### 4"}

A repeated prompt gets new answers. Ctrl-D ends the chat, with exit status 2 if any line could not be answered.
See docs/quick_start.md.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cory.code_files import announce_files, announce_prompts
from cory.command import Arguments, main
from cory.config import Config
from cory.errors import UserError
from cory.evaluation.rows import ModelSource, agent_sources, check_run, with_prompts_of
from cory.run.settings import named, read_settings
from cory.run.tables import one_line, printable
from cory.task_kinds import kind_of_run, run_config


class Chat:
    """A run's agents in their initial roles, and the model that the first agent started from (its base).

    All models stay in memory.

    Raises a UserError if the run has not ended or was made in Python, or if its data or models have changed since.
    """

    def __init__(self, run: Path, device: str = "auto") -> None:
        kind = kind_of_run(read_settings(run))
        if kind is None:
            raise UserError(
                f"{run}: expected a run of cory.train or of a task's script, got one made in Python"
            )
        self.config = run_config(run).on(device)
        agents = list(agent_sources(run, self.config, {}).values())
        announce_files(run, self.config, set())
        announce_prompts(run, self.config)
        self.task = with_prompts_of(run, self.config, kind.make_task(self.config), {})
        for note in check_run(run, self.config, self.task):
            print(f"Note: {note}", file=sys.stderr)

        # Imported late: importing torch takes seconds, and the errors above should appear at once.
        from cory.evaluation.answer import load_agent
        from cory.parallel.devices import choose_device

        # The base answers in the first role.
        self.names = ["base"]
        self.roles = [0, *range(self.config.cory.num_roles)]
        answering = [ModelSource(agents[0].base, None, agents[0].base)]
        for role in self.roles[1:]:
            index = role % len(agents)
            self.names.append(f"agent_{index + 1} as {self.task.prompts.name(role)}")
            answering.append(agents[index])
        # A base is needed only for the KL, which is not computed here, so each model serves as its own base.
        chat_device = choose_device(device)
        self.models = [
            load_agent(source._replace(base=source.model), chat_device, Config())[0]
            for source in answering
        ]
        self.lines = 0  # number of lines answered so far

    def answer(self, line: str) -> list[str]:
        """Returns the lines to print: the base's and each role's response, with its reward.

        Raises a UserError if the line cannot be read, or is too long for a model.
        """
        # Imported late, as they import torch.
        from cory.chain import Chain, role_generators
        from cory.rewards import score_rollouts, score_team
        from cory.rollout import Batch
        from cory.streams import Purpose

        row = {name: [value] for name, value in self._row(line).items()}
        sampling = self.config.sampling.after_training({})
        batch = Batch(row, sampling.max_new_tokens)
        transfer = self.config.cory.knowledge_transfer
        rollouts = []
        for agents in (self.models[:1], self.models[1:]):  # the base, and the run's chain
            generators = role_generators(0, Purpose.EVALUATION, len(agents), self.lines)
            rollouts += Chain(agents, self.task, sampling, transfer).roll_out(batch, generators)
        self.lines += 1
        texts = [rollout.completions[0] for rollout in rollouts]
        rewards = [""] * len(texts)
        notes = []
        try:
            if self.task.rewards:
                scores = score_rollouts(self.task.reward, batch, rollouts)
                rewards = [f"{role_scores.total.item():+.2f}" for role_scores in scores]
            team_reward = score_team(self.task.team, batch, rollouts[1:])
            if team_reward is not None:
                notes.append(f"team reward {team_reward.item():+.2f}")
        except Exception as error:  # the line may lack a column, or have one of another type
            notes.append(f"no reward: {one_line(f'{type(error).__name__}: {error}')}")
        # Indent a response's further lines, which could otherwise look like the next answer.
        shown = [printable(text).replace("\n", "\n  ") for text in texts]
        answers = [" ".join(parts) for parts in zip(self.names, rewards, shown, strict=True)]
        return [*answers, *notes]

    def _row(self, line: str) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": line}
        if line.lstrip().startswith(("{", "[{")):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"row: expected a JSON object or messages, got {line!r} ({error})"
                ) from None
            row = value if isinstance(value, dict) else {"prompt": value}
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeError:
            raise UserError(f"row: expected text in UTF-8, got {line!r}") from None
        missing = [name for name in ("prompt", *self.task.prompts.columns()) if name not in row]
        if missing:
            raise UserError(f"row: expected a JSON object with {', '.join(missing)}, got {line!r}")
        first = self.task.dataset[0]["prompt"]
        if isinstance(first, list) and isinstance(row["prompt"], str):
            # The text becomes the last turn. Earlier messages (system) come from the dataset's first row.
            row["prompt"] = [*first[:-1], {"role": "user", "content": row["prompt"]}]
        from cory.checks import check_prompt  # imported late, as it imports torch

        check_prompt(row["prompt"], "prompt")
        return row


def run() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("run", help="folder of a run that has ended")
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    chat = Chat(named(Path(arguments.run)), arguments.device)
    with suppress(ImportError):
        import readline  # noqa: F401  (lets `input` edit lines)
    if hasattr(sys.stdin, "reconfigure"):
        # A line that is not UTF-8 then raises a UserError in `answer`, instead of ending the chat.
        sys.stdin.reconfigure(errors="surrogateescape")
    status = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                print("\n".join(chat.answer(line)), flush=True)
        except UserError as error:
            print(f"error: {one_line(str(error))}", flush=True)
            status = 2
        except EOFError:
            sys.exit(status)


if __name__ == "__main__":
    main(run)
