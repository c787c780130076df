"""The rule of the sums: the last number of a response, as on GSM8K."""

from fractions import Fraction

from gsm8k_train.answers import correct


def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """1.0 where a completion answers with the right number, else 0.0.

    >>> reward(["", ""], [" 15 - 43 = -28.", " 28"], ["-28", "-28"])
    [1.0, 0.0]
    """
    return [
        float(correct(text, Fraction(number)))
        for text, number in zip(completions, answer, strict=True)
    ]
