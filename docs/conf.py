"""The site: `make docs` builds it into build/site, strictly and without a network.

Its source folder is the repository's root, so that every page is used where it lies (the README,
the recipes', CONTRIBUTING) and a relative link between two of them means the same on the site and
in a checkout. `include_patterns` says which files are pages; links to any other file become
downloads.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from es_cookbook import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `docs.pages`, where sphinx runs by itself

project = "es_cookbook"
copyright = "the es_cookbook authors"
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "benchmarks/README.md",
    "docs/*.md",
    "docs/builders/*.md",
    "es_cookbook/recipes/*/README.md",
    "es_cookbook/plugins/*/README.md",
]
# Folders that hold no pages are not looked through: an environment has a hundred thousand files.
# AGENTS.md only says where to read.
exclude_patterns = [".*", "AGENTS.md", "build", "dist", "runs", "tests", "wandb"]

myst_heading_anchors = 4  # links to headings, spelled as on GitHub
myst_links_external_new_tab = False
highlight_language = "none"  # a block without a language is a command line or what one printed
pygments_style = "friendly"
pygments_dark_style = "github-dark"

html_theme = "furo"
html_title = "es_cookbook"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_the_start.html"}  # the root page is docs/index.html
templates_path = ["_templates"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5cad",
        "color-brand-content": "#0b5cad",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7db7f5",
        "color-brand-content": "#7db7f5",
    },
}


def setup(app: "Sphinx") -> None:
    """Fill in what pages show of the code, and write llms.txt."""
    from docs.pages import filled, llms

    def fill(app: "Sphinx", name: str, source: list[str]) -> None:
        source[0] = filled(source[0])

    def write(app: "Sphinx", error: Exception | None) -> None:
        if error is None:
            (Path(app.outdir) / "llms.txt").write_text(llms(), encoding="utf-8")

    app.connect("source-read", fill)
    app.connect("build-finished", write)
