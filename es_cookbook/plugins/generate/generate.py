"""Generate training rows: a model behind an OpenAI-compatible server answers prompts of rows.

    vllm serve Qwen/Qwen2.5-7B-Instruct
    python -m es_cookbook generate source=rows.jsonl prompt="{question}" output=answers.jsonl
        model=Qwen/Qwen2.5-7B-Instruct replicas=4

Every line of the output has the fields of a row, the `prompt`, the `completion`, and under
`generated` the model and its sampling options, so `train` and `sft` can read
it as it is. Equal prompts are asked once, and each of their rows gets the answers; of equal answers
a row keeps one.

Answers are appended to a file beside the output (`answers.jsonl.parts`) as they arrive; the output
is written from it at the end, in the order of the rows. After an interruption, the same command
asks only for what is missing. Seeds are derived from prompt and replica, so a server that honours
them gives the same answers whatever was asked before.

With `via=distilabel` a distilabel pipeline asks; the rows are the same.
"""

import contextlib
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, cast

import anyio
import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, RunDirectoryError, ServerError, leaves
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.plugins.generate import by_distilabel
from es_cookbook.plugins.generate.by_distilabel import Asked, Outcome
from es_cookbook.plugins.judges.chat import (
    AskAgainError,
    Completion,
    RefusedError,
    asked,
    completion,
)
from es_cookbook.plugins.judges.http import key_in
from es_cookbook.rl.data.rows import Row, check_template, filled
from es_cookbook.rl.data.sources import (
    load_rows,
)
from es_cookbook.rl.types import (
    SOURCE_DOC,
)
from es_cookbook.runs.files import LineFile, cannot, replace_file

KEY = "ES_COOKBOOK_GENERATE_KEY"
"""Environment variable with the server's key, if it needs one; no other is sent."""
_FOR_ALL = (401, 403, 404, 405)
"""Statuses of a refused key or an unknown model, which concern every question, not one alone."""
PARTS = ".parts"
"""Ends the name of the file with the answers as they came."""
HOW = "generated"
"""Field of the output that says how its answer was made."""
HOPELESS = 16
"""So many questions in a row without an answer, and no more are asked."""


@chz.chz
class GenerateConfig:
    """Write rows to train on: a language model's answers to prompts made from rows."""

    model: str = chz.field(doc="the server's name for the model")
    base_url: str = chz.field(
        default="http://127.0.0.1:8000/v1", doc="URL of an OpenAI-compatible server, up to /v1"
    )
    system: str = chz.field(default="", doc="system message; empty: none")
    temperature: float = chz.field(default=0.7, doc="sampling temperature")
    top_p: float = chz.field(
        default=1.0, doc="nucleus sampling: cumulative probability to sample from"
    )
    max_tokens: int = chz.field(default=512, doc="maximum tokens per answer")
    timeout: float = chz.field(default=120.0, doc="seconds per attempt")
    attempts: int = chz.field(default=5, doc="maximum attempts per question")
    backoff: float = chz.field(
        default=1.0,
        doc="seconds before the second attempt, doubled each time, unless the server says more",
    )

    source: str = chz.field(doc=SOURCE_DOC)
    output: str = chz.field(doc=".jsonl file to write; one with the same settings is continued")
    prompt: str = chz.field(
        default="{question}", doc="prompt template, with fields of the row in braces"
    )
    replicas: int = chz.field(default=1, doc="answers per prompt")
    num_rows: int | None = chz.field(
        default=None, doc="number of rows to use, from the first; None: all"
    )
    seed: int | None = chz.field(
        default=0, doc="seed from which each question's is derived; None sends none"
    )
    prompt_field: str = chz.field(default="prompt", doc="output field for the prompt")
    completion_field: str = chz.field(default="completion", doc="output field for the answer")
    concurrency: int = chz.field(default=32, doc="maximum number of concurrent questions")
    via: Literal["openai", "distilabel"] = chz.field(
        default="openai",
        doc="what sends the questions: this process, or a distilabel pipeline",
    )

    @chz.validate
    def _valid(self) -> None:
        if not re.match(r"https?://[^/\s@]+(/|$)", self.base_url):
            raise ConfigError(
                f"base_url must begin with http:// or https:// and a host, found {self.base_url!r}"
            )
        check_range(self, "temperature", "backoff", at_least=0)
        check_range(self, "timeout", above=0)
        check_range(self, "top_p", above=0, at_most=1)
        counts = ("max_tokens", "attempts", "replicas", "num_rows", "concurrency")
        check_range(self, *counts, at_least=1)
        check_template(self.prompt)
        if not self.output.endswith(".jsonl"):
            raise ConfigError(f"output must be a file that ends in .jsonl, found {self.output!r}")
        names = (self.prompt_field, self.completion_field, HOW)
        if len(set(names)) < len(names) or not all(names):
            raise ConfigError(
                f"prompt_field={self.prompt_field!r} and completion_field="
                f"{self.completion_field!r} must be two names, and neither is {HOW!r}"
            )
        if self.replicas > 1 and self.temperature == 0:
            raise ConfigError(
                f"replicas={self.replicas} with temperature=0 asks for the same answer again; "
                "raise the temperature, or give replicas=1"
            )


