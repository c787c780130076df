r"""The number that a completion answers a GSM8K question with, read by rule.

The completion counts after its last `</think>`, up to a mark of a next turn or problem. The last marker that is
followed by a number wins; without one, the last number of the text does (the paper's rule).

| marker        | followed by a number                                                                      |
|---------------|-------------------------------------------------------------------------------------------|
| `#### x`      | in the same line and sentence, with no word between: "#### Step 2: Money" is a heading    |
| `\boxed{x}`   | before the closing brace                                                                  |
| `answer is x` | in the same sentence; may begin on a later line                                           |
| `answer: x`   | likewise, with no word between: "Answer: Ann has 3 eggs" has no marker, it is a solution  |

`<answer>` is a marker like `answer is`. What follows a marker is read as its first number, or, if that opens an
equation, as the last side of it that is one number: 18 in "18 = 9 * 2". What is not worked out, as "36 / 2", is none.
Percent and currency signs change nothing. What looks like a number but is none of `_GRAMMAR`, a number of more than 50
digits or an exponent of more than 2, and x/0, make the completion unparseable: no other number is taken in its place.

>>> def show(*texts):
...     print(*map(extract, texts))
>>> show("She sells 16 - 3 - 4 = 9 eggs and makes 9 * 2 = $18.")
18
>>> show("#### 1,234,567.50", "#### 18 dollars, 2 for each of 9 eggs")
2469135/2 18
>>> show("So the answer is 2 + 3 = 5 apples in 4 boxes. I used 7 steps.")
5
>>> show("The answer is 5. Or rather: #### 6")
6
>>> show("Answer: Ann has 3 boxes of 4 eggs.\nShe has 12 eggs.", "#### Step 2: Eggs\nShe has 12.")
12 12
>>> show(r"Thus \(x = \boxed{\text{42}}\), for 6 \times 7 = 42; see line 3.", r"Answer: **\$1{,}234**")
42 1234
>>> show(r"\dfrac{3}{4}", "3/4", "1 1/2 cups", ".75", "75%", "2.5E-3")
3/4 3/4 3/2 3/4 75 1/400
>>> show("1\u00bd", "\u00bd", "2 and 1/4", "100 000", "100'000", "1,00,000", "$1.5 million")
3/2 1/2 9/4 100000 100000 100000 1500000
>>> show("10 - 5", "10-5", "= -5", "-$5", "$-5", "\u22125", "negative 5")
5 5 -5 -5 -5 -5 -5
>>> show("1,234", "is 42.", "12 m\u00b2", "1,2,3", "12,34", "1.234,5", "2^3")
1234 42 12 None None None None
>>> show("1/0", "1e999999999", "9" * 51, "no number")
None None None None
>>> show("<think>Is it 20?</think> It is 18.\n\n**Problem 2:** What is 2 + 2?\n#### 4")
18
"""

import re
import unicodedata
from collections import deque
from fractions import Fraction
from functools import cache
from itertools import pairwise

# Within these, str() and float() of an answer do not raise either.
MAX_DIGITS = 50
MAX_EXPONENT_DIGITS = 2

# Where thinking begins and ends, and where the next turn or problem begins: at a heading that begins a line, or follows
# a sentence on it, other than the "1." of a list. A heading at the start is not the next one.
_MARK = re.compile(
    r"</?think>|Question:|</s>|<eos>|<(?:start|end)_of_turn>|\[INST\]|<\|[^<>|\n]{1,40}\|>"
    r"|(?:(?<=\n)|(?<=[^\n]{4}[.!?]))[ \t*_#>`~-]*(?P<heading>(?i:(?:(?:next|new|another) )?"
    r"(?:question|problem|exercise|q|human|user|instruction))[ #*_(]*[0-9]*[ .)*_]*(?::|$))",
    re.MULTILINE,
)

