"""GSM8K answers in texts as models write them: thoughts, invented problems, headings, and numbers of every form."""

from fractions import Fraction

import pytest

from gsm8k_train.answers import extract

SHE_MAKES_18 = "She makes **18** dollars."


@pytest.mark.parametrize(
    "thought", ["Maybe the answer is 20.", r"\boxed{20}", "#### 20", "Question: how many? 20"]
)
def test_thoughts_are_no_answer(thought):
    assert extract(f"<think>\n{thought}\n</think>\n{SHE_MAKES_18}") == 18
    assert extract(f"{thought}\n</think>\n{SHE_MAKES_18}") == 18  # the prompt has opened them
    assert extract(f"<think>\n{thought}\n{SHE_MAKES_18}") is None
    assert extract(f"<think>{thought}</think>{SHE_MAKES_18}\n\nQ: 3?\n<think>4</think>5") == 18


@pytest.mark.parametrize(
    "mark",
    [
        "Question:", "Problem:", "Q:", "Human:", "User:", "**Question**:", "**Problem:**", "### Problem 2:", "Q2:",
        "## Exercise (3):", "Next problem:", "Problem：", "user\n", "[INST]", "<start_of_turn>user\n", "<end_of_turn>",
        "<|user|>", "<|end|>", "<|im_start|>user", "<|start_header_id|>user<|end_header_id|>", "<｜end▁of▁sentence｜>",
    ],
)  # fmt: skip
def test_the_next_problem_is_no_part_of_the_answer(mark):
    assert extract(f"{SHE_MAKES_18}\n\n{mark} Tom has 7 apples.\n#### 9") == 18
    if not mark.endswith("\n"):
        assert extract(f"So it is 18. {mark} Tom has 7 apples.\n#### 9") == 18


def test_a_problem_may_be_stated_before_it_is_solved():
    assert extract("\n**Problem:** 9 eggs at $2.\n**Solution:** 9 * 2 = 18") == 18
    assert extract("1. **Problem:** 9 eggs at $2.\n2. **Solution:** 9 * 2 = 18") == 18
    assert extract("There is one problem: she has 9 eggs. 9 * 2 = 18") == 18


@pytest.mark.parametrize("heading", ["Step 2: Money", "2. Money", "**2) Money**", "Step 2"])
def test_a_heading_is_no_answer(heading):
    assert extract(f"#### {heading}\n9 * 2 = 18\nShe makes $18.") == 18
    assert extract(f"#### {heading}\n9 * 2 = 18\n#### 18\nThat was step 3.") == 18


NUMBERS = [
    ("2½", "5/2"), ("½", "1/2"), ("-½", "-1/2"), ("2 ½", "5/2"), ("1⁄4", "1/4"), ("2 1/4", "9/4"), ("2 and 1/4", "9/4"),
    ("100 000", "100000"), ("100\u00a0000", "100000"), ("100\u2009000", "100000"),
    ("1\u202f000\u202f000.5", "2000001/2"),
    ("100'000", "100000"), ("100’000", "100000"), ("1\u200b000", "1000"), ("1,00,000", "100000"),
    ("12,34,567.5", "2469135/2"),
    ("１００", "100"), ("−１２", "-12"), ("–5", "-5"), ("$1.5 million", "1500000"), ("2½ million", "2500000"),
    (r"\$1.5 \text{ million}", "1500000"), ("3 Thousand", "3000"), ("5 hundred", "500"), ("negative 3", "-3"),
    ("minus $3", "-3"), ("12 m²", "12"), ("12㎡", "12"), ("12 m^2", "12"), (r"12 cm^{2}", "12"),
    ("2^3", None), (r"2^{3}", None), ("2²", None), ("1.234.567", None), ("1.234,56", None), ("12,34", None),
    ("1_000", None),
    ("7 hundred thousand", "700000"), ("$1.5$ million", "1500000"), ("3 lakh", "300000"), ("1\u066c234", "1234"),
    (r"1{\,}234", "1234"), ("1~000", "1000"), (r"\frac{\$3}{4}", "3/4"),
    ("3/4/2020", None), ("2 and a half", None), ("2-1/2", None), ("5 10/2", None), ("$18k", None),
]  # fmt: skip


@pytest.mark.parametrize(("number", "value"), NUMBERS)
def test_a_number_is_read_as_a_whole_or_not_at_all(number, value):
    expected = None if value is None else Fraction(value)
    for text in ("{}", "She makes {}.", "#### {}", "The answer is {}.", "7, so \\boxed{{{}}}"):
        assert extract(text.format(number)) == expected, text


def test_the_end_of_a_long_text_counts_and_so_does_its_beginning():
    rest = "and 7 more\n" * 10_000
    assert extract(f"#### 5\n{rest}") == 5
    assert extract(f"{rest}#### 5") == 5
    assert extract(f"<think>{rest}</think>It is 5.") == 5


def test_subtraction_has_no_negative_result():
    assert extract("10 minus 3") == 3
    assert extract("10 – 3") == 3
    assert extract("2 - ½ = 1½") == Fraction(3, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is $18 = 9 * $2.", 18),
        (r"\boxed{18 = 9 \cdot 2}", 18),
        ("#### 36 / 2", None),
        ("The answer is 5 x 10^3", None),
        ("#### 10**3", None),
        (r"\boxed{\frac{1}2}", None),
        (r"\boxed{\frac{3+1}{2}}", None),
        (r"\boxed{2\sqrt{3}}", None),
        (r"\boxed{{3 \over 4}}", None),
    ],
)
def test_what_is_not_worked_out_is_no_answer_and_the_side_that_is_one_number_is(text, value):
    assert extract(text) == value


def test_an_answer_in_tags_and_a_list_of_steps():
    assert extract("<answer>18</answer> I used 2 steps.") == 18
    assert extract("To find the answer:\n1. Compute 16 - 7 = 9.\n2. 9 * 2 = 18.") == 18
