"""All errors that this package raises on purpose, in one hierarchy.

Catch `ESCookbookError` to catch them all, or the standard-library class beside it (`ValueError`,
`RuntimeError`, `OSError`) where that is what the caller already does. Every error carries one
finished sentence: what was wrong, where, and what is accepted. Its only argument is that sentence,
so every error survives pickling between processes.

To add one: subclass `ESCookbookError` and the closest standard exception, say in the docstring who
makes the mistake and who reads the sentence, and raise it where the mistake can be named (not where
it happens to surface).
"""

import contextlib
import difflib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import cast

_LONGEST_LIST = 2000
"""Characters of a list of accepted names, which may come from a stranger's file."""


class ESCookbookError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ESCookbookError, ValueError):
    """A field of a Config, or a combination of fields, that cannot work."""


class DivergedError(ConfigError):
    """Weights or losses that are not finite, after steps that were too large."""


class DataError(ESCookbookError, ValueError):
    """A row of a dataset that cannot be used; names the file and the line."""


class ModelError(ESCookbookError, ValueError):
    """A model directory, tokenizer or parameter that an engine or a search space cannot use."""


class RequestError(ESCookbookError, ValueError):
    """A request that an engine cannot serve, for example a prompt longer than the context."""


class EngineError(ESCookbookError, RuntimeError):
    """An engine that failed, hung or was used after it was closed."""


class EnvError(ESCookbookError, RuntimeError):
    """An Env or a group builder that broke the Env contract, by a NaN reward for example."""


class WorkerError(ESCookbookError, RuntimeError):
    """A function that crashed in a worker process, or that cannot be sent there."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A function that did not finish in time in a worker process."""


class SandboxError(ESCookbookError, RuntimeError):
    """A sandbox for model-written code that is unavailable or did not start; no code ran."""


class TooManyLostError(ESCookbookError, RuntimeError):
    """More rollouts were lost than `max_failed_fraction` allows; carries the first traceback."""


class SweepError(ESCookbookError, RuntimeError):
    """Runs of a sweep that failed; names one with its own sentence. The others are not lost."""


class RunDirectoryError(ESCookbookError, OSError):
    """A run directory that cannot be written, or that holds another run."""


class HistoryError(ESCookbookError, ValueError):
    """A history that is damaged, is another run's, or gives another fingerprint than recorded."""


class HubError(ESCookbookError, OSError):
    """A request or a push that the Hugging Face Hub refused, or that did not reach it."""


class ServerError(ESCookbookError, OSError):
    """A server with a language model that refuses to answer, or does not answer."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself, or the errors that structured concurrency has put in a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(inner)
    else:
        yield error


def not_installed(what: str, package: str, install: str) -> ConfigError:
    """Return the error for an optional package that is missing; it says how to install it.

    >>> not_installed("drawing", "matplotlib", "es-cookbook[plots]").args[0]
    "drawing needs matplotlib, which is not installed: pip install 'es-cookbook[plots]'"
    """
    return ConfigError(f"{what} needs {package}, which is not installed: pip install {install!r}")


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or its class if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def with_class(error: BaseException) -> str:
    """Return the class and the first line of an error.

    >>> with_class(KeyError("a"))
    "KeyError: 'a'"
    """
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}".removesuffix(": ")


def other_format(found: object, read: int) -> str:
    """Return a clause about a file of another format version; None if it names no version.

    >>> other_format(2, 1)
    'it has format version 2, and this es_cookbook reads 1'
    """
    if found is None:
        return (
            "it was written before version 1 of es_cookbook's files; the last commit that reads it "
            "is cc874d88"
        )
    return f"it has format version {found!r:.20}, and this es_cookbook reads {read}"


@contextlib.contextmanager
def importing(what: str, install: str, *packages: str) -> Generator[None]:
    """Say what to install if an import inside lacks one of these optional packages.

    Raises:
        ConfigError: It is not installed, or not in a version that has what is imported.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise not_installed(what, missing, install) from error


def nearest(name: str, accepted: Iterable[str]) -> str:
    """Return a half-sentence that lists the accepted names, the nearest to `name` first.

    >>> nearest("fulrank", ["lowrank", "fullrank"])
    "did you mean 'fullrank'? Accepted: fullrank, lowrank"
    """
    options = sorted(accepted)
    close = closest(name, options)
    asked = f"did you mean {close[:200]!r}? A" if close else "a"
    return f"{asked}ccepted: {', '.join(options):.{_LONGEST_LIST}}"


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Return a clause with the nearest name, where a list of all names would be too long.

    >>> did_you_mean("sigma", ["seed", "optimizer.sigma"])
    "; did you mean 'optimizer.sigma'?"
    """
    close = closest(name, list(accepted))
    return f"; did you mean {close!r}?" if close else ""


def closest(name: str, options: Sequence[str]) -> str | None:
    """Return the option that ends in the same name, wherever it stands, else the one most alike.

    None if none is alike.
    """
    by_last = {option.rpartition(".")[2]: option for option in reversed(options)}
    last = name.rpartition(".")[2]
    if last in by_last:
        return by_last[last]
    found = difflib.get_close_matches(name, options, n=1)
    found += [by_last[each] for each in difflib.get_close_matches(last, by_last, n=1)]
    return found[0] if found else None