# In these patterns a repetition is of bounded length, or is followed by nothing that could fail and send it back.
_NUMBER = re.compile(
    r"(?<![0-9^])(?<!\^[{(-])"  # an exponent is part of another number, or of a unit such as m^2
    r"(?P<digits>(?:(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3}(?![0-9]))+|[0-9]+|(?<![0-9A-Za-z.])\.[0-9]+)"
    r"(?:[.,'_][0-9]+|/-?\.?[0-9]+|[eE][-+]?[0-9]+|\^[{(]?-?[0-9]+|[ -][0-9]{1,6}/[0-9]+"
    r"| and (?:a|one) (?:half|third|quarter)|[kKMB]\b)*)"
    r"(?P<scale>(?:[ {}$*-]{0,4}(?i:hundred|thousand|million|billion|trillion|lakh|crore)s?\b){0,3})"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12, "lakh": 10**5, "crore": 10**7}
_GROUPS = "|".join(rf"[1-9][0-9]{{0,2}}(?:{separator}[0-9]{{3}})+" for separator in ",' ")
_DECIMAL = (
    rf"(?:(?:{_GROUPS}|[1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
_GRAMMAR = re.compile(
    r"(?:(?P<whole>[0-9]{1,6}) (?=[0-9]+/[0-9]+\Z))?"
    rf"(?P<over>{_DECIMAL})(?:/(?P<under>-?{_DECIMAL}))?"
)

_MARKER = re.compile(
    r"(?P<hashes>####)|(?P<boxed>\\boxed)|(?i:<answer>)|[Aa](?i:nswer)[\s*_]{0,4}(?:(?P<colon>[:=])|(?i:is)\b)"
)
_HEADING_NUMBER = re.compile(r"[.):][ \t*_]*[A-Za-z]")  # what follows the number of "#### 2. Money"
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
_FRAC_ARGUMENT = r"\s*\{\s*[$€£¥]?(-?[0-9][0-9.,]*)\s*\}"
_LATEX = re.compile(
    rf"\\[dtc]?frac(?:{_FRAC_ARGUMENT}{_FRAC_ARGUMENT}|([0-9])([0-9]))"
    r"|\\(?P<command>[A-Za-z]+|[^A-Za-z])"
)
_SIGNS = str.maketrans("\u2010\u2012\u2013\u2212\u2044\u2215\u2019\u02bc\u066c~", "----//''' ")
_COMMANDS = {"boxed": r"\boxed", "fbox": r"\boxed", "times": "*", "cdot": "*", "div": "/"}
_UNREAD = "1/0*"  # is no number, nor is what it is joined to
_COMMANDS |= dict.fromkeys(["frac", "dfrac", "tfrac", "cfrac", "sqrt", "over", "overline"], _UNREAD)


def answer_text(completion: str) -> str:
    r"""The agent's own answer: the completion after its thoughts, up to a mark of a next turn or problem.

    >>> answer_text("It is 20.</think>It is 18.<|endoftext|>It is 19.")
    'It is 18.'
    """
    thinks = "</think>" in completion.partition("<think>")[0]  # since before the completion
    start = 0
    for mark in _MARK.finditer(completion):
        if mark[0] == "<think>":
            thinks = True
        elif mark[0] == "</think>":
            thinks = False
            start = mark.end()
        elif not thinks and (not mark["heading"] or completion[start : mark.start()].strip()):
            return completion[start : mark.start()]
    return "" if thinks else completion[start:]


def extract(completion: str) -> Fraction | None:
    """The number that a completion answers with, by the rules above; None if there is none. Never raises."""
    text = _plain(answer_text(_normal(completion)))
    end = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        if numbers := _after(marker, end):
            result = _result(numbers)
            return _value(result) if result else None
        end = marker.start()
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def gold(answer: str) -> Fraction | None:
    """The number after the last `####` of a GSM8K gold solution, or a gold answer that is a number alone; else None.

    >>> gold("She makes 9 * 200 = $1,800.\\n#### 1,800"), gold("1,800")
    (Fraction(1800, 1), Fraction(1800, 1))
    """
    _, hashes, text = _plain(_normal(answer)).rpartition("####")
    number = _NUMBER.search(text)
    if number is None or not (hashes or text.strip(" -$\n") == number[0]):
        return None
    return _value(number)


def correct(completion: str, gold_number: Fraction) -> bool:
    """Whether a completion answers with exactly this number.

    >>> correct("The answer is $29.00.", Fraction(29)), correct("About 28.99.", Fraction(29))
    (True, False)
    """
    return extract(completion) == gold_number


def _normal(text: str) -> str:
    """The text in plain characters."""
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    return "".join(map(_character, text))


@cache
def _character(character: str) -> str:
    """What a character is read as: its plain form, which is Unicode's NFKC."""
    if unicodedata.category(character) == "Cf":  # takes no space
        return ""
    plain = unicodedata.normalize("NFKC", character).translate(_SIGNS)
    if character.isdecimal() or "/" in plain:
        return plain
    return re.sub("([0-9]+)", r"^\1", plain)  # as in m²


def _plain(text: str) -> str:
    r"""The text with signs for words, and without LaTeX: of its commands only \boxed is left."""
    text = text.replace("{,}", ",").replace(r"{\,}", ",").replace(r"\$", "$").replace(r"\!", "")
    text = _LATEX.sub(_unlatex, text)
    text = re.sub(r"(?<=[0-9]) and (?=[0-9]+/[0-9])", " ", text)
    return re.sub(r"(?<![\w-])(?i:negative|minus) +(?=[$€£¥({]*\.?[0-9])", "-", text)


def _unlatex(match: re.Match[str]) -> str:
    if match["command"]:
        # Nothing for what wraps a number: the minus of -\text{5} stays at it.
        return _COMMANDS.get(
            match["command"], "" if match.string.startswith("{", match.end()) else " "
        )
    over = match[1] or match[3]
    under = match[2] or match[4]
    before = match.string[max(0, match.start() - 1) : match.start()]
    return f"{' ' if before.isdigit() else ''}{over}/{under} "  # 1\frac{1}{2} is 1 1/2


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
    if not numbers or not (marker["hashes"] or marker["colon"]):
        return numbers
    before = text[marker.end() : numbers[0].start()]
    in_list = marker["hashes"] or "\n" in before
    if _LETTER.search(before) or (in_list and _HEADING_NUMBER.match(text, numbers[0].end())):
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


def _result(numbers: list[re.Match[str]]) -> re.Match[str] | None:
    """The last side of the equation that the first number opens, of those that are one number."""
    sides = [[numbers[0]]]
    for left, right in pairwise(numbers):
        between = left.string[left.end() : right.start()]
        if len(between) > _MAX_OPERATION or not _OPERATION.fullmatch(between):
            break
        if "=" in between or "≈" in between:
            sides.append([])
        sides[-1].append(right)
    return next((side[0] for side in reversed(sides) if len(side) == 1), None)


def _value(number: re.Match[str]) -> Fraction | None:
    """What a match of _NUMBER is worth; None if it is none of _GRAMMAR's numbers."""
    parts = _GRAMMAR.fullmatch(number["digits"])
    if parts is None:
        return None
    over = _decimal(parts["over"])
    under = _decimal(parts["under"] or "1")
    if over is None or not under or (parts["whole"] and over >= under):  # as 5 10/2
        return None
    value = int(parts["whole"] or 0) + over / under
    for word in re.findall("[a-z]+", number["scale"].lower()):
        value *= _SCALES[word.removesuffix("s")]
    return -value if _negative(number.string, number.start()) else value


def _decimal(text: str) -> Fraction | None:
    """The value of a decimal with separators of thousands and an exponent; None if it is too long."""
    digits, _, exponent = re.sub("[,' ]", "", text).lower().partition("e")
    num_digits = sum(map(str.isdigit, digits))
    if num_digits > MAX_DIGITS or len(exponent.lstrip("-+")) > MAX_EXPONENT_DIGITS:
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
