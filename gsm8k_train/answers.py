r"""The number that a completion answers a GSM8K question with, read by rule.

The last marker that is followed by a number wins; without one, the last number of the text does (the paper's rule).

| marker        | followed by a number                                                                      |
|---------------|-------------------------------------------------------------------------------------------|
| `#### x`      | in the same line and sentence                                                             |
| `\boxed{x}`   | before the closing brace                                                                  |
| `answer is x` | in the same sentence; may begin on a later line                                           |
| `answer: x`   | likewise, with no word between: "Answer: Ann has 3 eggs" has no marker, it is a solution  |

What follows a marker is read as its first number, or, if that opens an equation, as the number after its last "=".
Percent and currency signs change nothing. A number of more than 50 digits or an exponent of more than 2, and x/0, make
the completion unparseable: no other number is taken in its place.

>>> def show(*texts):
...     print(*map(extract, texts))
>>> show("She sells 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18.")
18
>>> show("#### 1,234,567.50")
2469135/2
>>> show("#### 18 dollars, 2 for each of 9 eggs")
18
>>> show("So the answer is 2 + 3 = 5 apples in 4 boxes. I used 7 steps.")
5
>>> show("The answer is 5. Or rather: #### 6")
6
>>> show("Answer: Ann has 3 boxes of 4 eggs.\nShe has 12 eggs.")
12
>>> show(r"Thus \(x = \boxed{\text{42}}\), for 6 \times 7 = 42; see line 3.")
42
>>> show(r"Answer: **\$1{,}234**")
1234
>>> show(r"\dfrac{3}{4}", "3/4", "1 1/2 cups", ".75", "75%", "2.5E-3")
3/4 3/4 3/2 3/4 75 1/400
>>> show("10 - 5", "10-5", "= -5", "-$5", "$-5", "\u22125")
5 5 -5 -5 -5 -5
>>> show("1,2,3", "12,34", "1,234", "is 42.")
3 34 1234 42
>>> show("1/0", "1e999999999", "9" * 51, "no number")
None None None None
>>> show("#### 18\n\nQuestion: What is 2 + 2?\n#### 4")
18
"""

import re
from fractions import Fraction
from itertools import pairwise

ENDS = ("<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>", "Question:")
# Within these, str() and float() of an answer do not raise either.
MAX_DIGITS = 50
MAX_EXPONENT_DIGITS = 2
# Several times what a model is let to write. Longer answers are read from their end: bounded work on any text.
MAX_CHARS = 20_000

