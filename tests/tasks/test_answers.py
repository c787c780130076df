"""GSM8K answers: what number a completion answers with, on hand-made cases, the real solutions and any text at all."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from cory.run.folder import read_rows
from gsm8k_train.answers import answer_text, correct, extract, gold

DATA = ROOT.parent / "shared/data/gsm8k"
ENDS = ("<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>", "Question:")
LONG = 20_000

NUMBERS = [  # how a number is written, wherever it stands
    ("42", "42"), ("42.", "42"), ("42.\n", "42"), ("29.00", "29"), ("0.5", "1/2"), (".5", "1/2"), ("$.50", "1/2"),
    ("...5", "5"), ("paid.5", "5"), ("007", "7"), ("42kg", "42"), ("2eggs", "2"), ("3rd", "3"),
    ("1,234", "1234"), ("1,234,567.5", "2469135/2"), ("1,234kg", "1234"), ("1234567", "1234567"),
    ("$5", "5"), ("5$", "5"), ("€5", "5"), ("5 €", "5"), ("£1,000.", "1000"), ("¥500", "500"), ("50%", "50"),
    ("**42**", "42"), ("*42*", "42"), ("__42__", "42"), ("$42$", "42"), ("$$42$$", "42"), ("`42`", "42"),
    (r"\(42\)", "42"), (r"\[42\]", "42"), (r"\$1,234", "1234"), (r"50\%", "50"), (r"\text{42}", "42"),
    (r"\mathbf{42}", "42"), ("1{,}234", "1234"), (r"1\,234", "1234"), (r"1,\!234", "1234"), (r"42\,\text{km}", "42"),
    ("3/4", "3/4"), ("10/2", "5"), ("1/2,000", "1/2000"), ("1.5/3", "1/2"), ("3/-4", "-3/4"),
    (r"\frac{3}{4}", "3/4"), (r"\dfrac{3}{4}", "3/4"), (r"\tfrac { 3 } { 4 }", "3/4"), (r"\frac34", "3/4"),
    (r"-\frac{3}{4}", "-3/4"), (r"\frac{-3}{4}", "-3/4"), (r"1\frac{1}{2}", "3/2"), (r"\frac{1,000}{3}", "1000/3"),
    ("1 1/2", "3/2"), ("-1 1/2", "-3/2"), ("$2 3/4", "11/4"), ("1 1/2.", "3/2"),
    ("1e3", "1000"), ("1E+3", "1000"), ("2.5E-3", "1/400"), ("1e\u22122", "1/100"), ("1,000e2", "100000"),
    ("-5", "-5"), ("\u22125", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("-.5", "-1/2"), ("-1,234", "-1234"), ("+5", "5"),
    ("(-5)", "-5"), ("= -5", "-5"), ("= - 5", "-5"), ("**-5**", "-5"), (r"\(-5\)", "-5"), ("-{5}", "-5"),
    (r"-\text{5}", "-5"), ("-3/4", "-3/4"),
    ("9" * 50, "9" * 50), ("." + "9" * 50, "9" * 50 + "/1" + "0" * 50), ("1e99", "1" + "0" * 99),
    ("9" * 51, None), ("0." + "1" * 50, None), ("1" + ",111" * 17, None),
    ("1e100", None), ("1e-100", None), ("1e999999999", None), ("1e0003", None),
    ("1/0", None), ("0/0", None), ("1/0.00", None), ("-1/0", None), (r"\frac{1}{0}", None),
]  # fmt: skip

LAST = [  # no marker: the last number
    ("", None), (" \n", None), ("none", None), ("-", None), (".", None), ("$", None), (",", None), ("\\", None),
    ("{", None), ("####", None), (r"\boxed", None), (r"\boxed{}", None), ("answer is", None), ("answer:", None),
    ("٣", None), ("x²", None), ("four", None), ("/", None), ("e5", "5"), (r"\frac{a}{b}", None),
    ("1 then 2", "2"), ("Step 2: add", "2"), ("1,2,3", None), ("1, 2, 3", "3"), ("12,34", None), ("1,2,300", None),
    ("1234,567", None), ("01,234", None), ("1,2345", None), ("1/2,3/4", None), ("1.2.3", None), ("7:30", "30"),
    ("3/4/2020", None), ("1 1/0", None), ("1 5/3", None), ("1,5 1/2", None), ("1.5 1/2", None),
    ("1 1/2.5", None),
    ("1 1/2,000", None), ("1 1/2e1", None), ("-1 5/3", None), (r"\frac{3}{4}7", "7"),
    ("10-5", "5"), ("10 - 5", "5"), ("10 -5", "5"), ("10\u22125", "5"), ("$10-$5", "5"), ("$10 - $5", "5"),
    ("(4)-5", "5"), ("10% - 5", "5"), ("10%-5", "5"), ("10$-5$", "5"), ("x-5", "5"), ("10--5", "-5"),
    ("10 * -5", "-5"), ("5, -3", "-3"),
    ("- 5 eggs", "5"), ("a\n- 5 eggs", "5"), ("10\n-5", "-5"), ("it is -5", "-5"), ("3\u20135", "5"),
    ("16 - 3 = <<16-3=13>>13", "13"), ("7 eggs. ### 8", "8"), ("6 answers 7", "7"), ("### 5\n6", "6"),
    ("1e" + "9" * 99, None), ("18 " + "9" * 51, None), ("9" * 51 + " 18", "18"), ("4 or 1/0", None),
]  # fmt: skip

MARKED = [  # a marker wins; the decoys are 3 and 7
    ("3 #### 5\n7", "5"), ("3####5 7", "5"), ("3 ##### 5\n7", "5"), ("#### 5 of 7", "5"), ("#### 5. Not 7", "7"),
    ("#### total: $5, 7", "7"), ("#### - 5", "-5"), ("#### -5\n7", "-5"), ("#### -$1,234.50\n7", "-2469/2"),
    ("####\n3 7", "7"), ("#### 1 3/4/7", None), ("#### 5\n#### none", "5"), ("#### 7\n#### 5", "5"),
    ("#### 5\n####", "5"),
    ("#### 5, 7", "5"), ("#### 5,7", None), ("#### 1 1/2 7", "3/2"), ("#### 5 7/7", None), ("#### 5 \u20ac 7", "5"),
    ("#### 2 + 3 = 5\n7", "5"), ("#### 2 + 3 = 5 (7)", "5"), ("#### 5 = y", "5"), ("#### 2+3=5=5.0, 7", "5"),
    ("#### 10/3 ≈ 3.3, 7", "33/10"),
    ("#### 7 - 2 = $5", "5"), ("#### 2 - 7 = -5 7", "-5"), ("#### (3 + 7) / 2 = 5 7", "5"), ("#### 5 + 7", None),
    ("#### 2 eggs + 3 big eggs = 5 eggs, 7", "5"), ("#### 5 (x = 7)", "5"), ("#### 5 because 3 + 4 = 7", "5"),
    (r"#### 1 \times 5 = 5 7", "5"), ("#### 1 x 5 = 5 7", "5"), ("#### 5 - so 3 + 4 = 7", "5"),
    (r"3 \boxed{5} 7", "5"), (r"\boxed{\text{5}} 7", "5"), (r"\boxed{1{,}234} 7", "1234"), (r"\boxed{-5} 7", "-5"),
    (r"\boxed{\frac{3}{4}} 7", "3/4"), (r"\boxed{\boxed{5}} 7", "5"), (r"\boxed{x = 5} 7", "5"), (r"\boxed 5. 7", "5"),
    (r"\boxed{2 + 3 = 5 \text{ eggs}} = 7", "5"), (r"3 \boxed{5", "5"), (r"\fbox{5} 7", "5"),
    (r"\boxed{x} = 3, 7", "7"),
    (r"\boxed{\text{a} 5} 7", "5"), (r"\boxed{\text{a}} 7", "7"), (r"$\boxed{5}$ 7", "5"), (r"\boxed{ $5 } 7", "5"),
    ("The answer is 5. 7", "5"), ("the answer is: 5! 7", "5"), ("THE ANSWER IS 5, 7", "5"), ("answer is $-5$. 7", "-5"),
    ("The answer is **5**. 7", "5"), ("the answer is - 5, 7", "-5"), ("The answer is x = 5. 7", "5"),
    ("The answer is 2 + 3 = 5. 7", "5"), ("The answer is 5, as 3 + 4 = 7", "5"), ("answer is about 5. 7", "5"),
    ("The answer is 1,234,567.5 in 7", "2469135/2"), ("The answer is\n\n$$\n5\n$$\n7", "5"), ("answer is .5, 7", "1/2"),
    ("The answer is \u2212\\$5. 7", "-5"), ("The answer is even. 3, 7", "7"), ("The answer isn't 3, 7", "7"),
    ("3 Answer: 5 7", "5"), ("ANSWER : $5, 7", "5"), ("**Answer:** 5 7", "5"), ("**Answer**: 5, 7", "5"),
    (r"\textbf{Answer:} 5 7", "5"), ("Answer:\n5\n7", "5"), ("Answer: - 5, 7", "-5"), ("answer = 5, 7", "5"),
    ("Answer: 2 + 3 = 5, 7", "5"),
    ("Answer: Ann has 3.\nSo 7", "7"), ("Answer: Ann has 3.\n#### 5\n7", "5"), ("Final answer: \\(5\\), 7", "5"),
    ("#### 7\nThe answer is 5", "5"), ("The answer is 7\n#### 5", "5"), (r"\boxed{7} so answer: 5", "5"),
    (r"answer is \boxed{5} 7", "5"), (r"#### \boxed{5} 7", "5"), ("answer is #### 5 7", "5"),
    ("The answer is 5. #### ", "5"), ("answer is 5\nanswer is unknown\n7", "5"),
    ("#### " + "9" * 51 + "\n7", None), ("The answer is 1/0. 7", None), ("#### 1e999999999\n7", None),
    ("#### 7\n#### 1/0", None),
]  # fmt: skip

CUT = [
    ("5<|endoftext|>7", "5"), ("5</s>#### 7", "5"), ("5<|im_end|>7", "5"), ("5<|eot_id|>7", "5"),
    ("#### 5\n\nQuestion: 7", "5"), ("5 Question: 3 #### 7", "5"), ("Question: 7", None), ("</s>7", None),
    ("5<|eot_id|>3</s>7", "5"), ("5</s>3<|eot_id|>7", "5"), ("The question: 7", "7"), ("5 <s> 7", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "expected"), NUMBERS + LAST + MARKED + CUT)
def test_extract(completion, expected):
    assert extract(completion) == (None if expected is None else Fraction(expected))


@pytest.mark.parametrize(("number", "expected"), NUMBERS)
def test_a_number_is_read_the_same_after_every_marker(number, expected):
    for template in ("#### {}", "The answer is {}", "Answer: {}", r"\boxed{{{}}}", "3 or {}"):
        assert extract(template.format(number)) == (
            None if expected is None else Fraction(expected)
        ), template


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("9 * 2 = <<9*2=18>>18\n#### 18", "18"), ("#### 109,200,000", "109200000"), ("x\n#### -7", "-7"),
        ("#### 1\n#### 2.50", "5/2"), ("18", "18"), (" -1,800 ", "-1800"),
        ("18 eggs", None), ("", None), ("18 ####", None), ("#### none", None),
    ],
)  # fmt: skip
def test_gold(answer, expected):
    assert gold(answer) == (None if expected is None else Fraction(expected))


def test_correct_is_exact():
    assert correct("#### 29.00", Fraction(29))
    assert correct("It is 0.1.", Fraction(1, 10))
    assert not correct("#### 0.3333333333", Fraction(1, 3))
    assert not correct("#### 12345678901234567891", Fraction(12345678901234567890))
    assert not correct("no number", Fraction(0))
    assert not correct("#### 1/0", Fraction(0))


@pytest.mark.parametrize("end", ENDS)
def test_answer_text(end):
    assert answer_text(f"It is 5.\n{end} 6 {end}") == "It is 5.\n"
    assert answer_text("It is 5.\n") == "It is 5.\n"


@pytest.mark.skipif(not DATA.exists(), reason=f"the GSM8K files are not in {DATA}")
def test_real_solutions():
    """Every eighth."""
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


UNITS = [
    "1", "9,", "1,111,", "111,", ",", "{", "}", "{,}", "1{,}", " ", "\n", "-", "\u2212", "1-", "- 1", ".", "1.", ".1",
    "(", "1)", "$", "*", "#", "#### ", "####\n", "\\", "\\boxed", "\\boxed{", "\\boxed{1}", "\\frac", "\\frac{",
    "\\frac{1", "\\frac{1}{2}", "answer", "answer ", "answer:", "answer is ", "answer is 1 ", "1 ", "1/", "1/2 ",
    "1 1/", "1e", "e", "1=", "= ", "1 apples = ", "1 a a", "1 " + "a" * 37, "1 " + "*" * 37, "1" + "a" * 19_000 + "1",
    "a", "<|", "Question", "é",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_pathological_text_is_read_at_once(unit):
    body = unit * (LONG // len(unit))
    for text in (
        body,
        "#### " + body,
        "answer is " + body,
        r"\boxed{" + body,
        body + "x",
        body + " 5",
    ):
        start = time.process_time()
        value = extract(text)
        gold(text)
        assert time.process_time() - start < 1  # measured: 0.03 s at most
        str(value)


@pytest.mark.parametrize("unit", ["1,111,", "\\boxed{", "answer is 1 "])
def test_a_million_characters_are_read_at_once(unit):
    start = time.process_time()
    assert extract(unit * (1_000_000 // len(unit)) + "\n#### 5") == 5
    assert time.process_time() - start < 5


def test_a_long_answer_is_not_cut_within_its_number():
    assert extract("7" * 2 * LONG) is None
    assert extract("1,111" + ",111" * LONG) is None
    assert extract("x" * LONG + "1234" + "x" * (LONG - 2)) == 1234
    assert extract("7 " * LONG + "the answer is 5. 7") == 5


TOKENS = [
    *"0123456789.,-+/$%{}()*#\\=eE \n", "\u2212", "1,234", "1/2", "1e9", "####", "\\boxed{", "\\frac{1}{2}", "\\frac{",
    "\\,", "{,}", "answer", " is ", ":", "Question:", "</s>", "a", " eggs ",
]  # fmt: skip
texts = st.text() | st.lists(st.sampled_from(TOKENS), max_size=40).map("".join)


@settings(deadline=None, max_examples=500, derandomize=True)
@given(texts, texts, st.sampled_from(ENDS))
def test_any_text(text, rest, end):
    own = answer_text(text)
    assert text.startswith(own)
    assert not any(marker in own for marker in ENDS)
    value = extract(text)
    assert extract(text + end + rest) == extract(own) == value
    assert correct(text, Fraction(7)) == (value == 7)
    for number in (value, gold(text)):
        if number is not None:
            assert isinstance(number, Fraction)
            assert any(character.isnumeric() for character in text)
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
def test_a_number_round_trips(digits, places, style, unit, minus, template):
    value = Decimal(digits).scaleb(-places)
    number = style.replace("}", "f}" if ":" in style else ":f}").format(abs(value))
    text = template.format(unit.format(number, sign=minus if digits < 0 else ""))
    assert extract(text) == Fraction(value)
    assert correct(text, Fraction(value))
    assert not correct(text, Fraction(value) + 1)
