"""The number that a completion gives as its GSM8K answer: hand-made cases, real solutions and random texts."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from cory.run.folder import read_rows
from gsm8k_train.answers import correct, extract, gold

DATA = ROOT.parent / "shared/data/gsm8k"
LONG = 20_000


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        # Without a mark such as `####`, the last number counts.
        ("", None), ("none", None), ("####", None), (r"\boxed{}", None), ("answer is", None), ("four", None),
        ("1 then 2", 2), ("1, 2, 3", 3), ("1,2,3", None), ("12 eggs.", 12), ("...5", 5), ("50%.", 50), ("**42**", 42),
        (r"\(42\)", 42), (r"\$1,234", 1234), ("16 - 3 = <<16-3=13>>13", 13), ("10% - 5", 5), ("(4)-5", 5),
        ("10 * -5", -5), ("(-5)", -5), ("3/4/2020", None), ("1.2.3", None), ("$1.50", "3/2"),
        # With a mark, the number after it counts. 3 and 7 are decoys.
        ("3 #### 5\n7", 5), ("3####5; 7", 5), ("#### 5 of 7", 5), ("#### -$1,234.50\n7", "-2469/2"), ("####\n7", 7),
        ("The answer is 3. No, the answer is 5. 7", 5), ("The answer is $5.00. 7", 5), ("The ANSWER IS\n\n**5**. 7", 5),
        ("6 answers 7", 7),
        (r"\boxed{5} 7", 5), (r"\boxed{\text{5 eggs}} = 7", 5), ("**Answer:** 5, not 7", 5), ("answer: -5\n7", -5),
        ("The answer is 5 because 2x = 7.", 5), ("#### 36 / 2", None), ("The answer is 5 x 3", None),
        (r"The answer is 5 \times 2 = 10 eggs, 7", 10), ("The answer is 50 points / 25 points per throw = 2 throws", 2),
        ("The answer is 25 miles per gallon x 12 gallons = 300 miles", 300), ("The answer is 10 / 3 ≈ 3.5", "7/2"),
        ("#### 3/4", None), ("The answer is 2 + 3", None), ("#### .5", "1/2"),
        (r"The answer is \(9 \cdot 2 = 5\), 7", 5), ("The answer is 20 – 15 = 5", 5), (r"\boxed{5\,000}", 5000),
        ("#### 5.\nThat is 7", 5), ("Answer: 5. Not 7", 5), ("Answer:\n5. Not 7", 7),
        (r"\boxed{2 + \text{3} = 5} 7", 5), (r"\boxed{\text{Total: }5}. 7", 5),
        ("The answer is 2 + 3 = 5 eggs, since 1 + 6 = 7.", 5), ("The answer is 2 + 3 = 5 eggs and 1 + 6 = 7.", 5),
        # Thoughts in <think> are left out.
        ("<think>#### 20</think>It is 18.", 18), ("#### 20</think>It is 18.", 18), ("<think>It is 18.", None),
        ("#### 18\nAnd 2 + 2?\n<think>#### 3</think>\n#### 4", 18), ("<think>1</think>\n<think>2</think>18", 18),
    ],
)  # fmt: skip
def test_extract_finds_the_answer(completion, expected):
    assert extract(completion) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(
    "invented",
    ["User: 2+2?", "QUESTION: 2+2?", "question 2:", "### Question", "## Example 2", "Problem 2:", "No.",
     "The answer is 4.", r"\boxed{4}", "<|im_end|>\n<|im_start|>user\n2+2?"],
)  # fmt: skip
def test_the_first_hash_mark_decides_whatever_follows(invented):
    assert extract(f"9 * 2 = 18\n#### 18\n{invented}\n#### 4") == 18
    assert extract(f"9 * 2 = 18\n#### 18 eggs. {invented}") == 18


@pytest.mark.parametrize(
    "number",
    ["2 1/2", "2 and 1/2", "2 and a half", r"\frac34", r"2\tfrac{1}{2}", "3:30", "1 234 567", "1\u202f234", "$1 234.50",
     "1,234 567", "2½", "18²", "10^{6}", "1e+3", "\u2212 18", "minus 18", "1'234", "1_234", "１８", r"5~000"],
)  # fmt: skip
def test_part_of_a_number_in_another_notation_is_no_answer(number):
    for text in (
        "{}",
        "7\n#### {}\n7",
        "7, so the answer is {}. 7",
        r"7 \boxed{{{}}} 7",
        "Answer: {}\n7",
    ):
        assert extract(text.format(number)) is None, text
    assert gold(f"#### {number}") is None


def test_units_and_signs_do_not_hide_a_number():
    assert extract("#### －18") == -18
    for number in ("18 million", "18 cm²", "18 m^2", r"18 \text{ m}^{2}", "18-inch"):
        assert extract(f"She has {number}") == 18


@pytest.mark.parametrize(
    "heading", ["Step 2: Money", "Total: 2", "Step 2", "2. Money", "**2) Money**"]
)
def test_a_number_in_a_heading_is_no_answer(heading):
    assert extract(f"#### {heading}\n9 * 2 = 18\nShe makes $18.") == 18
    assert extract("Answer:\n1. She eats 3.\n2. She makes 9 * 2 = $18.") == 18


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("9 * 2 = <<9*2=18>>18\n#### 18", "18"), ("#### 109,200,000", "109200000"), ("x\n#### -7", "-7"),
        ("#### 1\n#### 2.50", "5/2"), ("18", "18"), (" -1,800 ", "-1800"),
        ("18 eggs", None), ("", None), ("18 ####", None), ("#### none", None),
    ],
)  # fmt: skip
def test_gold_reads_the_answer_of_a_solution(answer, expected):
    assert gold(answer) == (None if expected is None else Fraction(expected))


def test_correct_compares_exactly():
    assert correct("#### 29.00", Fraction(29))
    assert not correct("#### 0.3333333333", Fraction(1, 3))
    assert not correct("#### 12345678901234567891", Fraction(12345678901234567890))
    assert not correct("no number", Fraction(0))


@pytest.mark.skipif(not DATA.exists(), reason=f"the GSM8K files are not in {DATA}")
def test_real_solutions_are_read_correctly():
    """Tests every eighth of GSM8K's solutions."""
    solutions = [
        row["answer"] for split in ("train", "test") for row in read_rows(DATA / f"{split}.jsonl")
    ][::8]
    numbers = [Fraction(solution.rpartition("#### ")[2].replace(",", "")) for solution in solutions]
    assert len(solutions) == 1099
    assert [gold(solution) for solution in solutions] == numbers
    shifted = numbers[1:] + numbers[:1]
    for solution, number, other in zip(solutions, numbers, shifted, strict=True):
        thought = solution.partition("####")[0]
        for text in (
            solution,
            f"{thought}The answer is ${int(number):,}.\n\nQuestion: {other}",
            f"{thought}**Answer:** {number}\n\nCheck: {other}",
            rf"{thought}\[\boxed{{{number}}}\] and not {other}",
        ):
            assert correct(text, number), text
            assert correct(text, other) == (number == other), text