# In these patterns a repetition is of bounded length, or is followed by nothing that could fail and send it back.
_DECIMAL = (
    r"(?:(?:(?<![0-9],)[1-9][0-9]{0,2}(?:,[0-9]{3}(?![0-9]))+|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
_NUMBER = re.compile(
    r"(?P<whole>[0-9]{1,6}) (?P<part>[0-9]{1,6}/[0-9]{1,6})(?![.,]?[0-9]|/|[eE][-+]?[0-9])"
    rf"|(?P<over>{_DECIMAL})(?:/(?P<under>-?{_DECIMAL}))?"
)
_MARKER = re.compile(
    r"(?P<hashes>####)|(?P<boxed>\\boxed)|[Aa](?i:nswer)[\s*_]{0,4}(?:(?P<colon>[:=])|(?i:is)\b)"
)
_TO_LAST_DIGIT = re.compile(r".*[0-9]", re.DOTALL)
_LEAD = re.compile(r"[^0-9A-Za-z.\\-]*")
_LETTER = re.compile(r"[A-Za-z]")
_BRACE = re.compile(r"[{}]")
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
# Between two numbers of an equation: a unit of at most two words, an operator, an opening.
_OPERATION = re.compile(
    r"[ \t*_$€£¥%)}\]]*(?:[A-Za-z]+[ \t%)}\]]*){0,2}[-+*/^x×÷·=≈][-+*/^×÷·=≈ \t_$€£¥({\[]*",
    re.IGNORECASE,
)
_MAX_OPERATION = 40
_FRAC_ARGUMENT = r"\s*\{\s*(-?[0-9][0-9.,]*)\s*\}"
_LATEX = re.compile(
    rf"\\[dtc]?frac(?:{_FRAC_ARGUMENT}{_FRAC_ARGUMENT}|([0-9])([0-9]))"
    r"|(?P<comma>(?<=[0-9])(?:\\,|\{,\})(?=[0-9]))|\\(?P<command>[A-Za-z]+|[^A-Za-z])"
)
_COMMANDS = {
    "boxed": r"\boxed",
    "fbox": r"\boxed",
    "times": "*",
    "cdot": "*",
    "div": "/",
    "$": "$",
    "!": "",
}


def answer_text(completion: str) -> str:
    """The agent's own answer: the completion up to its first end-of-text marker or new "Question:".

    >>> answer_text("It is 18.<|endoftext|>It is 19.")
    'It is 18.'
    """
    for end in ENDS:
        completion = completion.partition(end)[0]
    return completion


def extract(completion: str) -> Fraction | None:
    """The number that a completion answers with, by the rules above; None if there is none. Never raises."""
    text = _plain(answer_text(completion))
    end = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        if numbers := _after(marker, end):
            return _value(_result(numbers), last=False)
        end = marker.start()
    if not (digits := _TO_LAST_DIGIT.match(text)):
        return None
    # A number has at most one space in it, so the last one begins after the last space but one.
    space = max(0, text.rfind(" ", 0, digits.end()))
    *_, number = _NUMBER.finditer(text, text.rfind(" ", 0, space) + 1)
    return _value(number, last=True)


def gold(answer: str) -> Fraction | None:
    """The number after the last `####` of a GSM8K gold solution, or a gold answer that is a number alone; else None.

    >>> gold("She makes 9 * 200 = $1,800.\\n#### 1,800"), gold("1,800")
    (Fraction(1800, 1), Fraction(1800, 1))
    """
    text = _plain(answer)
    hashes = text.rfind("####")
    number = _NUMBER.search(text, max(0, hashes))
    if (
        number
        and hashes < 0
        and (text[: number.start()].strip(" -$") or text[number.end() :].strip())
    ):
        return None  # more than a number alone
    return _value(number, last=False) if number else None


def correct(completion: str, gold_number: Fraction) -> bool:
    """Whether a completion answers with exactly this number.

    >>> correct("The answer is $29.00.", Fraction(29)), correct("About 28.99.", Fraction(29))
    (True, False)
    """
    return extract(completion) == gold_number


def _plain(text: str) -> str:
    r"""The text, or the end of a long one, without LaTeX: of its commands only \boxed is left."""
    if len(text) > MAX_CHARS:
        text = text[-MAX_CHARS:]
        first_space = re.search(r"\s|$", text)
        assert first_space is not None  # $ matches any text
        text = text[first_space.start() :]  # not from the middle of a number
    text = text.replace("\u2212", "-")
    return _LATEX.sub(_unlatex, text) if "\\" in text or "{,}" in text else text


def _unlatex(match: re.Match[str]) -> str:
    if match["comma"]:
        return ","
    if match["command"]:
        # Nothing for what wraps a number: the minus of -\text{5} stays at it.
        return _COMMANDS.get(
            match["command"], "" if match.string.startswith("{", match.end()) else " "
        )
    over = match[1] or match[3]
    under = match[2] or match[4]
    follows_digit = match.string[: match.start()][-1:].isdigit()
    return f"{' ' if follows_digit else ''}{over}/{under} "  # 1\frac{1}{2} is 1 1/2


def _after(marker: re.Match[str], end: int) -> list[re.Match[str]]:
    """The numbers that belong to a marker, none of them beyond `end`, where the next marker begins."""
    text = marker.string
    start = marker.end()
    if marker["boxed"] and text.startswith("{", start):
        end = _closing_brace(text, start, end)
    else:
        if not marker["hashes"]:
            lead = _LEAD.match(text, start, end)
            assert lead is not None  # it matches the empty text
            start = lead.end()
        stop = _SENTENCE_END.search(text, start, end)
        end = stop.start() if stop else end
    numbers = list(_NUMBER.finditer(text, start, end))
    if numbers and marker["colon"] and _LETTER.search(text, marker.end(), numbers[0].start()):
        return []
    return numbers


def _closing_brace(text: str, start: int, end: int) -> int:
    """Where the brace that opens at `start` closes; `end` if it does not before."""
    depth = 0
    for brace in _BRACE.finditer(text, start, end):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return end


def _result(numbers: list[re.Match[str]]) -> re.Match[str]:
    """The first number, or the one after the last "=" of the equation that it opens."""
    result = numbers[0]
    for left, right in pairwise(numbers):
        between = left.string[left.end() : right.start()]
        if len(between) > _MAX_OPERATION or not _OPERATION.fullmatch(between):
            break
        if "=" in between or "≈" in between:
            result = right
    return result


def _value(number: re.Match[str], last: bool) -> Fraction | None:
    """What a match of _NUMBER is worth; `last` says which of the two it is if "5 10/2" is no mixed number."""
    start = number.start()
    whole = Fraction(0)
    over = number["over"]
    under = number["under"]
    if number["whole"]:
        over, under = number["part"].split("/")
        if int(over) < int(under):
            whole = Fraction(number["whole"])
        elif last:
            start = number.start("part")
        else:
            over = number["whole"]
            under = None
    numerator = _decimal(over)
    denominator = _decimal(under or "1")
    if numerator is None or not denominator:
        return None
    value = whole + numerator / denominator
    return -value if _negative(number.string, start) else value


def _decimal(text: str) -> Fraction | None:
    """The value of a decimal with thousands commas and an exponent; None if it is too long."""
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if (
        len(digits.replace(".", "")) > MAX_DIGITS
        or len(exponent.lstrip("-+")) > MAX_EXPONENT_DIGITS
    ):
        return None
    return Fraction(f"{digits}e{exponent or 0}")


def _negative(text: str, start: int) -> bool:
    """Whether the number at `start` has a minus sign before it: one that neither subtracts nor is a bullet."""
    before = text[max(0, start - 16) : start]
    head = before.rstrip(" *_{$€£¥")
    if not head.endswith("-"):
        return False
    left = head[:-1].rstrip(" $€£¥")
    if " " in before[len(head) :]:  # "- 5"
        return left.endswith(("=", ":", "#", "(", " is"))
    return not (head[-2:-1].isalnum() or left[-1:].isdigit() or left.endswith((")", "]", "}", "%")))
