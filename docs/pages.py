"""Fills in what pages show of the code when the site is built: options, classes, commands.

In every page of `docs` a comment such as

    <!-- options es_cookbook.runs.config:Config -->

is replaced, with the note below it for readers of a checkout. Its first word says by what:
`options`, a table of a class's fields; `about`, its docstring before that table; `parts FIELD
NAMES`, a section for each name that a user may choose for a field, with the docstring of its module
too after `modules`; `classes`, the docstrings and signatures of classes or functions; `commands`, a
section for each command; `recipes`, a table of what each shows, the second paragraph of its
package's docstring; `settings`, a table of the recipes' settings; `result NAME`, a table that a
benchmark has written; `baselines`, a row for each recorded run (`docs/baselines.py`).

The site has `llms.txt` (https://llmstxt.org), too: the list of its pages.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from unittest import mock

import es_cookbook
from es_cookbook.__main__ import COMMANDS, RECIPES
from es_cookbook.cli.options import recipe_config
from es_cookbook.common.options import Option, options_of
from es_cookbook.common.trust import resolve

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = re.compile(
    r"<!-- (options|about|parts|classes|commands|recipes|settings|result|baselines)\b([^>]*)-->\n"
    r"\*`make docs` fills this in.*"
)
_PACKAGE = str(ROOT / "es_cookbook")


def filled(page: str) -> str:
    """Return the text of a page with all that is made from the code."""
    return GENERATED.sub(lambda found: _MAKERS[found[1]](*found[2].split()), page)


def table_of(config_class: type) -> str:
    """Return the fields of a chz class as a Markdown table."""
    own = [option for option in options_of(config_class).values() if "." not in option.path]
    if not own:
        return "It has no options."
    letters = "|_*<"  # what ends a cell, too
    rows = [
        f"| `{each.path}` | {_accepted(each)} | {_default(each)} | {_escaped(each.doc, letters)} |"
        for each in own
    ]
    return "\n".join(["| option | type | default | |", "|---|---|---|---|", *rows])


def options(target: str) -> str:
    """Return a class's table."""
    return table_of(class_of(target))


def about(target: str) -> str:
    """Return a class's docstring, what it is called in Python, and its table."""
    found = class_of(target)
    return "\n\n".join([markdown(inspect.getdoc(found)), _imported(target), table_of(found)])


def parts(field: str, names: str, modules: str = "") -> str:
    """Return a section for each class that a user may choose for a field."""
    targets: Mapping[str, str] = pkgutil.resolve_name(names)
    told: set[str] = set()
    sections: list[str] = []
    for name, target in targets.items():
        module = class_of(target).__module__
        idea = markdown(sys.modules[module].__doc__) if modules and module not in told else ""
        told.add(module)
        sections += [f"## `{field}={name}`", *([idea] if idea else []), about(target)]
    return "\n\n".join(sections)


def classes(*targets: str) -> str:
    """Return a section for each class or function: docstring, and signatures with theirs."""
    return "\n\n".join(piece for target in targets for piece in _pieces(target))


def commands() -> str:
    """Return a section for each command: what its module says, and its own options."""
    sections: list[str] = []
    for name, target in COMMANDS.items():
        module = target.partition(":")[0]
        told = markdown(importlib.import_module(module).__doc__)
        sections += [f"## {name}", told, table_of(config_of(name, module))]
    return "\n\n".join(sections)


def recipes() -> str:
    """Return a row for each recipe: its page, and what it shows."""
    rows = ["| recipe | what it shows |", "|---|---|"]
    for target in RECIPES.values():
        folder = target.rpartition(".")[0].replace(".", "/")
        page = (ROOT / folder / "README.md").read_text(encoding="utf-8")
        shows = inspect.getdoc(importlib.import_module(folder.replace("/", ".")))
        assert shows is not None
        title, what = page.partition("\n")[0].removeprefix("# "), shows.partition("\n\n")[2]
        rows.append(f"| [{title}](../{folder}/README.md) | {' '.join(what.split())} |")
    return "\n".join(rows)


