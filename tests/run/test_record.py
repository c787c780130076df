"""How settings are written for people, and read again."""

import yaml

from cory.run.record import yaml_text


def test_texts_of_several_lines_stand_as_blocks_and_are_read_as_they_were():
    settings = {
        "prompt": "Note: {prompt}\nÄ question:\n\n  {question}\nAnswer:",
        "stop": ["\n", "\n\n", " \n"],
        "trailing": "a \nb\t\n",
        "odd": "a\x07\nb\r\nc",
        "plain": "no",
    }
    text = yaml_text(settings)
    assert yaml.safe_load(text) == settings and list(yaml.safe_load(text)) == list(settings)
    lines = text.splitlines()
    assert lines[:6] == [
        "prompt: |-",
        "  Note: {prompt}",
        "  Ä question:",
        "",
        "    {question}",
        "  Answer:",
    ]
