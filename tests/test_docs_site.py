"""The site builds without a warning or a network, and its pages say what the code does."""

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.pages import PAGES, llms
from tests.test_house import ROOT, TREES

FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Element -> the attribute that a browser fetches by itself."""


class Fetched(HTMLParser):
    """Addresses that a page makes a browser ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(FETCHED.get(tag, ""))
        if address:
            self.addresses.append(address)


def fetched_by(page: str) -> list[str]:
    """Return what a page loads, from the network or not."""
    parser = Fetched()
    parser.feed(page)
    return parser.addresses


def is_remote(address: str) -> bool:
    return re.match(r"(?i)(\w+:)?//", address) is not None


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_asks_nobody(tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ("-W", "--keep-going", "-n", "-q", "-c", "docs", "-d", str(tmp_path / "doctrees"))
    command = [sys.executable, "-m", "sphinx", *options, ".", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for name in ("index.html", "docs/idea.html", "es_cookbook/recipes/countdown/README.html"):
        assert site / name in pages
    assert any("loop" in address for address in fetched_by(pages[site / "docs/idea.html"]))
    remote = {
        str(path.relative_to(site)): address
        for path, page in pages.items()
        for address in fetched_by(page)
        if is_remote(address)
    }
    assert remote == {}
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not any(is_remote(url) for css in styles for url in re.findall(r"url\(\W?(.*?)\)", css))
    assert "<td><p>0.005</p></td>" in pages[site / "docs/hyper_parameters.html"], "of rush_hour"
    assert "64.0 (63.0 … 66.0) %" in pages[site / "docs/baselines.html"], "sums of the recipe chat"
    assert "XLNetLMHeadModel" in pages[site / "docs/models.html"]
    optimizers = pages[site / "docs/builders/optimizers.html"]
    assert "genomes in mirrored pairs" in optimizers
    assert "(docs/install.html)" in (site / "llms.txt").read_text(encoding="utf-8")
    assert any("copybutton.js" in address for address in fetched_by(optimizers))


def test_the_list_of_pages_has_every_page_of_the_site_and_no_other() -> None:
    listed = re.findall(r"^- \[.*?\]\((.*?)\.html\): \S", llms(), flags=re.MULTILINE)
    recipes = (ROOT / "es_cookbook").glob("*/*/README.md")
    roots = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
    pages = [*PAGES, *recipes, *roots, ROOT / "benchmarks/README.md"]
    expected = {page.relative_to(ROOT).with_suffix("").as_posix() for page in pages}
    assert sorted(listed) == sorted(expected - {"docs/index"})


def strings_of_the_package() -> str:
    """Return all literal text in the code, split at formatted values."""
    nodes = (node for tree in TREES.values() for node in ast.walk(tree))
    return "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_sentences_of_troubleshooting_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^> (.*)$", page, flags=re.MULTILINE)
    assert len(quoted) > 20
    said = strings_of_the_package()
    pieces = [(quote, piece) for quote in quoted for piece in quote.split("…") if piece.strip()]
    assert [pair for pair in pieces if pair[1].strip() not in said] == []
