r"""The number that a completion answers a GSM8K question with, read by rule.

The completion counts after its last `</think>`, up to the next `Question:`. The last marker that a number follows in
the same sentence wins; without one, the last number of the text does (the paper's rule).

| marker                        | before the number                                                          |
|-------------------------------|----------------------------------------------------------------------------|
| `answer is`, `\boxed`         | anything of the sentence                                                   |
| `####`, `answer:`, `<answer>` | no word: "Answer: Ann has 3 eggs" is a solution; "#### 2. Money" a heading |

What follows a marker is read as its first number, or, if that opens an equation, as the last side that is one number.
A number is a decimal; commas may separate its thousands. What looks like a number and is none, as 1/2 or 12,34, makes
the completion unparseable: no other number is taken in its place. Currency signs change nothing; "million" and "minus"
are not read.

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
>>> show("The answer is 5. Or rather: #### 6")
6
>>> show("Answer: Ann has 3 boxes of 4 eggs.\nShe has 12 eggs.", "#### Step 2: Eggs\nShe has 12.")
12 12
>>> show(r"Thus \(x = \boxed{\text{42}}\), as 2x = 84.", "<answer>\n42\n</answer>", "The answer is:\n42")
42 42 42
>>> show("10 - 5", "10-5", "-$5", "$-5", "\u22125", ".75", "75%")
5 5 -5 -5 -5 3/4 75
>>> show("1/2", r"\dfrac{1}{2}", "12,34", "2^3", "1e9", "9" * 51, "no number")
None None None None None None None
>>> show("<think>Is it 20?</think> It is 18.\n\nQuestion: What is 2 + 2?\n#### 4")
18
"""

import re
from fractions import Fraction

MAX_CHARACTERS = 50  # of a number: within these, str() and float() of an answer do not raise either

# In these patterns a repetition is of bounded length, or is followed by nothing that could fail and send it back far.
_ITEM = r"\W{0,8}[0-9]{1,2}[.):][ \t]+[A-Za-z]"  # the number of a heading or of a list's item
_MARKER = re.compile(
    rf"####(?=[^\w\n]{{0,8}}[0-9])(?!{_ITEM})"
    rf"|(?:\banswer[\s*_]{{0,4}}[:=]|<answer>)(?=\W{{0,8}}[0-9])(?![^\w\n]{{0,8}}\n{_ITEM})"
    r"|\banswer[\s*_]{1,4}is\b|(?P<boxed>\\boxed\b)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$)")
# All that may belong to one number, and a minus before it that neither subtracts nor joins words.
_NUMBER = re.compile(r"(?:(?<![\w)%])-)?(?:(?<![\w.])\.)?[0-9](?:[0-9.,/^eE]*[0-9])?")
_DECIMAL = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.))(?:\.[0-9]+)?")
# From a number to the next one of its equation: a unit of up to four words, an operator, an opening.
_OPERATION = re.compile(
    r"(?:[\s/]{0,3}[a-z%]{1,15}(?![a-z%])){0,4}[\s)}\]*_]{0,8}(?:[-+*/x×÷]|(?P<equals>=))[\s(\[{*_]{0,8}",
    re.IGNORECASE,
)
_SIGNS = str.maketrans("−–·≈", "--*=", "$€£¥")
_LATEX = {
    r"\$": "",
    r"\,": "",
    r"\!": "",
    "{,}": ",",
    r"\times": "*",
    r"\cdot": "*",
    r"\div": "/",
    r"\approx": "=",
}
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9.]{1,9})\}\{([0-9.]{1,9})\}")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def answer_text(completion: str) -> str:
    """The agent's own answer: the completion after its thoughts, up to the next question.

    >>> answer_text("It is 20.</think>It is 18. Question: 1 + 1?")
    'It is 18. '
    """
    after_thoughts = completion.rpartition("</think>")[2].partition("<think>")[0]
    return after_thoughts.partition("Question:")[0]


def extract(completion: str) -> Fraction | None:
    """The number that a completion answers with, by the rules above; None if there is none. Never raises."""
    text = _plain(answer_text(completion))
    end = len(text)
    for marker in reversed(list(_MARKER.finditer(text))):
        number = _number_behind(marker, text[marker.end() : end])
        if number is not None:
            return _value(number)
        end = marker.start()
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def gold(answer: str) -> Fraction | None:
    """The number after the last `####` of a GSM8K gold solution, or a gold answer that is a number alone; else None.

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
    """The text without currency signs, and as it would be without LaTeX."""
    for command, plain in _LATEX.items():
        text = text.replace(command, plain)
    text = _FRACTION.sub(r"\1/\2", text)
    return _TEXT.sub(r"\1", text).translate(_SIGNS)


def _number_behind(marker: re.Match[str], text: str) -> str | None:
    """The number that a marker points to, in the text up to the next one; None if there is none in its sentence.

    Empty if it is not worked out, as in "36 / 2".
    """
    sentence = text.lstrip(" \t\n:*_")
    if sentence_end := _SENTENCE_END.search(sentence):
        sentence = sentence[: sentence_end.start()]
    if marker["boxed"]:
        sentence = sentence.partition("}")[0]
    first = _NUMBER.search(sentence)
    if first is None:
        return None

    # The sides of the equation that it opens, each a list of numbers.
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
    """What a match of _NUMBER is worth; None if it is no decimal."""
    if len(number) > MAX_CHARACTERS or not _DECIMAL.fullmatch(number):
        return None
    return Fraction(number.replace(",", ""))