def settings() -> str:
    """Return a row for each recipe: settings of `es`, size and number of its generations."""
    rows = [
        "| recipe | σ | α | genomes | pairs | problems per generation | generations |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in RECIPES:
        config = recipe_config(name)()
        optimizer, pairs = config.optimizer, "yes" if config.optimizer.antithetic else "no"
        cells = (
            *(f"`{name}`", optimizer.sigma, optimizer.learning_rate, optimizer.population_size),
            *(pairs, config.dataset.problems_per_generation, config.num_generations),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def result(name: str) -> str:
    """Return the text that a benchmark has written."""
    return (ROOT / f"benchmarks/results/{name}.md").read_text(encoding="utf-8")


def baselines() -> str:
    """Return a row for each recorded run."""
    from docs.baselines import table  # with torch

    return table()


def llms() -> str:
    """Return llms.txt: the site's pages by the captions of its contents, and how each begins."""
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    parts = ["# es_cookbook", f"> {_first_paragraph('docs/index.md')}"]
    for caption, entries in re.findall(
        r":caption: (.*)\n(?::.*\n)*\n((?:.+\n)+?)```", index, flags=re.MULTILINE
    ):
        pages = [
            page.resolve().relative_to(ROOT).as_posix()
            for entry in re.findall(r"^(?:.*<)?([^<>\n]+)>?$", entries, flags=re.MULTILINE)
            for page in sorted((ROOT / "docs").glob(f"{entry}.md"))
        ]
        parts.append(f"## {caption}\n\n" + "\n".join(map(_listed, pages)))
    return "\n\n".join(parts) + "\n"


def _listed(page: str) -> str:
    """Return a line of llms.txt: a page's title and first sentence, without links and comments."""
    title = (ROOT / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    begin = re.sub(r"\[([^\]]*)\]\([^)]*\)|<!--.*?--> *", r"\1", _first_paragraph(page))
    return f"- [{title}]({page.removesuffix('.md')}.html): {re.split(r'(?<=[.])(?: |$)', begin)[0]}"


def _first_paragraph(page: str) -> str:
    """Return the paragraph below the title, on one line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(text.split("\n\n")[1].split())


_MAKERS: Mapping[str, Callable[..., str]] = {
    "options": options,
    "about": about,
    "parts": parts,
    "classes": classes,
    "commands": commands,
    "recipes": recipes,
    "settings": settings,
    "result": result,
    "baselines": baselines,
}


def class_of(target: str) -> type:
    """Return the class that "module:Class" names."""
    found = resolve(target)
    assert isinstance(found, type), target
    return found


def markdown(docstring: str | None) -> str:
    r"""Return a docstring as Markdown, with plain text marked up.

    >>> class Parrot:
    ...     '''Says it again, _twice_.
    ...
    ...         hello
    ...
    ...     Args:
    ...         word: what.
    ...     '''
    >>> print(markdown(Parrot.__doc__))
    Says it again, \_twice\_.
    <BLANKLINE>
    ```text
    hello
    ```
    <BLANKLINE>
    Args:
    <BLANKLINE>
    - `word`: what.
    """
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r"^(Args|Attributes|Raises|Returns):\n", r"\1:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    # Examples, and blocks that are indented behind an empty line and belong to no list.
    text = re.sub(r"^>>> .*(?:\n.+)*", r"```text\n\g<0>\n```", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n?|\n(?= {4}))+", _fenced, text)
    return _escaped(text, "_*<")


def _escaped(text: str, letters: str) -> str:
    """Return text with backslashes before characters that mean nothing outside of code."""
    pieces = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)
    return "".join(
        piece if i % 2 else re.sub(rf"([{letters}])", r"\\\1", piece)
        for i, piece in enumerate(pieces)
    )


def _fenced(block: re.Match[str]) -> str:
    code = textwrap.dedent(block[0]).strip("\n")
    return f"```text\n{code}\n```\n" + ("\n" if block[0].endswith("\n\n") else "")


def _imported(target: str) -> str:
    module, _, name = target.partition(":")
    module = "es_cookbook" if name in es_cookbook.__all__ else module
    return f"In Python: `from {module} import {name}`"


def _accepted(option: Option) -> str:
    if option.accepts == "True|False":
        return "`bool`"
    choices = re.fullmatch(r"[\w.-]+(\|[\w.-]+)+", option.accepts)
    each = option.accepts.split("|") if choices else [option.accepts.replace("|", r"\|")]
    return ", ".join(f"`{one}`" for one in each)


def _default(option: Option) -> str:
    if option.value is None:
        return "required"
    value = option.value.replace(_PACKAGE, "es_cookbook").replace("|", r"\|")
    shown = repr(value) if value != value.strip() else value
    return f"`{shown}`" if shown else "empty"


def _pieces(target: str) -> Iterator[str]:
    """Yield a class's or a function's heading, what it is, and a paragraph per public method."""
    found = resolve(target)
    yield f"## {target.partition(':')[2]}"
    if isinstance(found, FunctionType):
        yield from _method(_parsed(found))
        yield _imported(target)
        return
    assert isinstance(found, type), target
    yield markdown(inspect.getdoc(found))
    yield _imported(target)
    node = _parsed(found)
    assert isinstance(node, ast.ClassDef)
    if fields := "\n".join(map(ast.unparse, _fields(node))):
        yield f"```text\n{fields}\n```"
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(each.name):
            yield from _method(each)


def _parsed(found: type | FunctionType) -> ast.stmt:
    return ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]


def _is_public(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    """Yield attributes that the class declares; of a field, `chz.field(...)` is left out."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            each.value = None if isinstance(each.value, ast.Call) else each.value
            yield each


def _method(node: ast.stmt) -> Iterator[str]:
    """Yield a signature and its docstring; nothing where the docstring is inherited."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if told := ast.get_docstring(node):
        marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        begin = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        node.args.args = [each for each in node.args.args if each.arg != "self"]
        arguments = "" if "property" in marks else f"({ast.unparse(node.args)})"
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        note = " (to be implemented)" if "abstractmethod" in marks else ""
        yield f"**`{begin}{node.name}{arguments}{returns}`**{note}"
        yield markdown(told)


def config_of(name: str, module: str) -> type:
    """Return the config class that a command shows the help of."""
    shown: list[object] = []

    def show(config: object, *_: object, **__: object) -> str:
        shown.append(config)
        return ""

    with (
        mock.patch("es_cookbook.common.cli.help_page", show),
        mock.patch.object(sys, "argv", [f"es-cookbook {name}", "--help"]),
        mock.patch("builtins.print"),
    ):
        importlib.import_module(module).cli()
    (config,) = shown
    return config if isinstance(config, type) else type(config)