async def answer_to(config: GenerateConfig, prompt: str, seed: int | None) -> Outcome:
    """Ask, several times if need be.

    Raises:
        ConfigError: The key cannot be in a header.
        ServerError: There will be no answer to any question.
    """
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": prompt})
    sent = ("model", "temperature", "top_p", "max_tokens")
    question = {"messages": messages, **{name: getattr(config, name) for name in sent}}
    if seed is not None:
        question["seed"] = seed
    ask = partial(completion, config.base_url, key_in(KEY), question, config.timeout)
    try:
        return await asked(ask, config.attempts, config.backoff)
    except AskAgainError as error:
        return str(error)
    except RefusedError as error:
        if error.status < 400 or error.status in _FOR_ALL:
            raise ServerError(
                f"the server at {config.base_url} refuses to answer: {error}"
            ) from None
        return str(error)


class _AnswersFile:
    """Answers by key, those of earlier calls and those that are added, which survive a crash.

    Its first line has the settings that shape an answer, every further one an answer under a key of
    its own, on the disk as soon as it came. A last line that is torn is dropped. Answers of other
    settings do not get into it: rows of one file come from one model asked in one way.

    Args:
        path: made where it is not there.
        settings: what shapes an answer; of values that JSON has.

    Attributes:
        by_key: all answers.

    Raises:
        ConfigError: The file was begun with other settings; says which.
        DataError: It is none of ours, or damaged.
        RunDirectoryError: It cannot be written, or another process is doing so.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.by_key: dict[str, Completion] = {}
        self._lock = _locked(path)  # First: the file remembers its size.
        self._file = LineFile(path)
        try:
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                self._file.truncate(len(whole))
            first, *others = whole[:-1].split(b"\n")
            if others:
                _check_settings(path, first, settings)
            else:  # Nothing was answered yet.
                self._file.truncate(0)
                self._file.append(_line({"settings": settings}))
            for number, line in enumerate(others, 2):
                key, text, finish_reason = _fields(
                    path, number, line, "key", "text", "finish_reason"
                )
                if not isinstance(key, str) or not isinstance(text, str):
                    raise _damaged(path, number)
                reason = finish_reason if isinstance(finish_reason, str) else None
                self.by_key[key] = Completion(text, reason)
        except BaseException:
            self.close()
            raise

    def add(self, key: str, answer: Completion) -> None:
        """Keep an answer; it is on the disk afterwards.

        Raises:
            RunDirectoryError: The disk is full or failed.
        """
        self._file.append(_line({"key": key, **answer._asdict()}))
        self.by_key[key] = answer

    def close(self) -> None:
        """Close the file, for others to go on with."""
        self._file.close()
        os.close(self._lock)


def _check_settings(path: Path, line: bytes, settings: Mapping[str, object]) -> None:
    (before,) = _fields(path, 1, line, "settings")
    if not isinstance(before, dict):
        raise _damaged(path, 1)
    before = cast("dict[str, object]", before)
    differences = [
        f"{name}={before.get(name)!r:.60}, now {settings.get(name)!r:.60}"
        for name in sorted(before.keys() | settings.keys())
        if before.get(name) != settings.get(name)
    ]
    if differences:
        raise ConfigError(
            f"the answers in {path} were begun with {'; '.join(differences)}: give the same, or "
            "another output"
        )


def _fields(path: Path, number: int, line: bytes, *names: str) -> list[object]:
    try:
        found: object = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _damaged(path, number)
    return [cast("dict[str, object]", found).get(name) for name in names]


def _damaged(path: Path, number: int) -> DataError:
    return DataError(
        f"{path}, line {number}: no line of `generate`; give another output, or delete this file "
        "to begin again"
    )


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _locked(path: Path) -> int:
    """A descriptor that holds the file's lock."""
    import filelock

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cannot("write", path, error, needed=1) from error
    try:
        if filelock.lock_descriptor(descriptor, blocking=False):
            return descriptor
        refusal = RunDirectoryError(
            f"{path} is being written by another process; wait for its end, or stop it"
        )
    except OSError as error:
        refusal = cannot("lock", path, error, needed=0)
    os.close(descriptor)
    raise refusal


