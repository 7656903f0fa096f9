"""GRPO by TRL's trainer, on the problems, Envs and engines of all other runs.

    es-cookbook grpo recipe=arithmetic
    es-cookbook grpo recipe=countdown loss_type=dr_grpo scale_rewards=none trl.entropy_coef=0.001

Losses, clipping, the reference model and the optimizer are TRL's own (trl 1.16, `GRPOTrainer`);
what they mean is in its documentation. The rest is what it is in other runs: the model that TRL
trains answers through an engine (`rollouts`), so turns, time-outs, sampling seeds, metrics, the run
directory and evaluations are the same, and data sets mix, replay and filter as they do there.

Left out: several processes (`accelerate launch`), TRL's own generation, its evaluation and its
pushes, and Envs that rewrite what the model was shown: TRL has one sequence for a rollout.
"""

from es_cookbook.plugins.gradients.grpo.config import Config


async def main(config: Config) -> None:
    """Train, or go on training; a run that is complete is left as it is.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    from es_cookbook.plugins.gradients.grpo.arguments import checked  # with trl and torch

    more = checked(config.trl)
    from es_cookbook.plugins.gradients.grpo.training import train

    await train(config, more)
