"""GRPO with TRL's trainer, on the problems, Envs and engines of all other runs.

    es-cookbook grpo recipe=arithmetic
    es-cookbook grpo recipe=countdown loss_type=dr_grpo scale_rewards=none

Losses, clipping, the reference model and the optimizer are TRL's (trl 1.16, `GRPOTrainer`), and
explained in its documentation. Everything else is as in other runs: the model that TRL trains
answers through an engine, so turns, time-outs, sampling seeds, metrics, the run directory and
evaluations are the same, and datasets mix, replay and filter in the same way.

Left out: several processes (`accelerate launch`), TRL's own generation, evaluation and pushes, its
other arguments, and Envs that rewrite earlier turns, since TRL has one sequence per rollout.
"""

from es_cookbook.plugins.gradients.grpo.config import Config


async def main(config: Config) -> None:
    """Train, or continue training; a complete run is not changed.

    Raises:
        ESCookbookError: A mistake of the user, in one sentence.
    """
    from es_cookbook.plugins.gradients.grpo.training import train  # with trl and torch

    await train(config)
