"""Report pages: no text acts as HTML or script, and nothing is loaded from the network."""

import base64
import hashlib
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest
from conftest import PLOT_CURVES as plot_curves
from written import write_evaluation, write_run

from cory.evaluation.report import evaluation_page
from cory.run.folder import read_rows
from cory.run.plots import svg
from cory.run.report import NAME, Table, render, run_page, write_report
from cory.run.tables import printable

HACK = "window.hacked = 1"
HOSTILE = [
    f"<script>{HACK}</script>", f"</script><script>{HACK}</script>", f"<SCRIPT SRC=//x.example>{HACK}</SCRIPT>",
    f"<img src=x onerror='{HACK}'>", f'"><img src=x onerror="{HACK}">', f"' onmouseover='{HACK}",
    f"<svg/onload={HACK}>", f"<iframe srcdoc='<script>{HACK}</script>'>", f"javascript:{HACK}",
    f"<a href='javascript:{HACK}'>x</a>", "<style>* { display: none !important }</style>", "</style><plaintext>",
    "<base href='http://x.example'>", "<meta http-equiv=refresh content='0;url=http://x.example'>",
    "<form action=http://x.example><input name=data>", "<!--", "-->", "<![CDATA[", "]]>", "<!-- <script>",
    "</body></html>", "</template>", "<textarea>", "<div hidden>", "{{ 7 * 7 }}", "{% raw %}", "{{ page }}",
    "${" + HACK + "}", "`", "\\", '\\"', "'", "&lt;script&gt;", "&#60;b&#62;", "\\u003cscript\\u003e",
    "__proto__", "constructor", "\x00 nul", "a\x00b", "\ud800 alone", "\udfff", "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "\x9b31m", "\x08\x08\x08", "\x7f", "\u202e reversed", "\u2066 isolated", "\u200f mark",
    "\ufeff", "line\u2028separator", "para\u2029graph", "\r\n\r\n", "\n" * 200, "\t" * 50, "a" * 100_000,
    "word " * 20_000, "\u0301" * 500, "\ufdfd" * 50, "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f467" * 20, "", " ", "\u200b" * 10,
]  # fmt: skip


class Parsed(HTMLParser):
    """A page's elements with their attributes, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.texts: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.add(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_run(tmp_path):
    """Writes a run of 200 chains with hostile texts, name, settings, metrics and flags."""
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(200)]
    name = f"<img src=x onerror='{HACK}'>"
    run = write_run(
        tmp_path / name, agents=2, texts=texts, flags={2: [f"<b>{HACK}</b>"], 3: ["__proto__"]}
    )
    rows = read_rows(run / "metrics.jsonl")
    rows = [row | {f"<script>{HACK}</script>": 1.0, "__proto__": 2.0} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("name: tiny\n", f'name: "</script><script>{HACK}</script>"\n', 1)
    )
    return run


@pytest.mark.usefixtures("drawn_figures")
def test_hostile_texts_are_shown_and_do_not_act(tmp_path):
    run = hostile_run(tmp_path)
    page = run_page(run, run.name)
    page.title = f"</title><script>{HACK}</script>"
    rows = read_rows(run / "metrics.jsonl")
    rows = [row | {"agent": f"</svg><script>{HACK}</script>"} for row in rows]
    page.figure = svg(partial(plot_curves, rows))
    for text in HOSTILE:
        step = {"role": text, "agent": text, "prompt": [{"role": text, "content": text}]}
        page.add_chain(
            text,
            [
                step
                | {"query": text, "columns": {text: text}, "completion": text}
                | {"task_reward": 0, "kl": 0}
            ],
        )
        page.facts.append(text)
        page.notes.append(text)
        page.tables.append(Table(text, [{text: text}], text))
    html = render(page)
    parsed = Parsed(html)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)
    html.encode()  # no lone surrogate
    assert len(parsed.named("script")) == 1 and parsed.named("title") == [{}]
    assert not any(key.startswith("on") for _, attributes in parsed.elements for key in attributes)
    elements = "html head meta title style body header h1 h2 h3 h4 p span main section ul li figure div label input"
    table = "table thead tbody tr th td article details summary script"
    drawing = "svg g path defs use text tspan clippath rect"
    allowed = {*elements.split(), *table.split(), *drawing.split()}
    assert {name for name, _ in parsed.elements} <= allowed
    # Each text is shown unchanged, except that control characters are escaped.
    shown = {printable(text) for text in HOSTILE if text}
    assert shown <= parsed.texts


def test_pages_link_to_nothing_and_run_one_script(tmp_path):
    """The content security policy of run and evaluation pages allows only the script whose hash it contains."""
    run = write_run(tmp_path / "a", texts=["one"])
    evaluation = write_evaluation(tmp_path / "e")
    write_report(run, partial(run_page, method="CORY"))
    write_report(evaluation, evaluation_page)
    for path in (run / NAME, evaluation / NAME):
        html = path.read_text()
        parsed = Parsed(html)
        (policy,) = (meta["content"] for meta in parsed.named("meta") if "http-equiv" in meta)
        assert policy.startswith("default-src 'none'; ") and "http" not in policy
        (script,) = re.findall("<script>(.*?)</script>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy
        links = {"src", "href", "xlink:href", "action", "data", "srcset"}
        linked = [
            value
            for _, attributes in parsed.elements
            for key, value in attributes.items()
            if key in links
        ]
        assert all(link.startswith("#") for link in linked)
        assert not re.search(r"@import|url\((?!#)", html)
