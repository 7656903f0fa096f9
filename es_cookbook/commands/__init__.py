"""What people do with a run: resume, fork, rewind, play, export, push, plan, compare.

`main` runs a command, or a recipe, by its name.
"""

import importlib
import pkgutil
import sys

from es_cookbook.common.errors import nearest
from es_cookbook.common.terminal import ended_at_once, program, until_stdout_closes


def _summary(package: str) -> str:
    """The first line about a package, as half a sentence."""
    line = (importlib.import_module(package).__doc__ or "").strip().partition("\n")[0]
    return line[:1].lower() + line[1:].removesuffix(".")


_COMMANDS = {
    "train": ("train", "train on rows of your own, or others' environments"),
    "resume": ("resume", "continue a run from its directory alone"),
    "fork": ("fork", "start a new run from the first generations of another"),
    "rewind": ("rewind", "cut a run back to an earlier generation, in place"),
    "play": ("play", "talk to a run: its centre, its base, or any genome"),
    "serve": ("serve", "serve a run or a model over OpenAI's API"),
    "runs": ("view.runs", "list runs: state, generation, best score"),
    "show": ("view.show", "print a summary of a run, with its trends"),
    "plot": ("view.plot", "draw curves, pass@k or a landscape for a paper"),
    "evaluate": (
        "evaluate.evaluate",
        "measure a run or model on held-out problems, or compare two",
    ),
    "reconsider": ("evaluate.reconsider", "ask for second answers, and compare both by entropy"),
    "inspect": ("inspect", "evaluate a run with a task of inspect-ai"),
    "report": ("view.report", "write a page about runs, or follow them live"),
    "export": ("export", "write a run's centre as files that other programs load"),
    "compare": ("compare", "compare optimizers on a recipe"),
    "compare-gradients": (
        "gradients.compare_gradients",
        "compare evolution strategies with gradients on a recipe",
    ),
    "sweep": ("sweep", "train a recipe under many settings, several runs at a time"),
    "frames": ("view.frames", "write runs as one table, for pandas and others"),
    "policy_gradient": (
        "gradients.policy_gradient",
        "train by policy gradients on a recipe or rows of your own",
    ),
    "grpo": ("gradients.grpo", "the same by TRL's GRPOTrainer"),
    "sft": ("gradients.sft", "fine-tune on rows of prompts and completions, or chats"),
    "generate": ("prepare.generate", "generate training rows with a model behind a server"),
    "quantise": ("prepare.quantise", "write a model with quantised weights"),
    "sigma": ("prepare.sigma", "print what genomes lose at each sigma, for any task and model"),
    "plan": ("prepare.plan", "print what a run needs of its GPUs"),
    "hub": ("hub", "push an export or a run to the Hugging Face Hub"),
}
COMMANDS = {name: (f"es_cookbook.commands.{of}", what) for name, (of, what) in _COMMANDS.items()}
_RECIPES = "es_cookbook.recipes"
RECIPES = {
    name: (f"{_RECIPES}.{name}.train_cli", _summary(f"{_RECIPES}.{name}"))
    for _, name, is_package in pkgutil.iter_modules(importlib.import_module(_RECIPES).__path__)
    if is_package
}
"""Name of a command -> its module, and one line about it; of recipes, what their package says."""


_ALIASES = {"continue": "resume", "extend": "resume"}
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
        with ended_at_once():  # Imports take a second.
            module = importlib.import_module(known[name][0])
        module.cli()
    else:
        found = nearest(_ALIASES.get(name, name), known)
        print(f"unknown command {name!r}: {found}", file=sys.stderr)
        raise SystemExit(2)


def _overview() -> str:
    lines = [f"usage: {program()} COMMAND [name=value ...]", ""]
    for title, entries in (("Commands", COMMANDS), ("Recipes", RECIPES)):
        lines += [f"{title}:", ""]
        lines += [f"  {name:<19}{what}" for name, (_, what) in entries.items()]
        lines += [""]
    return "\n".join([*lines, "COMMAND --help lists its options, with their values."])
