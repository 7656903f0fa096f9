"""The site: `make docs` builds it into build/site, strictly and without a network.

Its source folder is the repository's root, so that every page is used where it lies (the README,
the recipes', CONTRIBUTING) and a relative link between two of them means the same on the site and
in a checkout. `include_patterns` says which files are pages; links to any other file become
downloads.
"""

from es_cookbook import __version__

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
# AGENTS.md repeats parts of other pages.
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
