"""Train by a policy gradient on the same problems, Envs and model as evolution strategies.

    python -m es_cookbook policy_gradient recipe=arithmetic
    ... recipe=countdown method=ppo attempts=64 num_generations=50
    ... model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl prompt="{question}"
        reward=my_rewards:score learning_rate=1e-6
    ... config=run.yaml seed=1

A recipe sets its model, problems, lengths, and as many rollouts as its own run has: all genomes'
attempts at a problem become the group. `data`, `prompt` and the like are those of `train`. The
methods, and what is left out, are described in `es_cookbook.baselines.policy_gradient`.

The run directory has the files of other runs except the history. `evaluate log_path=...` measures
it, also against runs of evolution strategies.
"""

from es_cookbook.baselines import policy_gradient
from es_cookbook.commands.gradients.program import train_cli


def cli() -> None:
    train_cli(policy_gradient.main, policy_gradient.Config, "policy_gradient")
