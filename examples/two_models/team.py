"""One reward for both models: whether their shares add up to the bill."""

COINS = ["one", "two", "three", "four", "five", "six", "seven"]


def paid(chains, total, **columns):
    """1 where the coins of both responses are the row's total, else 0."""
    return [
        float(sum(map(coins, chain)) == bill) for chain, bill in zip(chains, total, strict=True)
    ]


def coins(text):
    """The number that a response names; one that names none pays too much."""
    word = text.strip(" .")
    return COINS.index(word) + 1 if word in COINS else 100
