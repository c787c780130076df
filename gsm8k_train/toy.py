"""The toy setting: word problems from templates, and a small language model trained on them.

The model is shipped in `weights/` beside this file (made by `toys/make_gsm8k_toy.py`). The problems are generated, and
are the same everywhere. They have GSM8K's form, but only one to three steps, small numbers and no <<calculator>>
annotations.

Two in five training solutions are wrong: a guess without steps, or a wrong operation in one step. Like a pre-trained
LLM, the model therefore knows more than it shows, and RL can make it solve problems more often. In training texts with
the observer's prompt, the answer repeats a right solution four times in five and corrects a wrong one about half the
time, so another agent's solution is worth reading. Drills teach the calculations themselves.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cory.errors import UserError

POLICY = Path(__file__).resolve().parent / "weights" / "policy"
TRAIN_PROBLEMS = 6000
TEST_PROBLEMS = 500
EXAMPLE = (
    "Question: Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he "
    "have now? Answer: Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 "
    "more toys. 5 + 4 = 9. "
)
# A question and its steps. [a + b] is a calculation with the question's numbers a, b, c and earlier results x, y.
TEMPLATES = (
    "{name} has {a} {item}. {friend} gives {them} {b} more. How many {item} does {name} have now?|"
    "{name} has [a + b] {item} now.",
    "{name} had {a} {item} and gave {b} of them to {friend}. How many {item} are left?|There are [a - b] {item} left.",
    "{name} buys {a} boxes with {b} {item} in each box. How many {item} does {they} buy?|{name} buys [a * b] {item}.",
    "{name} shares {a} {item} equally among {b} friends. How many {item} does each friend get?|"
    "Each friend gets [a / b] {item}.",
    "There are {a} {item} on the table and {b} {item} on the shelf. How many {item} are there in total?|"
    "There are [a + b] {item} in total.",
    "{name} is {a} years old. How old will {they} be in {b} years?|{name} will be [a + b] years old.",
    "{name} is {a} years old and {friend} is {b} years younger. How old is {friend}?|{friend} is [a - b] years old.",
    "A book has {a} pages. {name} has read {b} of them. How many pages are left?|There are [a - b] pages left.",
    "{name} runs {a} miles every day. How many miles does {they} run in {b} days?|{name} runs [a * b] miles.",
    "{name} cuts a rope of {a} meters into {b} equal pieces. How long is each piece?|Each has [a / b] meters.",
    "{name} needs {a} dollars for a bike and has saved {b} dollars. How many dollars does {they} still need?|"
    "{name} still needs [a - b] dollars.",
    "There are {a} children and each van holds {b} children. How many vans are needed?|They need [a / b] vans.",
    "A room has {a} rows of {b} chairs. How many chairs are there?|There are [a * b] chairs.",
    "{name} has {a} {item} and {friend} has twice as many. How many {item} do they have together?|"
    "{friend} has [a * 2] {item}.|Together they have [a + x] {item}.",
    "{name} has {a} {item} and {friend} has half as many. How many {item} do they have together?|"
    "{friend} has [a / 2] {item}.|Together they have [a + x] {item}.",
    "{name} has {a} {item}. {friend} has {b} more than {name}. How many {item} do they have together?|"
    "{friend} has [a + b] {item}.|Together they have [a + x] {item}.",
    "{name} has {a} {item}. {friend} has {b} fewer than {name}. How many {item} do they have together?|"
    "{friend} has [a - b] {item}.|Together they have [a + x] {item}.",
    "{name} had {a} {item}. {They} found {b} more and lost {c}. How many {item} does {name} have now?|"
    "{name} had [a + b] {item}.|Now {they} has [x - c] {item}.",
    "{name} had {a} {item}. {They} used {b} and gave {c} to {friend}. How many {item} are left?|"
    "{They} has [b + c] {item} less.|There are [a - x] {item} left.",
    "{name} buys {a} bags of {b} {item} and loses {c} of the {item}. How many {item} are left?|"
    "{name} buys [a * b] {item}.|There are [x - c] {item} left.",
    "{name} picks {a} {item} and {friend} picks {b}. They put them equally into {c} bags. How many {item} are in each "
    "bag?|They pick [a + b] {item}.|Each bag has [x / c] {item}.",
    "{name} earns {a} dollars an hour. {They} works {b} hours and spends {c} dollars. How many dollars are left?|"
    "{name} earns [a * b] dollars.|There are [x - c] dollars left.",
    "A shop has {a} {item}. It sells {b} on Monday and {c} on Tuesday. How many {item} are left?|"
    "The shop sells [b + c] {item}.|There are [a - x] {item} left.",
    "{a} people are on a bus. {b} get off and {c} get on. How many people are on the bus now?|"
    "After the stop there are [a - b] people.|Now there are [x + c] people.",
    "A pen costs {a} dollars and a book costs {b} dollars more. How many dollars do both cost?|"
    "The book costs [a + b] dollars.|Both cost [a + x] dollars.",
    "{name} has {a} dollars and buys {b} {item} for {c} dollars each. How many dollars are left?|"
    "The {item} cost [b * c] dollars.|There are [a - x] dollars left.",
    "{name} plants {a} rows of {b} trees. {c} of the trees die. How many trees are left?|"
    "{name} plants [a * b] trees.|There are [x - c] trees left.",
    "A class has {a} boys and {b} girls. {c} of the children are sick. How many children are at school?|"
    "The class has [a + b] children.|At school there are [x - c] children.",
    "{name} reads {a} pages in the morning and {b} pages in the evening. How many pages does {they} read in {c} days?|"
    "{name} reads [a + b] pages a day.|That is [x * c] pages in all.",
    "{name} bakes {a} cakes and cuts each into {b} pieces. {friend} eats {c} pieces. How many pieces are left?|"
    "There were [a * b] pieces.|Now there are [x - c] pieces.",
    "{name} had {a} {item}. {They} lost {b} and shared the rest equally among {c} friends. How many {item} does each "
    "friend get?|{name} had [a - b] {item} left.|Each friend gets [x / c] {item}.",
    "{name} has {a} {item}. {friend} has {b} more than {name} and gives {c} away. How many {item} does {friend} have "
    "now?|{friend} had [a + b] {item}.|Now {friend} has [x - c] {item}.",
    "{name} has {a} {item}. {They} buys {b} packs of {c}. How many {item} does {name} have now?|"
    "{name} buys [b * c] {item}.|Now {they} has [a + x] {item}.",
    "{name} had {a} {item} and gave half of them to {friend}. Then {they} found {b} more. How many {item} does {name} "
    "have now?|{name} had [a / 2] {item} left.|Now {they} has [x + b] {item}.",
    "{name} has {a} {item}. {friend} has {b} more, and {third} has {c} fewer than {friend}. How many {item} do they "
    "have together?|{friend} has [a + b] {item}.|And {third} has [x - c].|All of them have [a + x + y].",
    "{name} had {a} {item}, bought {b} more, lost {c} and gave half of the rest to {friend}. How many {item} are left?|"
    "{name} had [a + b] {item}.|Then {they} had [x - c].|Half of them is [y / 2].",
    "{name} sells {a} {item} on Monday, twice as many on Tuesday and {b} on Sunday. How many {item} does {they} sell?|"
    "On Tuesday {name} sells [a * 2] {item}.|On both days [a + x].|In all [y + b].",
    "{name} has {a} bags of {b} {item} and {friend} has {c} {item}. They share them equally. How many {item} does each "
    "get?|{name} has [a * b] {item}.|Together they have [x + c].|Each gets [y / 2].",
    "A farm has {a} cows and {b} more sheep than cows. {c} sheep are sold. How many animals are left?|"
    "There were [a + b] sheep.|Now there are [x - c] sheep.|In all [a + y] animals.",
    "{name} saves {a} dollars a week for {b} weeks. {They} gets {c} dollars from {friend} and spends half of it all. "
    "How many dollars are left?|{name} saves [a * b] dollars.|Now {they} has [x + c].|Half of it is [y / 2].",
)  # fmt: skip
GIRLS = "Anna Beth Dina Emma Grace Julia Lisa Maria".split()
BOYS = "Adam Ben David Frank Henry Jack Leo Tom".split()
ITEMS = (
    "apples pears lemons cookies candies marbles stickers cards coins shells stones pencils books stamps beads eggs"
).split()
WRONG = {"+": "-", "-": "+", "*": "+", "/": "-"}  # operation used by a wrong step
# Sampling weights of templates by number of steps: RL learns nothing from problems that a small model cannot solve.
WEIGHTS = {1: 6, 2: 2, 3: 1}
MISTAKES = 0.4  # share of wrong solutions
GUESSES = 0.5  # share of wrong solutions that are a guess without steps
LARGEST_NUMBER = 16  # largest number in a right solution


def _calculate(expression: str, values: Mapping[str, int]) -> tuple[str, int | None]:
    """Returns the expression with its numbers, and its result: None if this is not a whole number from 0 to 99."""
    first, *rest = (str(values.get(term, term)) for term in expression.split())
    total = int(first)
    for operator, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        if operator == "/" and total % number:
            return "", None
        total = {
            "+": total + number,
            "-": total - number,
            "*": total * number,
            "/": total // max(number, 1),
        }[operator]
    return " ".join([first, *rest]), total if 0 <= total <= 99 else None


@dataclass(frozen=True)
class Problem:
    """A question, the steps to its answer, its numbers, and whether it is held out for the test split."""

    question: str
    steps: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    held_out: bool

    @property
    def answer(self) -> str:
        """The right solution."""
        return solve(random.Random(0), self) or ""


def _another_operation(expression: str, values: Mapping[str, int]) -> str:
    """Replaces an expression's last operation with a wrong one. "a + x" becomes "x - a" if "a - x" is below 0."""
    head, operator, last = expression.rsplit(" ", 2)
    if operator == "+" and values.get(head, 99) < values.get(last, 0):
        head, last = last, head
    return f"{head} {WRONG[operator]} {last}"


