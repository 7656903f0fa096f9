"""`es-cookbook COMMAND name=value ...`, and the same as `python -m es_cookbook COMMAND ...`."""

import importlib
import pkgutil
import sys

from es_cookbook.common.errors import nearest
from es_cookbook.common.terminal import program, until_stdout_closes


def _summary(package: str) -> str:
    """The first line about a package, as half a sentence."""
    line = (importlib.import_module(package).__doc__ or "").strip().partition("\n")[0]
    return line[:1].lower() + line[1:].removesuffix(".")


COMMANDS = {
    "train": ("es_cookbook.commands.train", "train on rows of your own, or others' environments"),
    "resume": ("es_cookbook.commands.resume", "go on with a run, from its directory alone"),
    "fork": ("es_cookbook.commands.fork", "begin a new run with the first generations of another"),
    "rewind": ("es_cookbook.commands.rewind", "cut a run back to an earlier generation, in place"),
    "play": ("es_cookbook.commands.play", "talk to a run: its centre, its base, or any genome"),
    "runs": ("es_cookbook.commands.view.runs", "list runs: state, generation, best score"),
    "show": ("es_cookbook.commands.view.show", "print a summary of a run, with its trends"),
    "plot": ("es_cookbook.commands.view.plot", "draw curves, pass@k or a landscape for a paper"),
    "evaluate": (
        "es_cookbook.commands.evaluate.evaluate",
        "measure a run or a model on held-out problems, and compare two",
    ),
    "reconsider": (
        "es_cookbook.commands.reconsider.reconsider",
        "have problems answered twice, and compare both answers by entropy",
    ),
    "inspect": ("es_cookbook.commands.inspect", "evaluate a run with a task of inspect-ai"),
    "report": ("es_cookbook.commands.view.report", "write a page about runs, or follow them live"),
    "export": ("es_cookbook.commands.export", "write a run's centre as files that others load"),
    "compare": ("es_cookbook.commands.compare", "optimizers beside each other on a recipe"),
    "compare-gradients": (
        "es_cookbook.commands.gradients.compare_gradients",
        "evolution strategies beside gradients on a recipe",
    ),
    "sweep": ("es_cookbook.commands.sweep", "a recipe under many settings, several runs at a time"),
    "frames": (
        "es_cookbook.commands.view.frames",
        "write runs as one table, for pandas and others",
    ),
    "policy_gradient": (
        "es_cookbook.commands.gradients.policy_gradient",
        "train by gradients on a recipe or rows of your own",
    ),
    "grpo": ("es_cookbook.commands.gradients.grpo", "the same by TRL's GRPOTrainer"),
    "sft": (
        "es_cookbook.commands.gradients.sft",
        "fine-tune on rows of prompts and completions, or chats",
    ),
    "generate": ("es_cookbook.commands.prepare.generate", "have a model's answers as data"),
    "quantise": ("es_cookbook.commands.prepare.quantise", "write a model with quantised weights"),
    "plan": ("es_cookbook.commands.plan.plan", "print what a run needs of its GPUs"),
    "hub": ("es_cookbook.commands.hub", "push an export or a run to the Hugging Face Hub"),
}
_RECIPES = "es_cookbook.recipes"
RECIPES = {
    name: (f"{_RECIPES}.{name}.train_cli", _summary(f"{_RECIPES}.{name}"))
    for _, name, is_package in pkgutil.iter_modules(importlib.import_module(_RECIPES).__path__)
    if is_package
}
"""Name of a command -> its module, and one line about it; of recipes, what their package says."""


_MEANT = {"chat": "play", "continue": "resume", "extend": "resume"}
"""What people look for, and what it is called here."""


def main() -> None:
    """Run the command or the recipe that is named first; without one, list them."""
    known = COMMANDS | RECIPES
    name, *options = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        with until_stdout_closes():
            print(_overview())
    elif name in known:
        sys.argv = [f"{sys.argv[0]} {name}", *options]
        importlib.import_module(known[name][0]).cli()
    else:
        found = nearest(_MEANT.get(name, name), known)
        print(f"unknown command {name!r}: {found}", file=sys.stderr)
        raise SystemExit(2)


def _overview() -> str:
    lines = [f"usage: {program()} COMMAND [name=value ...]", ""]
    for title, entries in (("Commands", COMMANDS), ("Recipes", RECIPES)):
        lines += [f"{title}:", ""]
        lines += [f"  {name:<19}{what}" for name, (_, what) in entries.items()]
        lines += [""]
    return "\n".join([*lines, "COMMAND --help lists its options, with their values."])


if __name__ == "__main__":
    main()