def main(config: GenerateConfig) -> None:
    """Ask for what is missing, write the rows, and say how many there are.

    Raises:
        ConfigError: The output is another's, or was begun with other settings.
        DataError: The source cannot be used.
        ServerError: The server refused, answered nothing at all, or not every question.
        RunDirectoryError: The output cannot be written.
        WorkerError: distilabel's pipeline ended early.
    """
    output = Path(config.output)
    parts = output.with_name(output.name + PARTS)
    if output.exists() and not parts.exists():
        raise ConfigError(
            f"output {str(output)!r} is there already, without {parts.name!r} beside it to go on "
            "with; give another one"
        )
    rows = read_rows(config)
    if config.via == "distilabel":
        by_distilabel.check_distilabel()
    with contextlib.closing(_AnswersFile(parts, _settings(config))) as answers:
        missing = _missing(config, dict(rows), answers)
        lost, collect = _collector(config, answers, len(missing))
        try:
            if missing and config.via == "distilabel":
                by_distilabel.ask(_values(config), missing, collect)
            elif missing:
                anyio.run(_ask, config, missing, collect)
        except BaseExceptionGroup as errors:
            raise next(leaves(errors)) from None
        finally:
            if answers.by_key:
                _write(config, output, rows, answers.by_key)
    if lost:
        reasons = "; ".join(f"{count} x {one_line(why)}" for why, count in lost.most_common(5))
        raise ServerError(
            f"{plural(lost.total(), 'question')} without an answer ({reasons}); the same command "
            f"asks again for these alone"
        )


def read_rows(config: GenerateConfig) -> list[tuple[str, Row]]:
    """What is asked and the row that asks it, in order.

    Raises:
        DataError: There are no rows, or one lacks a field, has one that the output needs, or one
            that JSON cannot hold.
    """
    added = (config.prompt_field, config.completion_field, HOW)
    rows: list[tuple[str, Row]] = []
    for row in islice(load_rows(config.source), config.num_rows):
        prompt = filled(config.prompt, row)
        if not prompt.strip():
            raise row.error(f"prompt={config.prompt!r:.80} makes an empty text of it")
        for name in added:
            if name in row.fields and (name, row.fields[name]) != (config.prompt_field, prompt):
                hint = "" if name == HOW else "; give prompt_field or completion_field another name"
                raise row.error(f"field {name!r} is one that the output adds{hint}")
        try:
            json.dumps(dict(row.fields))
        except (TypeError, ValueError) as error:
            raise row.error(f"cannot be written as JSON ({error})") from error
        rows.append((prompt, row))
    if not rows:
        raise DataError(f"{config.source}: there are no rows")
    return rows


def _values(config: GenerateConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in chz.chz_fields(GenerateConfig)}