@pytest.mark.parametrize(
    "unit",
    ["1", "9,", "1,111,", "{", " ", "-", "1-", ".", "1.", "#", "#### ", r"\boxed", r"\frac{1}{2}", "answer is ",
     "answer is 1 ", "answer:", "1/", "1e", "1=", "1 apples = ", "1 a a ", "1 " + "a" * 37, "a", "<think>", "Question"],
)  # fmt: skip
def test_pathological_texts_are_read_within_a_second(unit):
    body = unit * (LONG // len(unit))
    for text in (body, "#### " + body, "answer is " + body, r"\boxed{" + body, body + "x"):
        start = time.process_time()
        str(extract(text))
        gold(text)
        assert time.process_time() - start < 1


TOKENS = [
    *"0123456789.,-+/$%{}()*#\\=eE \n", "\u2212", "1,234", "1/2", "1e9", "####", "\\boxed{", "\\frac{1}{2}", "\\frac{",
    "{,}", "answer", " is ", ":", "Question:", "<think>", "</think>", "a", " eggs ",
]  # fmt: skip


@settings(deadline=None, max_examples=500, derandomize=True)
@given(st.text() | st.lists(st.sampled_from(TOKENS), max_size=40).map("".join))
def test_random_texts_raise_no_error(text):
    value = extract(text)
    assert correct(text, Fraction(7)) == (value == 7)
    for number in (value, gold(text)):
        if number is not None:
            str(number), float(number)


TEMPLATES = [
    "{}", "{}.", "so 2 * 3 = {}", "She has 7, he {}", "#### {}", "7\n#### {}\n7", "#### 2 + 3 = {}, 7",
    "The answer is {}. 7", "7, so the answer is **{}**.", "Answer: {}\n7", r"\boxed{{{}}} 7",
    r"7 \(\boxed{{\text{{{}}}}}\)",
]  # fmt: skip


@settings(deadline=None, max_examples=500, derandomize=True)
@given(
    st.integers(-(10**24), 10**24),
    st.integers(0, 9),
    st.sampled_from(["{}", "{:,}"]),
    st.sampled_from(
        ["{sign}{}", "{sign}${}", "${sign}{}", "{sign}{}%", r"{sign}\${}", "{sign}{} eggs"]
    ),
    st.sampled_from("-\u2212"),
    st.sampled_from(TEMPLATES),
)
def test_a_written_number_is_read_back(digits, places, style, unit, minus, template):
    value = Decimal(digits).scaleb(-places)
    number = style.replace("}", "f}" if ":" in style else ":f}").format(abs(value))
    text = template.format(unit.format(number, sign=minus if digits < 0 else ""))
    assert extract(text) == Fraction(value)
    assert not correct(text, Fraction(value) + 1)
