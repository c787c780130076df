"""Builds the documentation site from the repository's Markdown pages with Zensical (zensical.toml).

    python docs/site.py            # writes build/site; `make docs` installs the requirements first
    python docs/site.py --serve    # also serves the site at http://localhost:8000

README.md is the home page. Every other page keeps its path, so links and pictures work on the site as they do in a
checkout. Links to other files (code, configurations) become plain text. The script exits with status 1 if a link's
page, anchor or picture does not exist, or if the build warns.

For language models, the site also serves each page's Markdown at the page's path, and llms.txt, which lists the pages
of the navigation (https://llmstxt.org).
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "build/pages", ROOT / "build/site"
SOURCES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "docs/*.md", "docs/site.css",
           "docs/figures/*.svg", "docs/figures/*.png", "examples/*/README.md", "examples/*/*.png",
           "results/**/*.md", "results/**/*.png"]  # fmt: skip
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def copy_pages() -> None:
    """Copies all pages and pictures to build/pages, with links to other files as plain text."""
    shutil.rmtree(PAGES, ignore_errors=True)
    files = {path.relative_to(ROOT) for pattern in SOURCES for path in ROOT.glob(pattern)}

    def kept(page: Path, match: re.Match[str]) -> str:
        target = urlsplit(match[3])
        if target.scheme or not target.path:
            return match[0]
        path = (ROOT / page.parent / unquote(target.path)).resolve()
        if not path.exists():
            sys.exit(f"{page}: no such file: {match[3]}")
        if path.is_dir() and (path / "README.md").exists():
            path /= "README.md"
            return match[0].replace(target.path, target.path.rstrip("/") + "/README.md")
        return match[0] if path.relative_to(ROOT) in files else match[2]

    for file in files:
        (PAGES / file).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            parts = re.split(
                r"(^```.*?^```)", (ROOT / file).read_text(), flags=re.MULTILINE | re.DOTALL
            )
            parts[::2] = [
                LINK.sub(lambda match, page=file: kept(page, match), part) for part in parts[::2]
            ]
            # The no-break space keeps ± and its number on one line in narrow table cells.
            (PAGES / file).write_text("".join(parts).replace(" ± ", " ±\N{NO-BREAK SPACE}"))
        else:
            shutil.copy(ROOT / file, PAGES / file)


def first_sentence(page: Path) -> str:
    """Returns the first sentence of a page's first text paragraph, without links; empty if the page has no text."""
    for paragraph in page.read_text().split("\n\n"):
        text = " ".join(paragraph.split())
        if re.match(r"\w|`(?!``)", text):
            text = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
            return re.split(r"(?<=[.:?!]) (?=[A-Z`\"])", text)[0]
    return ""


Nav = list[dict[str, str | list[dict[str, str]]]]  # as in zensical.toml


def sections(nav: Nav) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each section's title with the titles and paths of its pages. Pages without a section come first."""
    entries = [entry for item in nav for entry in item.items()]
    yield "Start", [(title, page) for title, page in entries if isinstance(page, str)]
    for section, pages in entries:
        if not isinstance(pages, str):
            yield section, [entry for item in pages for entry in item.items()]


def llms_txt() -> str:
    """Returns the text of llms.txt: a title, a summary, and a list of links to the pages' Markdown by section."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    for section, pages in sections(project["nav"]):
        lines += ["", f"## {section}", ""]
        for title, page in pages:
            about = first_sentence(ROOT / page)
            lines.append(f"- [{title}]({page}): {about}" if about else f"- [{title}]({page})")
    return "\n".join(lines) + "\n"


def add_markdown() -> None:
    """Copies the Markdown of all pages into the built site, and writes llms.txt."""
    for page in PAGES.rglob("*.md"):
        shutil.copy(page, SITE / page.relative_to(PAGES))
    (SITE / "llms.txt").write_text(llms_txt())


class Links(HTMLParser):
    """Collects a page's anchors, and the targets of its links, pictures, scripts and style sheets."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """Returns the site's links to targets that do not exist, as `page: target`."""
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    dead = []
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if url.scheme not in ("https", "mailto", "data"):
                    dead.append(f"{page.relative_to(site)}: {target}")
                continue
            path = (page.parent / unquote(url.path)).resolve() if url.path else page
            path = path / "index.html" if path.is_dir() else path
            if not path.exists() or (
                url.fragment and path in pages and url.fragment not in pages[path].anchors
            ):
                dead.append(f"{page.relative_to(site)}: {target}")
    for text in site.glob("llms.txt"):
        for _, _, target in LINK.findall(text.read_text()):
            if not (site / target).exists():
                dead.append(f"{text.name}: {target}")
    return dead


def main() -> None:
    copy_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if built.returncode or "Warning" in built.stdout + built.stderr:
        sys.exit(built.stdout + built.stderr)
    add_markdown()
    dead = dead_links(SITE)
    if dead:
        sys.exit("dead links:\n" + "\n".join(dead))
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(ROOT)}, no dead link")
    if "--serve" in sys.argv:
        subprocess.run([sys.executable, "-m", "http.server", "8000", "--directory", str(SITE)])


if __name__ == "__main__":
    main()
