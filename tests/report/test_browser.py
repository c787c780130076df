"""The page in a real browser: what it shows and does, hostile texts, accessibility, speed.

Needs Playwright (the extra `dev`) and a Chromium: the system's, or Playwright's own (`playwright install chromium`).
"""

import math
import os
import re
import shutil

import pytest
from test_page import HOSTILE, hostile_runs
from written import write_evaluation, write_run

from cory.report import page as report_page
from cory.report import payload
from cory.report.completions import Texts
from study.page import make_payload
from study.records import read

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser():
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=CHROMIUM, args=root)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium starts: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a payload; at the end of the test, nothing may have been said on the console or asked of the network."""
    said, contexts = [], []

    def open_page(shown, width=WIDTHS[0]):
        path = tmp_path / "report.html"
        report_page.write_page(path, shown)
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="light"
        )
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        opened.on("pageerror", lambda error: said.append(f"error: {error}"))
        opened.on(
            "dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss())
        )
        opened.on(
            "request",
            lambda request: said.append(request.url) if request.url != path.as_uri() else None,
        )
        opened.goto(path.as_uri())
        return opened

    open_page.said = said
    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def compared(tmp_path):
    """Two methods with two seeds each, flags, an evaluation, and 30 chains a run."""
    texts = [f"response number {k}" for k in range(30)]
    folders = [
        write_run(tmp_path / f"cory{seed}", seed, texts=texts, flags={3: ["kl"]})
        for seed in range(2)
    ]
    folders += [
        write_run(tmp_path / f"ppo{seed}", seed, agents=1, texts=texts[:2]) for seed in range(2)
    ]
    return make_payload(
        [read(folder) for folder in folders], [write_evaluation(tmp_path / "e")], "A title"
    )


def legend(opened, chart=0):
    return opened.locator("figure").nth(chart).locator(".legend .name").all_inner_texts()


def test_curves(show, compared):
    opened = show(compared)
    assert opened.locator("figure").count() == 3
    assert legend(opened) == ["CORY agent_1 (n = 2)", "CORY agent_2 (n = 2)", "PPO (n = 2)"]
    opened.get_by_role("slider").fill("3")
    # Seeds 0 and 1, iterations 0 to 3: means 0.15 and 1.15.
    assert opened.locator(".legend .value").first.inner_text() == "0.650 ± 0.707"
    assert opened.locator(".at .flagged").inner_text() == "kl: cory0 agent_1; kl: cory1 agent_1"
    opened.get_by_label("Running mean").uncheck()
    assert opened.locator(".legend .value").first.inner_text() == "0.800 ± 0.707"
    opened.get_by_role("group", name="Agents").get_by_label("agent_2").uncheck()
    assert legend(opened) == ["CORY agent_1 (n = 2)", "PPO (n = 2)"]
    opened.get_by_role("combobox", name="A line for each").select_option("role")
    assert legend(opened) == [
        "CORY pioneer (n = 2)",
        "CORY observer (n = 2)",
        "PPO pioneer (n = 2)",
    ]
    opened.get_by_role("group", name="Roles").get_by_label("observer").uncheck()
    opened.locator("#curves").get_by_role("group", name="Methods").get_by_label("PPO").uncheck()
    assert legend(opened) == ["CORY pioneer (n = 2)"]
    opened.get_by_role("combobox", name="A line for each").select_option("run")
    assert legend(opened) == ["cory0", "cory1"]
    opened.get_by_text("Metrics").click()
    opened.get_by_label("Distinct-2").check()
    opened.get_by_label("Response length").check()
    assert opened.locator("figure").count() == 5
    fits = "all => all.every(plot => Math.abs(plot.querySelector('.u-wrap').clientWidth - plot.clientWidth) <= 1)"
    assert opened.locator(".plot").evaluate_all(fits)
    log = opened.get_by_label("Logarithmic scale, KL to the reference (nats)")
    log.check()
    assert log.is_checked() and log.evaluate("box => box === document.activeElement")
    opened.locator("figure").first.get_by_text("Values").click()
    sync_api.expect(opened.locator("figure").first.locator("tbody tr")).to_have_count(10)
    assert "Task reward over 10 iterations: cory0 from" in opened.locator(
        ".plot"
    ).first.get_attribute("aria-label")
    opened.locator(".u-over").first.hover(position={"x": 3, "y": 50})
    assert opened.locator(".at .iteration").inner_text() == "0"


def test_scale_without_logarithm_where_values_are_negative(show, tmp_path):
    opened = show(payload.of_run(write_run(tmp_path / "a", combined_reward=-1.0), "CORY"))
    assert opened.get_by_label("Logarithmic scale, Combined reward").is_disabled()
    assert opened.get_by_label("Logarithmic scale, Task reward").is_enabled()


def titles(opened):
    return opened.locator(".chain h4").all_inner_texts()


def queries(opened):
    return opened.locator(".query > h3").all_inner_texts()


def test_completions(show, compared):
    opened = show(compared)
    status = opened.get_by_role("status")
    # Of each method's first seed: before and after, and its iterations; and eight of the evaluation, without a seed.
    assert status.inner_text() == "44 of 80 chains, 31 queries."
    assert not opened.locator(".key").is_visible()
    assert len(queries(opened)) == 20
    opened.get_by_role("button", name="Show more").click()
    assert (
        len(queries(opened)) == 31
        and not opened.get_by_role("button", name="Show more").is_visible()
    )
    assert opened.evaluate("document.activeElement.textContent") == queries(opened)[20]
    assert titles(opened)[:4] == [
        "CORY · seed 0 · before training", "PPO · seed 0 · before training", "CORY · seed 0 · after training",
        "PPO · seed 0 · after training",
    ]  # fmt: skip
    chain = opened.locator(".chain").first
    assert chain.locator(".who").all_inner_texts() == [
        "pioneer · agent_1\nreward +0.50\nKL 1.25", "observer · agent_2\nreward +0.50\nKL 1.25",
    ]  # fmt: skip
    assert not chain.get_by_text('Better than "the film": the film').is_visible()
    opened.get_by_label("Prompts").check()
    assert chain.get_by_text('Better than "the film": the film').is_visible()

    opened.get_by_role("searchbox").fill("Number 23")
    sync_api.expect(opened.locator(".query")).to_have_count(1)
    assert queries(opened) == ["query 23"] and status.inner_text() == "1 of 80 chains, 1 query."
    opened.get_by_role("searchbox").fill("")
    sync_api.expect(opened.locator(".query")).to_have_count(20)

    opened.get_by_role("combobox", name="Order").select_option("best")
    assert queries(opened)[:3] == ["query 29", "query 28", "query 27"]
    opened.get_by_role("combobox", name="Order").select_option("worst")
    assert queries(opened)[0] == "query 0"  # -0.5 in the evaluation
    assert titles(opened)[0] == "base"
    opened.get_by_role("combobox", name="Order").select_option("apart")
    assert queries(opened)[0] == "query 0"

    opened.get_by_role("combobox", name="Stage").select_option("fixed")
    assert queries(opened) == ["the film"] and len(titles(opened)) == 4
    opened.get_by_role("combobox", name="Seed").select_option("")
    assert len(titles(opened)) == 8
    opened.locator("#completions").get_by_text(re.compile("^Methods")).first.click()
    opened.locator("#completions").get_by_label("PPO", exact=True).uncheck()
    assert {title.split(" · ")[0] for title in titles(opened)} == {"CORY"}

    opened.get_by_label("Tokens against the base").check()
    tokens = opened.locator(".chain").first.locator(".token")
    assert [tokens.nth(i).get_attribute("title") for i in range(2)] == ["+2.00 nats", "−0.75 nats"]
    assert [tokens.nth(i).get_attribute("class") for i in range(2)] == [
        "token more3",
        "token less2",
    ]
    assert "log-ratio: “was” +2.00" in opened.locator(".largest").first.inner_text()


def test_rewards_that_are_not_finite_come_last(show, tmp_path):
    """In every order: those within a query, and queries that have no other."""
    texts = Texts()
    for query, rewards in (("one", [math.nan, -1.0, 1.0]), ("two", [math.nan]), ("three", [-2.0])):
        for reward in rewards:
            sample = {"query": query, "completion": f"{reward:g}", "task_reward": reward}
            texts.add_run("CORY", 0, [{"iteration": 0, **sample}], {})
    opened = show(payload.payload("A title", [], [], [], [], None, texts))
    for order, expected in (
        ("best", ["1", "-1", "nan", "-2", "nan"]),
        ("worst", ["-2", "-1", "1", "nan", "nan"]),
        ("apart", ["nan", "-1", "1", "-2", "nan"]),
        ("kl", ["nan", "-1", "1", "nan", "-2"]),  # without any
    ):
        opened.get_by_role("combobox", name="Order").select_option(order)
        assert opened.locator(".chain .text-of").all_inner_texts() == expected


def test_flags_of_averaged_iterations(show, tmp_path, monkeypatch):
    """A point is the mean over three iterations; flags of all three are shown there, if their agent is."""
    monkeypatch.setattr(payload, "NUMBERS", 150)
    opened = show(
        payload.of_run(write_run(tmp_path / "a", flags={7: ["kl"], 12: ["collapse"]}), "CORY")
    )
    opened.get_by_role("slider").fill("6")
    assert opened.locator(".at .flagged").inner_text() == "kl: a agent_1"
    opened.get_by_role("group", name="Agents").get_by_label("agent_1").uncheck()
    assert opened.locator(".at .flagged").inner_text() == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_texts(show, tmp_path, width):
    runs = [read(folder) for folder in hostile_runs(tmp_path)]
    opened = show(make_payload(runs, [], HOSTILE[0]), width)
    for name in ("Metrics", re.compile("^Methods")):
        for summary in opened.locator("summary").filter(has_text=name).all():
            summary.click()
    for box in opened.locator("details.choose input").all():
        box.check()
    opened.get_by_label("Prompts").check()
    opened.get_by_role("combobox", name="Seed").select_option("")
    while opened.get_by_role("button", name="Show more").is_visible():
        opened.get_by_role("button", name="Show more").click()

    def whole():
        assert opened.evaluate("window.hacked") is None
        assert opened.evaluate("document.scripts.length") == 3
        assert (
            opened.locator("img, iframe, base, form, object, embed, style + style, main a").count()
            == 0
        )
        assert opened.locator("svg").evaluate_all("all => all.every(svg => svg.closest('.legend'))")
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.locator(".query").count() == 201
        assert (
            opened.locator("#settings h2").is_visible()
            and opened.locator("header nav").is_visible()
        )
        cards = opened.locator(".chain").evaluate_all(
            "all => all.every(card => card.scrollWidth <= card.clientWidth && card.clientHeight < 1500)"
        )
        assert cards

    whole()
    shown = "\n".join(opened.locator(".chain .text-of").all_inner_texts())
    for text in (
        "<script>window.hacked = 1</script>",
        "{{ 7 * 7 }}",
        "\\x00 nul",
        "\\ud800 alone",
        "\\u202e reversed",
    ):
        assert text in shown
    assert not re.search("[\x00\x1b\u202e\u2066\ud800-\udfff]", opened.content())
    opened.get_by_label("Tokens against the base").check()
    while opened.get_by_role("button", name="Show more").is_visible():
        opened.get_by_role("button", name="Show more").click()
    whole()


def test_the_policy_stops_what_would_act(show, compared):
    """The second line of defence: what might have entered the page all the same does not run."""
    opened = show(compared)
    opened.evaluate(
        """() => {
            window.refused = 0;
            document.addEventListener("securitypolicyviolation", () => { window.refused += 1; });
            document.body.insertAdjacentHTML("beforeend", "<img src='http://x.example/a' onerror='window.hacked = 1'>");
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
        }"""
    )
    sync_api.expect(opened.locator("body > script")).to_have_count(4)
    assert opened.evaluate("window.refused") == 3  # the picture, its handler and the script
    assert opened.evaluate("window.hacked") is None
    assert all("Content Security Policy" in one or one == "http://x.example/a" for one in show.said)
    show.said.clear()


@pytest.mark.parametrize("width", WIDTHS)
def test_accessible(show, compared, width):
    """With all open that can be opened, in the light theme and in the dark one."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened = show(compared, width)

    def check():
        found = axe.run(opened).response["violations"]
        bad = [
            (one["id"], one["nodes"][0]["html"])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert bad == []

    opened.get_by_role("searchbox").fill("1")  # fewer texts: axe looks at each
    sync_api.expect(opened.get_by_role("status")).to_contain_text("13 queries")
    for summary in opened.locator("summary").all():
        summary.click()
    opened.get_by_label("Tokens against the base").check()
    check()
    opened.get_by_role("button", name="Dark theme").click()
    for summary in opened.locator("figure summary").all():  # the charts are drawn again
        summary.click()
    check()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_themes(show, compared):
    opened = show(compared)
    background = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(background)
    opened.get_by_role("button", name="Dark theme").click()
    assert opened.evaluate(background) != light
    opened.get_by_role("button", name="Light theme").click()
    assert opened.evaluate(background) == light


def test_keyboard(show, compared):
    """Every control is reached by Tab, in order, with a visible focus; the slider moves by arrow keys."""
    opened = show(compared)
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.append(
            opened.evaluate(
                "document.activeElement.labels?.[0]?.innerText ?? document.activeElement.innerText"
            )
        )
    assert [
        any(text in (one or "") for one in reached)
        for text in ("Curves", "A line for", "log", "Search", "Order")
    ]
    opened.get_by_role("slider").focus()
    opened.keyboard.press("ArrowLeft")
    assert opened.locator(".at .iteration").inner_text() == "18"
    assert opened.get_by_role("slider").get_attribute("aria-valuetext") == "iteration 18"


def test_of_many_chains_few_are_painted_at_once(show, tmp_path):
    """200 chains of long responses, 2,000 iterations: no more are made for the first paint, nor in another order."""
    folder = write_run(
        tmp_path / "a", iterations=2000, texts=["a response of some words " * 20] * 200
    )
    opened = show(payload.of_run(folder, "CORY"))
    sync_api.expect(opened.locator("figure")).not_to_have_count(0)
    shown = opened.locator(".chain").count()
    assert 0 < shown < 100
    opened.get_by_label("Order").select_option("worst")
    assert opened.locator(".chain").count() == shown