def solve(rng: random.Random, problem: Problem, mistake: bool = False) -> str | None:
    """Returns the solution in GSM8K's form, or None if a result is not a whole number from 0 to 99.

    With `mistake`, one step uses a wrong operation.
    """
    values = dict(problem.numbers)
    steps = problem.steps
    lines = []
    wrong = rng.randrange(len(steps)) if mistake else None
    for index, (step, result) in enumerate(zip(steps, "xyz", strict=False)):
        before, expression, after = re.split(r"[\[\]]", step)
        text, value = _calculate(expression, values)
        if index == wrong:
            text, value = _calculate(_another_operation(expression, values), values)
        if value is None:
            return None
        values[result] = value
        lines.append(f"{before}{text} = {value}{after}")
    return "\n".join([*lines, f"#### {value}"])


def problem(rng: random.Random) -> Problem:
    """Draws a problem whose right solution has only whole numbers from 2 to LARGEST_NUMBER."""
    (template,) = rng.choices(TEMPLATES, [WEIGHTS[template.count("|")] for template in TEMPLATES])
    letters = sorted(set(re.findall(r"{([abc])}", template)))
    while True:
        numbers = tuple((letter, rng.randint(2, 12 if letter == "a" else 6)) for letter in letters)
        they = rng.choice(("she", "he"))
        name = rng.choice(GIRLS if they == "she" else BOYS)
        friend, third = rng.sample([other for other in GIRLS + BOYS if other != name], 2)
        words = {
            "name": name,
            "friend": friend,
            "third": third,
            "they": they,
            "They": they.capitalize(),
        }
        words |= {"them": "her" if they == "she" else "him", "item": rng.choice(ITEMS)}
        question, *steps = template.format(**words, **dict(numbers)).split("|")
        # Only template and numbers decide the split, so a held-out problem cannot appear in training with other names.
        held_out = random.Random(f"{template}{numbers}").random() < 0.1
        made = Problem(question, tuple(steps), numbers, held_out)
        if (
            all(2 <= int(number) <= LARGEST_NUMBER for number in re.findall(r"\d+", made.answer))
            and made.answer
        ):
            return made


