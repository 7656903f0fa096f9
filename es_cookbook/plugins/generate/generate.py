"""Generate training rows: a model behind an OpenAI-compatible server answers prompts of rows.

    vllm serve Qwen/Qwen2.5-7B-Instruct
    python -m es_cookbook generate source=rows.jsonl prompt="{question}" output=answers.jsonl
        model=Qwen/Qwen2.5-7B-Instruct replicas=4

Every line of the output has the fields of a row, the `prompt`, the `completion`, and under
`generated` the model and its sampling options, so `train` and `sft` can read it as it is. Equal
prompts are sent once, and each of their rows gets the answers; a row keeps equal answers once.

Answers are appended to a file beside the output (`answers.jsonl.parts`) as they arrive; the output
is written from it at the end, in the order of the rows. After an interruption, the same command
asks only for what is missing; with other sampling options it asks for all. Seeds are derived from
prompt and replica, so a server that honours them gives the same answers in any order.

With `via=distilabel` a distilabel pipeline asks; the rows are the same.
"""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import anyio

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, ServerError, leaves, not_installed
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import one_line, plural, say
from es_cookbook.plugins.generate.asking import HOW, GenerateConfig, Outcome, Question, answer_to
from es_cookbook.plugins.judges.chat import Completion
from es_cookbook.rl.data.rows import Row, filled
from es_cookbook.rl.data.sources import load_rows
from es_cookbook.runs.files import LineFile, replace_file

PARTS = ".parts"
"""Ends the name of the file with the answers as they came."""
HOPELESS = 16
"""Consecutive questions without an answer after which the command stops."""


def _opened(path: Path) -> tuple[LineFile, dict[str, Completion]]:
    """Open the file of answers, which survives a crash, and return it with the answers by key.

    A torn last line is dropped.

    Raises:
        DataError: A line is damaged.
        RunDirectoryError: The file cannot be written.
    """
    answers: dict[str, Completion] = {}
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            found = json.loads(line)
            answers[found["key"]] = Completion(found["text"], found["finish_reason"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise DataError(
                f"{path}, line {number}: not a line of `generate`; give another output, or delete "
                "this file to begin again"
            ) from None
    file = LineFile(path)
    file.truncate(len(whole))
    return file, answers


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main(config: GenerateConfig) -> None:
    """Ask for what is missing, write the rows, and say how many there are.

    Raises:
        ConfigError: The output exists and is not this command's.
        DataError: The source cannot be used.
        ServerError: The server refused, or some questions have no answer.
        RunDirectoryError: The output cannot be written.
    """
    output = Path(config.output)
    parts = output.with_name(output.name + PARTS)
    if output.exists() and not parts.exists():
        raise ConfigError(
            f"output {str(output)!r} is there already, without {parts.name!r} beside it to go on "
            "with; give another one"
        )
    rows = read_rows(config)
    if config.via == "distilabel" and find_spec("distilabel") is None:
        raise not_installed("via=distilabel", "distilabel", "es-cookbook[distilabel]")
    file, answers = _opened(parts)
    with contextlib.closing(file):
        missing = _missing(config, dict(rows), answers)
        lost, collect = _collector(config, file, answers, len(missing))
        try:
            if missing and config.via == "distilabel":
                from es_cookbook.plugins.generate import by_distilabel

                by_distilabel.ask(config, missing, collect)
            elif missing:
                anyio.run(_ask, config, missing, collect)
        except BaseExceptionGroup as errors:
            raise next(leaves(errors)) from None
        finally:
            _write(config, output, rows, answers)
    if lost:
        reasons = "; ".join(f"{count} x {one_line(why)}" for why, count in lost.most_common(5))
        raise ServerError(
            f"{plural(lost.total(), 'question')} without an answer ({reasons}); the same command "
            "asks again for these alone"
        )


def read_rows(config: GenerateConfig) -> list[tuple[str, Row]]:
    """Read the rows and make their prompts, in order.

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


def _settings(config: GenerateConfig) -> dict[str, object]:
    """Return the options that an answer depends on, beside its prompt."""
    names = ("model", "system", "temperature", "top_p", "max_tokens", "seed")
    return {name: getattr(config, name) for name in names}


def _key(config: GenerateConfig, prompt: str, replica: int) -> str:
    """Return what identifies an answer: its prompt and options, wherever its row is."""
    question = json.dumps([prompt, _settings(config)])
    return f"{hashlib.blake2b(question.encode(), digest_size=12).hexdigest()}-{replica}"


def _missing(
    config: GenerateConfig, prompts: Collection[str], answers: Collection[str]
) -> list[Question]:
    """Return the unanswered questions, replica by replica; seeds of 31 bits suit every server."""
    found = [
        (key, prompt, None if config.seed is None else derive_seed(config.seed, key) >> 32)
        for replica in range(config.replicas)
        for prompt in prompts
        if (key := _key(config, prompt, replica)) not in answers
    ]
    there = len(prompts) * config.replicas - len(found)
    say(
        f"asking {config.model} {plural(len(found), 'question')}"
        + (f"; {plural(there, 'answer')} are there already" if there else "")
    )
    return found


def _collector(
    config: GenerateConfig, file: LineFile, answers: dict[str, Completion], count: int
) -> tuple[Counter[str], Callable[[str, Outcome], None]]:
    """Return a count of lost questions by reason, and the function that takes outcomes."""
    lost: Counter[str] = Counter()
    done = in_a_row = 0

    def collect(key: str, outcome: Outcome) -> None:
        nonlocal done, in_a_row
        done += 1
        if isinstance(outcome, Completion):
            file.append(_line({"key": key, **outcome._asdict()}))
            answers[key] = outcome
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
    config: GenerateConfig, missing: Sequence[Question], collect: Callable[[str, Outcome], None]
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
    """Write the rows of all answers, if there are any, and say how many.

    Of a row's answers that differ only in whitespace, the first is kept.
    """
    lines: list[bytes] = []
    cut = answered = 0
    for prompt, row in rows:
        seen: set[str] = set()
        for replica in range(config.replicas):
            answer = answers.get(_key(config, prompt, replica))
            answered += answer is not None
            if answer is None or (folded := " ".join(answer.text.split())) in seen:
                continue
            seen.add(folded)
            cut += answer.finish_reason == "length"
            how = {**_settings(config), "replica": replica, "finish_reason": answer.finish_reason}
            own = {config.prompt_field: prompt, config.completion_field: answer.text, HOW: how}
            lines.append(_line({**row.fields, **own}))
    if not lines:
        return
    replace_file(output, lines)
    print(
        f"{plural(len(lines), 'row')} in {output}, of {plural(len(rows), 'row')} of the source; "
        f"equal answers left out: {answered - len(lines)}; "
        f"cut off at max_tokens={config.max_tokens}: {cut}"
    )


def cli() -> None:
    run_cli(main, GenerateConfig)
