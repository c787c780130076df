r"""Reads the number that a completion gives as its answer to a GSM8K question, by rule.

The first `####` before a number decides: the solution ends there, and any text after it may be an invented problem.
"#### 2. Money" is a heading and does not count. Without `####`, another mark decides: the last one in the text that has
a number in its sentence.

| mark                  | between the mark and the number                       |
|-----------------------|-------------------------------------------------------|
| `answer is`, `\boxed` | anything                                              |
| `answer:`, `<answer>` | no word: "Answer: Ann has 3 eggs" opens a solution    |

Without any mark, the last number of the text decides (the paper's rule). Text from `<think>` to `</think>` is ignored.
If a policy invents a further problem without having written `####`, the answer to that problem is graded, unless
`sampling.stop` ends the response before it.

After a mark, the first number is read. If it opens an equation, the last side that is a single number is read instead.
A number is a decimal with or without a minus, and commas may separate thousands. Any other notation, such as 1/2,
12,34, 1 234 or 3:30, makes the completion unparseable: no part of the notation and no other number is read instead.
Currency signs and units are ignored. "million" is a unit, as in GSM8K.

>>> def show(*texts):
...     print(*map(extract, texts))
>>> show("She sells 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18.")
18
>>> show("#### 1,234,567.50", "#### 18 dollars, 2 for each of 9 eggs", r"Answer: **\$1{,}234**")
2469135/2 18 1234
>>> show("So the answer is 2 + 3 = 5 apples in 4 boxes. I used 7 steps.", "The answer is 36 / 2.")
5 None
>>> show("The answer is 15 gallons * 8 pints / gallon = 120 pints.", "The answer is 18 = 9 * 2.")
120 18
>>> show("The answer is 5. Or rather: #### 6", "#### 18\nUser: What is 2 + 2?\n#### 4")
6 18
>>> show("Answer: Ann has 3 boxes of 4 eggs.\nShe has 12 eggs.", "#### Step 2: Eggs\nShe has 12.")
12 12
>>> show(r"Thus \(x = \boxed{\text{42}}\), as 2x = 84.", "<answer>\n42\n</answer>", "The answer is:\n42")
42 42 42
>>> show("10 - 5", "10-5", "-$5", "$-5", "\u22125", ".75", "75%")
5 5 -5 -5 -5 3/4 75
>>> show("1/2", r"\dfrac{1}{2}", "12,34", "2^3", "1e9", "9" * 51, "no number")
None None None None None None None
>>> show("2 1/2", "3:30", "1 234", "1'234", "2\u00bd", "= - 18", "minus 5", "2 and a half")
None None None None None None None None
>>> show("3\u20444", r"{3 \over 4}", "3 : 30", "3h30", "3\u203230", "1\u02bc234", "10 ^ 6")
None None None None None None None
>>> show("<think>#### 20?</think> It is 18.")
18
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 50  # longest number that is read; str() and float() do not raise up to this length

# To prevent long backtracking, each repetition in these patterns is bounded or has nothing after it that can fail.
_THOUGHT = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
_START = r"(?:minus |negative )?[0-9]"
_ITEM = r"\W{0,8}[0-9]{1,2}[.):][ \t]+[A-Za-z]"  # the number of a heading or a list item
_MARK = re.compile(
    rf"####(?=[^\w\n]{{0,8}}{_START})(?!{_ITEM})"
    rf"|(?:\banswer[\s*_]{{0,4}}[:=]|<answer>)(?=\W{{0,8}}{_START})(?![^\w\n]{{0,8}}\n{_ITEM})"
    r"|\banswer[\s*_]{1,4}is\b|(?P<boxed>\\boxed\b)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
# Everything that can belong to one number, even in notations that are not read.
_NUMBER = re.compile(
    r"""
    (?:  # a minus that neither subtracts nor joins words
        (?<![\w)%])-
        | (?<![\w)\]}%*])(?<![\w)\]}%*][ ])-[ ]
        | \b(?i:minus|negative)[ ]
    )?
    (?:(?<![\w.])\.)?
    (?<![\^0-9])[0-9]  # not a unit's exponent
    (?:(?:[0-9.,/^]|[eE][-+]?|(?<=[0-9])(?:[ :'’_h]|[ ][:^][ ])(?=[0-9]))*[0-9])?
    (?:[ ]and[ ](?:a[ ]half\b|[0-9]+/[0-9]))?
    """,
    re.VERBOSE,
)
_DECIMAL = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.))(?:\.[0-9]+)?")
# The text between two numbers of an equation: a unit of up to four words, an operator, an opening bracket.
_OPERATION = re.compile(
    r"(?:[\s/]{0,3}[a-z%]{1,15}(?![a-z%])){0,4}[\s)}\]*_]{0,8}(?:[-+*/x×÷]|(?P<equals>=))[\s(\[{*_]{0,8}",
    re.IGNORECASE,
)
_SIGNS = str.maketrans("−–－﹣‐‑‒·≈⁄∕`´ʼ′″", "-------*=//'''''", "$€£¥")
_LATEX = {
    r"\$": "",
    r"\,": "",
    r"\!": "",
    r"\;": " ",
    r"\ ": " ",
    "~": " ",
    "{,}": ",",
    "^{": "^",
    r"\times": "*",
    r"\cdot": "*",
    r"\div": "/",
    r"\approx": "=",
    r" \over ": "/",
}
_UNREAD = re.compile(
    r"\\[a-z]{0,4}frac\s*(?:\{[^{}]{0,40}\}|[0-9])\s*(?:\{[^{}]{0,40}\}|[0-9])"
    r"|(?<![A-Za-z])[²³¹¼-¾⁰-₉⅐-↋]|(?![0-9])\d"  # superscripts that are not a unit's exponent; digits of other scripts
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SPACES = re.compile(r"[^\S\n]+")


def extract(completion: str) -> Fraction | None:
    """Returns the number that a completion answers with, by the rules above; None if there is none. Never raises."""
    text = _plain(_THOUGHT.sub("\n", completion))
    marks = list(_MARK.finditer(text))
    first = [mark for mark in marks if mark[0] == "####"][:1]
    end = len(text)
    for mark in first or reversed(marks):
        number = _number_behind(mark, text[mark.end() : end])
        if number is not None:
            return _value(number)
        end = mark.start()
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def gold(answer: str) -> Fraction | None:
    """Returns the number after a gold solution's last `####`. Without `####`, the whole text must be a number.

    Returns None if there is no such number.

    >>> gold("She makes 9 * 200 = $1,800.\\n#### 1,800"), gold("1,800")
    (Fraction(1800, 1), Fraction(1800, 1))
    """
    _, hashes, text = _plain(answer).rpartition("####")
    number = _NUMBER.search(text)
    if number is None or not (hashes or text.strip() == number[0]):
        return None
    return _value(number[0])


def correct(completion: str, gold_number: Fraction) -> bool:
    """Whether a completion answers with exactly this number.

    >>> correct("The answer is $29.00.", Fraction(29)), correct("About 28.99.", Fraction(29))
    (True, False)
    """
    return extract(completion) == gold_number


def _plain(text: str) -> str:
    """Removes LaTeX and currency signs, collapses spaces, and makes numbers in other characters unparseable (0/0)."""
    for command, plain in _LATEX.items():
        text = text.replace(command, plain)
    text = _UNREAD.sub("0/0", text)
    text = _TEXT.sub(r"\1", text).translate(_SIGNS)
    return _SPACES.sub(" ", text)


def _number_behind(mark: re.Match[str], text: str) -> str | None:
    """Returns the number after a mark, given the text up to the next mark; None if its sentence has no number.

    The result is empty if the calculation has no result, as in "36 / 2".
    """
    sentence = text.lstrip(" \t\n:*_")
    if sentence_end := _SENTENCE_END.search(sentence):
        sentence = sentence[: sentence_end.start()]
    if mark["boxed"]:
        sentence = sentence.partition("}")[0]
    first = _NUMBER.search(sentence)
    if first is None:
        return None

    # The sides of the equation that the number opens, each a list of numbers.
    sides = [[first]]
    while operation := _OPERATION.match(sentence, sides[-1][-1].end()):
        number = _NUMBER.match(sentence, operation.end())
        if number is None:
            break
        if operation["equals"]:
            sides.append([])
        sides[-1].append(number)
    return next((side[0][0] for side in reversed(sides) if len(side) == 1), "")


def _value(number: str) -> Fraction | None:
    """Returns the value of a match of _NUMBER; None if it is not a decimal."""
    if len(number) > MAX_CHARACTERS or not _DECIMAL.fullmatch(number):
        return None
    return Fraction(number.replace(",", ""))
