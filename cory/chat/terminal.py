"""A chat in the terminal: a query a line, a response of every model below it."""

import shutil
import sys
import textwrap
from contextlib import suppress

from cory.chat.chain import Answer, Chain
from cory.errors import UserError
from cory.report.escape import printable

HELP = """A line is a query, or a JSON object such as a line of the run's data, in which `prompt` is the query.
/exchange exchanges the roles, /seed N sets the seed, /help shows this; end of input or Ctrl-C ends the chat."""
SET = """/set COLUMN=VALUE sets what reward or prompts read besides a query of your own: {columns}. Queries of the
run's data bring it along. An empty VALUE removes it."""


def talk(chain: Chain) -> None:
    """Answers the lines of the standard input until it ends. Ctrl-C stops an answer, or at the prompt the chat."""
    with suppress(ImportError):
        import readline  # noqa: F401  (lets `input` edit lines)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text
    asks = sys.stdin.isatty()
    if asks:
        print(help_text(chain))
    while True:
        _say_notes(chain)
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                command(chain, line)
            else:
                answers = chain.ask(line)
                for name, value in chain.read_besides(line).items():
                    print(f"{name}: {printable(str(value))}")
                print(shown(answers, shutil.get_terminal_size().columns), flush=True)
        except UserError as error:
            print(f"error: {printable(str(error))}", flush=True)
        except KeyboardInterrupt:
            chain.forget()
            print("\nstopped")


def command(chain: Chain, line: str) -> None:
    """Runs a line that starts with a slash. Raises a UserError if there is no such command."""
    name, _, value = line.strip().partition(" ")
    if name == "/exchange":
        chain.order = chain.exchanged(chain.order)
        print(", ".join(chain.speakers))
    elif name == "/seed" and value.strip().isdecimal():
        chain.seed = int(value)
    elif name == "/set" and "=" in value:
        column, _, text = value.partition("=")
        chain.set_column(column.strip(), text.strip())
        print(
            ", ".join(f"{key}={value}" for key, value in chain.columns.items()) or "nothing is set"
        )
    elif name == "/help":
        print(help_text(chain))
    else:
        raise UserError(
            f"expected /exchange, /seed NUMBER, /set COLUMN=VALUE or /help, got {line!r}"
        )


def help_text(chain: Chain) -> str:
    """What can be typed."""
    return (
        f"{HELP}\n{SET.format(columns=', '.join(chain.further_columns))}"
        if chain.further_columns
        else HELP
    )


def shown(answers: list[Answer], width: int) -> str:
    """Who answered, the reward and the text, wrapped to `width`; control characters are shown as escapes."""
    margin = max(len(answer.who) for answer in answers)
    lines = []
    for answer in answers:
        reward = "" if answer.reward is None else f"{answer.reward:+7.2f}"
        head = f"{answer.who:{margin}}{reward}  "
        for line in printable(answer.text).split("\n"):
            folded = textwrap.wrap(line, max(20, width - len(head))) or [""]
            for part in folded:
                lines.append(head + part)
                head = " " * len(head)
        if answer.team_reward is not None:
            lines.append(f"{'team reward':{margin}}{answer.team_reward:+7.2f}")
    return "\n".join(lines)


def _say_notes(chain: Chain) -> None:
    for note in chain.notes:
        print(printable(note), flush=True)
    chain.notes.clear()
