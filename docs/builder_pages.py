"""Directives for the site: what configs are made of, from their docstrings and fields.

    ```{options} es_cookbook.train.config:Config
    ```

is a table of that class's fields with defaults and docs; `{about}` in its place has the class's
docstring before the table, and

    ```{parts} engine es_cookbook.engines.base:ENGINE_NAMES
    :modules:
    ```

a section for each name of the dictionary, with the docstring of its module too where that is asked
for. All of it is made of what `--help` is made of, so it cannot go out of date.
"""

import inspect
import pkgutil
import re
import sys
from collections.abc import Mapping
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from es_cookbook.common.cli import Option, options_of
from es_cookbook.common.references import resolve


def table_of(config_class: type) -> str:
    """The fields of a chz class as a Markdown table."""
    options = [option for option in options_of(config_class) if "." not in option.path]
    if not options:
        return "It has no options."
    rows = [f"| `{each.path}` | {_default(each)} | {_meaning(each)} |" for each in options]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows])


def about(target: str) -> str:
    """A class's docstring, what it is called in Python, and its table."""
    found = class_of(target)
    return "\n\n".join([docstring(found), f"In Python: `{target}`.", table_of(found)])


def sections_of(field: str, targets: Mapping[str, str], level: str, modules: bool) -> str:
    """A Markdown section for each class that a user may choose for a field."""
    told: set[str] = set()
    sections: list[str] = []
    for name, target in targets.items():
        module = class_of(target).__module__
        idea = docstring(sys.modules[module]) if modules and module not in told else ""
        told.add(module)
        sections.append(f"{level} `{field}={name}`\n\n{idea}\n\n{about(target)}")
    return "\n\n".join(sections)


def class_of(target: str) -> type:
    """The class that "module:Class" names."""
    found = resolve(target)
    assert isinstance(found, type), target
    return found


def docstring(of: object) -> str:
    r"""A docstring as Markdown: what it does not say in Markdown is put into it.

    >>> class Parrot:
    ...     '''Says it again, _twice_.
    ...
    ...     Args:
    ...         word: what.
    ...     '''
    >>> print(docstring(Parrot))
    Says it again, \_twice\_.
    <BLANKLINE>
    Args:
    <BLANKLINE>
    - `word`: what.
    """
    text = inspect.getdoc(of) or ""
    text = re.sub(r"^(Args|Attributes|Raises|Returns):\n", r"\1:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    # Outside of code and of code blocks these are letters, as in a name or a product.
    pieces = re.split(r"(`[^`]*`|^ {4}.*$)", text, flags=re.MULTILINE)
    return "".join(
        piece if i % 2 else re.sub(r"([_*<])", r"\\\1", piece) for i, piece in enumerate(pieces)
    )


def _default(option: Option) -> str:
    if option.value is None:
        return "required"
    return f"`{option.value!r}`" if option.value != option.value.strip() else _code(option.value)


def _code(text: str) -> str:
    return f"`{text}`" if text else "empty"


def _meaning(option: Option) -> str:
    text = re.sub(r"([|<_*])", r"\\\1", option.doc)
    choices = option.accepts.split("|") if re.fullmatch(r"\w+(\|\w+)+", option.accepts) else []
    if not choices or choices == ["True", "False"]:
        return text
    return f"{text}: {', '.join(f'`{choice}`' for choice in choices)}"


class OptionsDirective(SphinxDirective):
    """A table of one class's fields."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table's nodes."""
        return self.parse_text_to_nodes(table_of(class_of(self.arguments[0])))


class AboutDirective(SphinxDirective):
    """One class: its docstring and a table of its fields."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Their nodes."""
        return self.parse_text_to_nodes(about(self.arguments[0]))


class PartsDirective(SphinxDirective):
    """A section for each name of a dictionary of names."""

    required_arguments = 2
    option_spec: ClassVar = {"modules": directives.flag, "level": directives.nonnegative_int}

    def run(self) -> list[nodes.Node]:
        """The sections' nodes."""
        field, target = self.arguments
        level = "#" * self.options.get("level", 2)
        targets = pkgutil.resolve_name(target)
        text = sections_of(field, targets, level, "modules" in self.options)
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("options", OptionsDirective)
    app.add_directive("about", AboutDirective)
    app.add_directive("parts", PartsDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
