"""Train by TRL's GRPO, on the same problems, Envs and model as evolution strategies.

    python -m es_cookbook grpo recipe=arithmetic
    ... recipe=countdown loss_type=dr_grpo scale_rewards=none attempts=64 num_generations=50
    ... recipe=countdown trl.entropy_coef=0.001
    ... config=run.yaml seed=1

Needs `pip install 'es-cookbook[baselines]'`. A recipe sets its model, problems, lengths, and as
many rollouts as its own run has: all genomes' attempts at a problem become the group. `data`,
`prompt` and the like are those of `train`. `trl.NAME=VALUE` is any other argument of TRL's
GRPOConfig.

The run directory is that of `policy_gradient`, with `losses.csv`. `evaluate log_path=...` reads it.
"""

from collections.abc import Sequence

from es_cookbook.plugins.gradients.commands.policy_gradient import train_cli
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.plugins.gradients.grpo.config import Config

_TRL = "trl."


def for_trl(options: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """NAME=VALUE of each `trl.NAME=VALUE`, the last of a name, and all other options.

    >>> for_trl(["seed=1", "trl.delta=2", "trl.delta=3"])
    ({'trl': ('delta=3',)}, ['seed=1'])
    """
    given = [each for each in options if each.lstrip("-").startswith(_TRL)]
    last = {each.partition("=")[0]: each.lstrip("-").removeprefix(_TRL) for each in given}
    return {"trl": tuple(last.values())}, [each for each in options if each not in given]


def cli() -> None:
    more_help = " trl.NAME=VALUE is any other argument of\nTRL's GRPOConfig."
    train_cli(main, Config, "grpo", more_help, for_trl)
