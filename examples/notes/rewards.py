"""The rule of the notes' world: an answer is right if it is the fact that was asked for, and nothing else."""


def reward(
    prompts: list[str], completions: list[str], role: list[str], answer: list[str]
) -> list[float]:
    """1.0 where the answerer's completion is the right answer and nothing else; a note earns nothing.

    >>> reward([""] * 3, [" Mill Lane.", " 3 rooms", " 3"], ["note_taker", "answerer", "answerer"], ["3"] * 3)
    [0.0, 0.0, 1.0]
    """
    rows = zip(completions, role, answer, strict=True)
    return [float(who == "answerer" and text.strip(" .") == right) for text, who, right in rows]
