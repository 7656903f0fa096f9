"""What search spaces of few numbers cost and gain on a chat model, beside the default one.

    OMP_NUM_THREADS=1 python -m benchmarks.spaces                  # all
    OMP_NUM_THREADS=1 python -m benchmarks.spaces steering         # some

SmolLM2-135M-Instruct (`make chat-model`) learns sums in words from gold answers: the recipe `chat`
on held-out questions that choose settings (`dataset.fold=1`), with 16 genomes, 4 questions a
generation and 12 generations, so 768 evaluations for every space, and three seeds. σ is about what
`auto` finds on a machine that is not busy (on a busy one its search is cut short), but for
`soft_prompt_auto`; α is `auto`. Seconds are those of processors, start and two evaluations of 100
questions included.

`merge_es` and `merge_cma` are the recipe `merge`: from rewards, two adapters become one for both
tasks; `merge_fixed` has coefficients that no search chose. The adapters are trained once by the
commands of the recipe's README, in `build/spaces`. 200 held-out questions of each task.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from benchmarks.harness import CHAT_MODEL, Row, before_and_after, call, report, row
from es_cookbook.recipes.chat.problems import Task, generate_problems

SEEDS = (0, 1, 2)
_ADAPTERS = CHAT_MODEL.parents[1] / "spaces"
_MODEL = f"model_name={CHAT_MODEL}"
_CHAT = (
    "chat",
    _MODEL,
    "dataset.task=sums",
    "dataset.fold=1",
    "dataset.num_test=100",
    "optimizer.population_size=16",
    "dataset.problems_per_generation=4",
    "num_generations=12",
    "eval_every=0",
    "engine.num_lanes=1",
)
_SOFT_PROMPT = (*_CHAT, "search_space=soft_prompt", "search_space.text=Answer with a number.")
_EPOCHS: Mapping[Task, str] = {"sums": "epochs=0.75", "extraction": "epochs=0.4"}
_BOTH_TASKS = (_MODEL, "dataset.num_test=200", "engine.num_lanes=1")
_BOTH_ADAPTERS = f"search_space.adapters={','.join(str(_ADAPTERS / task) for task in _EPOCHS)}"
_MERGE = ("merge", *_BOTH_TASKS, _BOTH_ADAPTERS, "eval_every=0")
SPACES = {
    "low_rank": (*_CHAT, "optimizer.sigma=0.009"),
    "steering": (*_CHAT, "search_space=steering", "optimizer.sigma=0.18"),
    "soft_prompt": (*_SOFT_PROMPT, "optimizer.sigma=0.14"),
    "soft_prompt_auto": (*_SOFT_PROMPT, "optimizer.sigma=auto"),
    "merge_es": _MERGE,
    "merge_cma": (*_MERGE, "optimizer=cma"),
}
"""Space -> its command."""
FIXED = {
    "base": (_BOTH_ADAPTERS, "search_space.start_at=0"),
    "sum of the adapters": (_BOTH_ADAPTERS, "search_space.start_at=1"),
    **{
        f"adapter of {task}": ("search_space=adapter", f"search_space.start={_ADAPTERS / task}")
        for task in _EPOCHS
    },
}
"""Coefficients of `merge_fixed` -> their options."""


def train_adapters() -> None:
    """Train the adapters of the recipe `merge` that are not there yet."""
    for task, epochs in _EPOCHS.items():
        output = _ADAPTERS / task
        if output.exists():
            continue
        _ADAPTERS.mkdir(parents=True, exist_ok=True)
        data = _ADAPTERS / f"{task}.jsonl"
        problems = islice(generate_problems(task, 0, "train", 0), 512)
        chats = [
            [{"role": "user", "content": p.question}, {"role": "assistant", "content": p.gold}]
            for p in problems
        ]
        data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        options = f"data={data}", f"output={output}", "learning_rate=1e-3", "batch_size=8", epochs
        call("sft", "recipe=merge", _MODEL, *options)


def rows_of_fixed(directory: Path) -> list[Row]:
    """Measure coefficients that no search chose; their lines of the table."""
    rows: list[Row] = []
    for name, options in FIXED.items():
        output = directory / f"{name}.json"
        call("evaluate", "recipe=merge", *_BOTH_TASKS, *options, f"output={output}")
        metrics = json.loads(output.read_text())["metrics"]
        for tag in ("all", *_EPOCHS):
            rows.append(row(f"{name}: correct, {tag}", [100 * metrics[f"env/{tag}/correct"]], "%"))
    return rows


def rows_of(space: str, seed: int, log_path: Path) -> list[Row]:
    """Run one seed; its lines of the table."""
    _, seconds = call(*SPACES[space], f"seed={seed}", f"log_path={log_path}")
    before, after = before_and_after(log_path, "test/env/all/correct")
    name = f"{space}, seed {seed}:"
    print(f"{name} {before:.2f} -> {after:.2f} in {seconds:.0f} s of processors", flush=True)
    rows = [
        row(f"{name} correct before", [100 * before], "%"),
        row(f"{name} correct after", [100 * after], "%"),
        row(f"{name} gain", [100 * (after - before)], "points"),
        row(f"{name} seconds of processors", [seconds], "s"),
    ]
    for task in _EPOCHS if space.startswith("merge") else ():
        ends = before_and_after(log_path, f"test/env/{task}/correct")
        for when, value in zip(("before", "after"), ends, strict=True):
            rows.append(row(f"{name} correct {when}, {task}", [100 * value], "%"))
    return rows


def main(chosen: list[str]) -> None:
    """Run spaces and seeds one after the other, and report on each space."""
    for space in chosen or (*SPACES, "merge_fixed"):
        if space.startswith("merge"):
            train_adapters()
        rows: list[Row] = []
        with tempfile.TemporaryDirectory() as directory:
            if space == "merge_fixed":
                rows = rows_of_fixed(Path(directory))
            else:
                for seed in SEEDS:
                    rows += rows_of(space, seed, Path(directory) / str(seed))
        report("spaces", rows, space)


if __name__ == "__main__":
    main(sys.argv[1:])
