"""The page: no text acts as HTML or script, and its size has a limit. tests/report/test_browser.py opens it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from written import write_run

from cory.report import page, payload
from cory.report.completions import Texts
from cory.report.plots import COLOURS
from study.page import make_payload
from study.records import read

HACK = "window.hacked = 1"
HOSTILE = [
    f"<script>{HACK}</script>", f"</script><script>{HACK}</script>", f"<SCRIPT SRC=//x.example>{HACK}</SCRIPT>",
    f"<img src=x onerror='{HACK}'>", f'"><img src=x onerror="{HACK}">', f"' onmouseover='{HACK}",
    f"<svg/onload={HACK}>", f"<iframe srcdoc='<script>{HACK}</script>'>", f"javascript:{HACK}",
    f"<a href='javascript:{HACK}'>x</a>", "<style>* { display: none !important }</style>", "</style><plaintext>",
    "<base href='http://x.example'>", "<meta http-equiv=refresh content='0;url=http://x.example'>",
    "<form action=http://x.example><input name=data>", "<!--", "-->", "<![CDATA[", "]]>", "<!-- <script>",
    "</body></html>", "</template>", "<textarea>", "<div hidden>", "{{ 7 * 7 }}", "{% raw %}", "{{ payload }}",
    "${" + HACK + "}", "`", "\\", '\\"', "'", "&lt;script&gt;", "&#60;b&#62;", "\\u003cscript\\u003e",
    "__proto__", "constructor", "\x00 nul", "a\x00b", "\ud800 alone", "\udfff", "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "\x9b31m", "\x08\x08\x08", "\x7f", "\u202e reversed", "\u2066 isolated", "\u200f mark",
    "\ufeff", "line\u2028separator", "para\u2029graph", "\r\n\r\n", "\n" * 200, "\t" * 50, "a" * 100_000,
    "word " * 20_000, "\u0301" * 500, "\ufdfd" * 50, "\u05e9\u05dc\u05d5\u05dd", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f467" * 20, "", " ", "\u200b" * 10,
]  # fmt: skip


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem:
            self.inside.append((self.cdata_elem, data))

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def hostile_runs(tmp_path):
    """Runs whose texts, names, settings, seeds, metrics and flags are all hostile: 200 chains."""
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(200)]
    name = f"<img src=x onerror='{HACK}'>"
    one = write_run(tmp_path / name, texts=texts, flags={2: [f"<b>{HACK}</b>"], 3: ["__proto__"]})
    rows = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {f"<script>{HACK}</script>": 1.0, "__proto__": 2.0} for row in rows]
    (one / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (one / "config.yaml").read_text()
    (one / "config.yaml").write_text(
        config.replace("name: tiny\n", f'name: "</script><script>{HACK}</script>"\n', 1)
    )
    two = write_run(tmp_path / "\u202e\x1b[31m</title>", seed=1, agents=1, texts=texts[:40])
    return [one, two]


def test_nothing_acts(tmp_path):
    shown = make_payload(
        [read(folder) for folder in hostile_runs(tmp_path)], [], f"</title><script>{HACK}</script>"
    )
    text = page.render(shown)
    parsed = Parsed(text)
    assert text.isprintable() or not re.search(
        "[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text
    )
    assert [attributes.get("type") for attributes in parsed.named("script")] == [
        "application/json",
        None,
        None,
    ]
    assert len(parsed.named("style")) == 1 and parsed.named("title") == [{}]
    elements = (
        "html head meta title style body a header div h1 h2 h3 p span nav button main noscript"
    )
    parts = "section ul li table thead tbody tr th td script details summary"
    allowed = {*elements.split(), *parts.split()}
    assert {name for name, _ in parsed.elements} <= allowed
    assert not any(key.startswith("on") for _, attributes in parsed.elements for key in attributes)
    data = json.loads(next(inside for tag, inside in parsed.inside if tag == "script"))
    texts = {step["text"] for chain in data["chains"] for step in chain["steps"]}
    assert {
        text for text in HOSTILE if len(text) < 4000
    } <= texts  # as they are, for the script to show
    text.encode()  # no lone surrogate


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else(tmp_path):
    parsed = Parsed(page.render(payload.of_run(write_run(tmp_path / "a", texts=["one"]), "CORY")))
    policy = next(
        m["content"]
        for m in parsed.named("meta")
        if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert (
        policy.startswith("default-src 'none'; ")
        and "unsafe" not in policy
        and "http" not in policy
    )
    hashed = [
        base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        for _, inside in [parsed.inside[0], *parsed.inside[2:]]
    ]
    assert hashed == re.findall("sha256-([^']+)'", policy) and len(hashed) == 3
    linked = [
        value
        for _, attributes in parsed.elements
        for key, value in attributes.items()
        if key in ("src", "href")
    ]
    assert linked and all(link.startswith("#") for link in linked)


def test_the_size_has_a_limit(tmp_path, monkeypatch):
    texts = ["\u4e00" * 4000] * 400  # 24 kB each in the page's JSON, and twice in a chain
    shown = payload.of_run(write_run(tmp_path / "a", texts=texts), "CORY")
    text = page.render(shown)
    assert 1_000_000 < len(text.encode()) <= page.LIMIT
    data = json.loads(next(inside for tag, inside in Parsed(text).inside if tag == "script"))
    kept = sorted(chain["query"] for chain in data["chains"])
    assert data["left_out"] == len(shown["chains"]) - len(kept) > 100
    assert kept[0] == 0 and kept[-1] > 300  # from all of the run
    monkeypatch.setattr(page, "LIMIT", 1000)
    with pytest.raises(ValueError, match="expected a report of at most 1000 bytes, got"):
        page.render(shown)


def test_long_texts_are_cut_and_say_so(tmp_path):
    shown = payload.of_run(write_run(tmp_path / "a", texts=["a" * 100_000]), "CORY")
    step = shown["chains"][-1]["steps"][0]
    assert step["text"].startswith("aaa") and step["text"].endswith("… (96,000 more characters)")
    assert len(step["text"]) < 4100 and len(step["tokens"][1]) < 300


def test_many_tokens_are_cut_and_say_so():
    record = {"iteration": 0, "query": "a", "completion": "a", "task_reward": 1.0}
    texts = Texts()
    texts.add_run(
        "CORY", 0, [record | {"token_texts": ["x"] * 1000, "log_ratios": [0.5] * 1000}], {}
    )
    (step,) = texts.chains[0]["steps"]
    assert step["tokens"] == ["x"] * 600 + ["… (400 more tokens)"] and step["ratios"] == [
        0.5
    ] * 600 + [None]


def test_reports_have_the_colours_of_the_figures():
    """In the light theme; curves.js takes them in the same order."""
    style, script = ((page.HERE / name).read_text() for name in ("page.css", "curves.js"))
    found = re.findall(r"--c(\d): light-dark\((#\w+),", style)
    assert found == [(str(number), colour) for number, colour in enumerate(COLOURS)]
    assert f"const COLOURS = {len(COLOURS)};" in script


def test_the_chart_library_is_the_published_one():
    """uPlot 1.6.32, dist/uPlot.iife.min.js and dist/uPlot.min.css of the package, unchanged."""
    digests = {
        name: hashlib.sha256((page.HERE / name).read_bytes()).hexdigest()[:16]
        for name in ("uplot.js", "uplot.css")
    }
    assert digests == {"uplot.js": "19c8d4c6ad88929a", "uplot.css": "df630c6a8d6f8eea"}
    assert "Permission is hereby granted" in (page.HERE / "uplot.LICENSE").read_text()
