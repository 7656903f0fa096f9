"""What a command says on stderr, apart from what it does."""

import re

_DOES = (
    r".*: comparing .* with the base that it began with",
    r".*: loading .* on \w+",
    r"starting vLLM, .*",
    r"checking [\d,]+ training problems",
    r"evaluating [\d,]+ held-out problems before the first generation",
    r"rebuilding the centre after \d+ generations",
    r".*: rebuilding its centre for .*",
    r"reading the config\.json of .*",
    r"evaluating .* on [\d,]+ problems?",
    r"pushing .* to .*",
)
_LASTS = (r"compiling the kernels for this processor, .*", r"  … \d+ s")
"""What a slow machine, or one that runs it for the first time, says between them."""


def whole_lines(said: str) -> list[str]:
    """What was said, without how long it took."""
    return [line for line in said.splitlines() if not re.fullmatch("|".join(_LASTS), line)]


def after_start(said: str) -> str:
    """What follows the lines that tell what a command begins with."""
    lines = said.split("\n")
    while re.fullmatch("|".join((*_DOES, *_LASTS)), lines[0]):
        del lines[0]
    return "\n".join(lines)
