"""A joint reward for both models: whether their shares add up to the bill."""

COINS = ["one", "two", "three", "four", "five", "six", "seven"]


def paid(chains, total, **columns):
    """Returns 1 if the coins of both responses add up to the row's total, otherwise 0."""
    return [
        float(sum(map(coins, chain)) == bill) for chain, bill in zip(chains, total, strict=True)
    ]


def coins(text):
    """Returns the number that a response names, or a number too large for any bill."""
    word = text.strip(" .")
    return COINS.index(word) + 1 if word in COINS else 100