def _settings(config: GenerateConfig) -> dict[str, object]:
    """What shapes an answer, and nothing else: a server may move, and more may be asked."""
    names = ("model", "prompt", "system", "temperature", "top_p", "max_tokens", "seed")
    return {name: getattr(config, name) for name in names}


def _key(prompt: str, replica: int) -> str:
    """Names one answer: by what is asked, wherever its row stands."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=12)
    return f"{digest.hexdigest()}-{replica}"


def _missing(
    config: GenerateConfig, prompts: Collection[str], answers: _AnswersFile
) -> list[Asked]:
    """What is not answered yet, replica by replica."""
    found = [
        (key, prompt, None if config.seed is None else _seed(config.seed, key))
        for replica in range(config.replicas)
        for prompt in prompts
        if (key := _key(prompt, replica)) not in answers.by_key
    ]
    there = len(prompts) * config.replicas - len(found)
    say(
        f"asking {config.model} {plural(len(found), 'question')}"
        + (f"; {plural(there, 'answer')} are there already" if there else "")
    )
    return found


def _seed(seed: int, key: str) -> int:
    """A seed of 31 bits, which every server takes."""
    return derive_seed(seed, f"generate/{key}") >> 32


def _collector(
    config: GenerateConfig, answers: _AnswersFile, count: int
) -> tuple[Counter[str], Callable[[str, Outcome], None]]:
    """Counts lost questions by the reason; and what takes outcomes in, and says how far it is."""
    lost: Counter[str] = Counter()
    done = in_a_row = 0

    def collect(key: str, outcome: Outcome) -> None:
        nonlocal done, in_a_row
        done += 1
        if isinstance(outcome, Completion):
            answers.add(key, outcome)
            in_a_row = 0
        else:
            lost[outcome] += 1
            in_a_row += 1
        if in_a_row >= HOPELESS:
            raise ServerError(
                f"the server at {config.base_url} answers nothing: {in_a_row} questions in a row "
                f"were lost, the last with: {one_line(str(outcome))}; answers are kept"
            )
        if done * 10 // count > (done - 1) * 10 // count:
            say(f"{done} of {count} asked, {lost.total()} without an answer")

    return lost, collect


async def _ask(
    config: GenerateConfig, missing: Sequence[Asked], collect: Callable[[str, Outcome], None]
) -> None:
    waiting = iter(missing)

    async def ask_in_turn() -> None:
        for key, prompt, seed in waiting:
            collect(key, await answer_to(config, prompt, seed))

    async with anyio.create_task_group() as group:
        for _ in range(min(config.concurrency, len(missing))):
            group.start_soon(ask_in_turn)


def _write(
    config: GenerateConfig,
    output: Path,
    rows: Sequence[tuple[str, Row]],
    answers: Mapping[str, Completion],
) -> None:
    """Write the rows of all answers that there are, and say how many.

    Of a row's answers that differ in whitespace alone, the first is kept.
    """
    settings = _settings(config)
    del settings["prompt"]  # Its rows have it, filled.
    lines: list[bytes] = []
    cut = answered = 0
    for prompt, row in rows:
        seen: set[str] = set()
        for replica in range(config.replicas):
            answer = answers.get(_key(prompt, replica))
            answered += answer is not None
            if answer is None or (folded := " ".join(answer.text.split())) in seen:
                continue
            seen.add(folded)
            cut += answer.finish_reason == "length"
            how = {**settings, "replica": replica, "finish_reason": answer.finish_reason}
            own = {config.prompt_field: prompt, config.completion_field: answer.text, HOW: how}
            lines.append(_line({**row.fields, **own}))
    replace_file(output, lines)
    print(
        f"{plural(len(lines), 'row')} in {output}, of {plural(len(rows), 'row')} of the source; "
        f"equal answers left out: {answered - len(lines)}; "
        f"cut off at max_tokens={config.max_tokens}: {cut}"
    )


def cli() -> None:
    run_cli(main, GenerateConfig)


if __name__ == "__main__":
    cli()
