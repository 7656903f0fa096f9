"""Texts that end an answer, as `SamplingParams.stop` takes them."""

import json
import re
from typing import cast

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.chz_fields import CastError

_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}
_ESCAPE = re.compile(r"\\[nt\\]")


def read_stop(typed: str) -> tuple[str, ...] | None:
    r"""What was typed: a text, a list of them as JSON, or nothing for no texts.

    In a text `\n`, `\t` and `\\` stand for what they do in most languages, since a shell keeps them
    as they are.

    >>> read_stop(r"\n"), read_stop("."), read_stop('["###", "\\n\\n"]'), read_stop("None")
    (('\n',), ('.',), ('###', '\n\n'), None)

    Raises:
        CastError: Not such a list.
    """
    if typed in ("None", "none"):
        return None
    if not typed:
        return ()
    if not typed.startswith("["):
        return (_ESCAPE.sub(lambda found: _ESCAPED[found[0]], typed),)
    try:
        texts: object = json.loads(typed)
    except ValueError:
        texts = None
    if not _are_texts(texts, list):
        raise CastError(f'a list of texts looks like ["###", "\\n\\n"], found {typed}')
    return tuple(cast("list[str]", texts))


def check_stop(stop: object) -> None:
    """Refuse what `SamplingParams.stop` cannot be.

    Raises:
        ConfigError: No tuple of texts, or an empty text.
    """
    if stop is not None and not _are_texts(stop, tuple):
        raise ConfigError(f"stop must be a tuple of texts, found {stop!r}")
    if not all(cast("tuple[str, ...]", stop or ())):
        raise ConfigError(
            "stop must be texts of at least a character, since an empty one would end every "
            "answer; [] ends none"
        )


def _are_texts(found: object, kind: type[list[object]] | type[tuple[object, ...]]) -> bool:
    return isinstance(found, kind) and all(isinstance(text, str) for text in found)
