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


def after_start(said: str) -> str:
    """What follows the lines that tell what a command begins with."""
    lines = said.split("\n")
    while re.fullmatch("|".join(_DOES), lines[0]):
        del lines[0]
    return "\n".join(lines)