def lesson(rng: random.Random, asked: Problem) -> str:
    """Returns a training text. Two in five have the observer's prompt form. One in five starts with EXAMPLE."""
    prefix = EXAMPLE if rng.random() < 0.2 else ""
    if rng.random() < 0.6:
        return f"{prefix}Question: {asked.question} Answer: {attempt(rng, asked, MISTAKES)}"
    reference = attempt(rng, asked, 0.5)
    if reference == asked.answer:
        answer = attempt(rng, asked, 0.2)
    else:
        answer = reference if rng.random() < 0.3 else attempt(rng, asked, 0.3)
    # Two spaces: the template's space, and the space with which a response begins.
    return f"{prefix}Question: {asked.question} Reference:  {reference} Answer: {answer}"


def drill(rng: random.Random) -> str:
    """Returns ten calculations of the kind that solutions need."""
    lines: list[str] = []
    while len(lines) < 10:
        expression = f"{rng.randint(2, LARGEST_NUMBER)} {rng.choice('+-*/')} {rng.randint(2, LARGEST_NUMBER)}"
        text, value = _calculate(expression, {})
        if value is not None and 2 <= value <= LARGEST_NUMBER:
            lines.append(f"{text} = {value}")
    return "Answer: " + "\n".join(lines)


def attempt(rng: random.Random, asked: Problem, mistakes: float) -> str:
    """Returns a solution, which with probability `mistakes` is a guess without steps or has a wrong operation."""
    if rng.random() >= mistakes:
        return asked.answer
    text = solve(rng, asked, mistake=True) if rng.random() >= GUESSES else None
    right = int(asked.answer.split()[-1])
    return (
        text
        or f"#### {rng.choice([n for n in range(right - 3, right + 4) if n != right and n > 0])}"
    )


@cache
def _problems() -> dict[str, list[Problem]]:
    """Returns each split's problems, in the order in which they are drawn; test problems are distinct."""
    rng = random.Random(0)
    train: list[Problem] = []
    test: dict[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], Problem] = {}
    while len(train) < TRAIN_PROBLEMS or len(test) < TEST_PROBLEMS:
        drawn = problem(rng)
        if not drawn.held_out:
            train.append(drawn)
        else:
            test.setdefault((drawn.steps, drawn.numbers), drawn)
    return {"train": train[:TRAIN_PROBLEMS], "test": list(test.values())[:TEST_PROBLEMS]}


def problems(split: str) -> list[dict[str, str]]:
    """Returns the problems of a split in GSM8K's format: `question` and `answer`.

    Raises:
        UserError: the split does not exist.
    """
    if split not in ("train", "test"):
        raise UserError(f"task.split: expected train or test of the toy problems, got {split!r}")
    return [{"question": p.question, "answer": p.answer} for p in _problems()[split]]


def folder(name: str) -> str:
    """Returns the folder of the built-in policy `tiny`; other names are returned unchanged."""
    return str(POLICY) if name == "tiny" else name
