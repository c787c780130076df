"""The notes' reward: an answer is right if it is exactly the fact that was asked for."""


def reward(
    prompts: list[str], completions: list[str], role: list[str], answer: list[str]
) -> list[float]:
    """Returns 1.0 if the answerer's completion is exactly the right answer, otherwise 0.0; a note earns nothing.

    >>> reward([""] * 3, [" Mill Lane.", " 3 rooms", " 3"], ["note_taker", "answerer", "answerer"], ["3"] * 3)
    [0.0, 0.0, 1.0]
    """
    rows = zip(completions, role, answer, strict=True)
    return [float(who == "answerer" and text.strip(" .") == right) for text, who, right in rows]
