"""Train with TRL's GRPO, on the same problems, Envs and model as evolution strategies.

    python -m es_cookbook grpo recipe=arithmetic
    ... recipe=countdown loss_type=dr_grpo scale_rewards=none attempts=64 num_generations=50
    ... config=run.yaml seed=1

Needs `pip install 'es-cookbook[baselines]'`. A recipe sets its model, problems, lengths, and as
many rollouts as its own run has: the attempts of all genomes at a problem become the group.
`data`, `prompt` and similar options are those of `train`.

The run directory is that of `policy_gradient`, plus `losses.csv`. `evaluate log_path=...` reads it.
"""

from es_cookbook.plugins.gradients.commands.policy_gradient import train_cli
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.plugins.gradients.grpo.config import Config


def cli() -> None:
    train_cli(main, Config, "grpo")
