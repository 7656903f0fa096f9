"""TRL's `GRPOTrainer` in a run of ours.

The trainer's loop runs in a thread. Its dataset has a row for each problem of each generation,
"generation place", in order; the trainer's sampler repeats each row once per attempt. When the
trainer wants answers, it calls `rollout_func` with such rows. Only then are the problems chosen,
using all results of earlier ones (curricula, replay), and attempted through the run's engine. When
a generation's last step is done, which the trainer logs (`on_log`), the engine takes the new
weights and the run records the generation.

A checkpoint has the weights as a model directory and, in `trainer`, the state of TRL's trainer:
optimizer, learning rate and random numbers. It is written at the end of a generation, since answers
in use are not kept.

A chat of several turns is one completion, in which the model's own tokens have a loss and the Env's
have none (`env_mask`). A lost rollout has no token with a loss, and its reward is None: TRL leaves
it out of its group's mean and standard deviation, and gives it the advantage 0. Losses that are
means over answers (`loss_type=grpo`, `sapo`) still count it among them, and so do `dr_grpo` and
`luspo`; sums over tokens (`dapo`, `bnpo`, `cispo`, `vespo`) do not.

TRL is imported without vLLM, even if that is installed: it would take seconds and hundreds of
megabytes, TRL's generation is not used, and its versions of vLLM are not those of our engine.
"""

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import anyio
import anyio.from_thread
import anyio.to_thread
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, importing
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import Engine
from es_cookbook.plugins.gradients.gradient_run import GradientRun, Gradients
from es_cookbook.plugins.gradients.grpo.config import Config
from es_cookbook.plugins.gradients.learner import (
    MOST_TOKENS,
    dtype_of_products,
    learn_tokens_alone,
    trained_weights,
)
from es_cookbook.rl.rollouts import mean_of, sequences_of
from es_cookbook.rl.types import LostRollout, Metrics, Tokenizer, Trajectory, TrajectoryGroup
from es_cookbook.runs.directory.directory import LOSSES
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.setup import opened

with importing("grpo", "es-cookbook[baselines]", "trl"):
    from trl import import_utils

with mock.patch.object(import_utils, "is_vllm_available", return_value=False):
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

TRAINER = "trainer"
REWARD = "env_reward"
"""The key under which rewards reach the reward function."""
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
_MEASURED = {
    "policy/loss": "loss",
    "policy/gradient_norm": "grad_norm",
    "optimizer/learning_rate": "learning_rate",
    "policy/entropy": "entropy",
    "policy/kl": "kl",
    "policy/clipped": "clip_ratio/region_mean",
}
"""Our metric -> TRL's, which is averaged over a generation's steps."""
_COLUMNS = {
    **{metric.partition("/")[2]: name for metric, name in _MEASURED.items()},
    **{"reward": "reward", "reward_std": "reward_std"},
}
"""Column of losses.csv -> TRL's name; empty if TRL does not measure it in this run."""


class _TrainedByTRL:
    """A model whose named weights TRL's trainer trains.

    Attributes:
        kept: the model's configs, each with values that TRL changes and checkpoints keep.

    Raises:
        ConfigError: There is no parameter of such a name.
    """

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self.model = model
        self.weights = trained_weights(model, engine.space.shapes)
        configs = model.config, model.config.get_text_config(), model.generation_config
        places = [vars(config) for config in configs]
        self.kept = [(place, {n: place[n] for n in _KEPT if n in place}) for place in places]
        self.checkpoint: Path | None = None
        self.trainer: _Trainer | None = None

    def load_moments(self, directory: Path) -> None:
        """Load the trainer's state once there is a trainer."""
        self.checkpoint = directory / TRAINER

    def save_moments(self, directory: Path) -> None:
        assert self.trainer is not None
        self.trainer.save_state_in(directory)


async def train(config: Config) -> None:
    """Open the run, and train all generations that are left.

    Raises:
        ESCookbookError: A mistake of the user: TRL refuses a setting or cannot take the problems,
            and as for `opened`.
    """
    async with opened(Gradients(config, _TrainedByTRL)) as run:
        if run is None or not run.generations:
            return
        num_problems = len(run.dataset.get_batch(run.generations.start))
        traits, device = run.engine.traits, run.learner.model.device
        products = dtype_of_products(config.products, traits.base_dtype, device)
        args = arguments(config, num_problems, traits.context_length, products)
        await anyio.to_thread.run_sync(_train, config, args, num_problems, run)


def _train(
    config: Config, args: GRPOConfig, num_problems: int, run: GradientRun[_TrainedByTRL]
) -> None:
    torch.set_num_threads(num_cores())  # Threads other than torch's first use one by default.
    learner = run.learner
    tokenizer, filler = padded(run.engine.tokenizer, learner.model)
    generations = _Generations(config, run, num_problems, filler)
    slots = [f"{g} {p}" for g in range(config.num_generations) for p in range(num_problems)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
            trainer = _Trainer(
                model=learner.model,
                reward_funcs=env_reward,
                args=args,
                train_dataset=Dataset.from_dict({"prompt": slots}),
                processing_class=tokenizer,
                callbacks=[generations],
                rollout_func=cast(
                    "Callable[[list[str], GRPOTrainer], dict[str, Any]]", generations.roll_out
                ),
            )
    except (ValueError, NotImplementedError) as error:
        raise refused_by_trl(error) from error
    if trainer.ref_model is not None:  # TRL loads it itself.
        learn_tokens_alone(cast(PreTrainedModel, trainer.ref_model), run.engine.tokenizer)
    trainer.forwards = {}
    trainer.factor = generations.learning_rate_factor
    trainer.remove_callback(PrinterCallback)
    learner.trainer = trainer
    resumed = learner.checkpoint
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))


def arguments(
    config: Config, num_problems: int, context_length: int, products: torch.dtype = torch.float32
) -> GRPOConfig:
    """Return TRL's arguments for batches of so many problems.

    The rows of a backward pass divide those of a step, and fit into `tokens_per_pass` even if all
    are as long as the context.

    Raises:
        ConfigError: The rollouts cannot be divided into steps, or TRL refuses a setting.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or torch.cuda.device_count() > 1:
        raise ConfigError(
            "grpo trains in one process on one device: make one GPU visible, with "
            "CUDA_VISIBLE_DEVICES, and do not start it by accelerate or torchrun"
        )
    num_rollouts = num_problems * config.attempts
    of_step, rest = divmod(num_rollouts, config.steps)
    if rest:
        raise ConfigError(
            f"steps must divide the {num_rollouts} rollouts of a generation ({num_problems} "
            f"problems, attempts={config.attempts}), found {config.steps}"
        )
    most = max(1, (config.tokens_per_pass or MOST_TOKENS) // context_length)
    rows = max(size for size in range(1, min(most, of_step) + 1) if of_step % size == 0)
    try:
        return GRPOConfig(
            output_dir=config.log_path,
            seed=config.seed % 2**32,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            num_iterations=config.num_iterations,
            loss_type=config.loss_type,
            scale_rewards=config.scale_rewards,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            importance_sampling_level=config.importance_sampling_level,
            use_cpu=not torch.cuda.is_available(),
            max_grad_norm=config.max_gradient_norm,
            max_steps=config.num_generations * config.num_iterations * config.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=of_step // rows,
            steps_per_generation=num_rollouts // rows,
            num_generations=config.attempts,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_completion_length=config.sampling.max_tokens,
            disable_dropout=True,
            bf16=products == torch.bfloat16,
            gradient_checkpointing=False,
        )
    except (ValueError, TypeError, ImportError) as error:
        raise refused_by_trl(error) from error


def refused_by_trl(error: Exception) -> ConfigError:
    """Return the error for settings that TRL refuses."""
    return ConfigError(f"TRL refuses these settings: {' '.join(str(error).split())}")


def padded(tokenizer: Tokenizer, model: PreTrainedModel) -> tuple[Tokenizer, int]:
    """Return a copy with a padding token, and that token; no real token attends to it."""
    tokenizer = copy.deepcopy(tokenizer)
    num_tokens = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    usable = [token for token in known if isinstance(token, int) and token < num_tokens]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(usable[0])
    return tokenizer, usable[0]


def env_reward(**rows: object) -> list[float | None]:
    """Return the rewards of the Envs, None for lost rollouts: TRL's reward function."""
    return cast("list[float | None]", rows[REWARD])


class _Trainer(GRPOTrainer):
    """Keeps its state in the run's checkpoints, and has the run's learning rate and temperature.

    Attributes:
        factor: factor on the learning rate, by step.
        forwards: each model's forward before its head was given another temperature.
    """

    factor: Callable[[int], float]
    forwards: dict[PreTrainedModel, Callable[..., object]]

    @override
    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        of = cast(torch.optim.Optimizer, self.optimizer) if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(of, self.factor)
        return self.lr_scheduler

    def set_temperature(self, temperature: float) -> None:
        """Compute log-probabilities at another temperature from now on.

        TRL sets it once, in the head that computes them.
        """
        if temperature == self.temperature:
            return
        self.temperature = temperature
        heads = {self.model: ("log_probs", "entropy"), self.ref_model: ("log_probs",)}
        for of, outputs in heads.items():
            if of is None:
                continue
            model = cast(PreTrainedModel, of)
            # A head wraps the forward that it finds, so restore the original one first.
            model.forward = self.forwards.setdefault(model, model.forward)
            add_fused_lm_head(
                model,
                temperature=temperature,
                cast_lm_head_to_fp32=cast(GRPOConfig, self.args).cast_lm_head_to_fp32,
                outputs=outputs,
            )

    def save_state_in(self, directory: Path) -> None:
        """Write the trainer's state, without the weights, to `trainer` in a directory."""
        self.args.output_dir = str(directory)
        self._save_checkpoint(cast(torch.nn.Module, self.model), None)
        written = directory / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        written.rename(directory / TRAINER)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Do nothing: the run writes the weights."""
        os.makedirs(str(output_dir), exist_ok=True)

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no model card is written."""

    @override
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the weights are loaded already."""


class _Generations(TrainerCallback):
    """Callbacks of TRL's trainer, called in its thread; the run itself is on the event loop."""

    def __init__(
        self, config: Config, run: GradientRun[_TrainedByTRL], num_problems: int, filler: int
    ) -> None:
        self._config = config
        self._run = run
        self._num_problems = num_problems
        self._filler = filler
        self._steps = config.num_iterations * config.steps
        self._groups_P: Sequence[TrajectoryGroup] = ()
        self._began = 0.0

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor of a step, counted from 0 over the whole run."""
        generations = self._config.num_generations
        return self._config.learning_rate_schedule(step // self._steps, generations)

    def roll_out(self, prompts: Sequence[str], trainer: "_Trainer") -> dict[str, Any]:
        """Attempt the problems of these rows: TRL's `rollout_func`."""
        config = self._config
        generation = int(prompts[0].partition(" ")[0])
        problems_P = self._run.dataset.get_batch(generation)
        if len(problems_P) != self._num_problems:
            raise ConfigError(
                f"dataset: TRL's batches have one size, and generation {generation} has "
                f"{len(problems_P)} problems while the first had {self._num_problems}"
            )
        sampling = config.sampling_at(generation)
        trainer.set_temperature(sampling.temperature)
        self._groups_P = anyio.from_thread.run(self._run.rollout, generation, problems_P)
        self._began = time.perf_counter()
        return rows_of(
            self._groups_P,
            filler=self._filler,
            with_logprobs=(sampling.temperature, sampling.top_p) == (1.0, 1.0),
        )

    @override
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for place, settings in self._run.learner.kept:
            for name in _KEPT:
                place.pop(name, None)
            place.update(settings)

    @override
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        anyio.from_thread.check_cancelled()

    @override
    def on_log(self, args: Any, state: TrainerState, *more: Any, **kwargs: Any) -> None:
        anyio.from_thread.check_cancelled()
        is_step = "loss" in kwargs["logs"]  # Otherwise a summary of the whole training.
        if is_step and state.global_step % self._steps == 0:
            generation = state.global_step // self._steps - 1
            anyio.from_thread.run(self._end, generation, state.log_history)

    async def _end(self, generation: int, logs: Sequence[Mapping[str, object]]) -> None:
        """Give a generation's weights to the engine, and record the generation."""
        self._run.recorder.took(generation, "learn", self._began, time.perf_counter())
        await self._run.learned(generation)
        _write_losses(Path(self._config.log_path) / LOSSES, logs, self._steps)
        of_steps = _means(logs[-self._steps :])
        measured = {**of_steps, "policy/weighted": _weighted(self._groups_P)}
        await self._run.record(generation, self._groups_P, measured)


def _means(logs: Sequence[Mapping[str, object]]) -> Metrics:
    """Return means over steps of what TRL measured."""
    found: dict[str, float] = {}
    for key, name in _MEASURED.items():
        values = [value for each in logs if isinstance(value := each.get(name), float)]
        if values:
            found[key] = mean_of(values)
    return found


def _weighted(groups_P: Sequence[TrajectoryGroup]) -> float:
    """Return the share of finished rollouts in groups whose rewards differ."""
    rewards_P_K = [
        [reward for reward in group.rewards_G_K[0] if not math.isnan(reward)] for group in groups_P
    ]
    weighted = sum(len(rewards) for rewards in rewards_P_K if len(set(rewards)) > 1)
    return weighted / max(sum(map(len, rewards_P_K)), 1)


def rows_of(
    groups_P: Sequence[TrajectoryGroup], *, filler: int, with_logprobs: bool = True
) -> dict[str, Any]:
    """Return the result of TRL's `rollout_func`, by problem and attempt.

    Args:
        groups_P: groups with one genome each, the model.
        filler: a token without a loss, for rollouts without tokens.
        with_logprobs: whether tokens were sampled with the probabilities that TRL computes, so
            that it can compare them.

    Raises:
        ConfigError: A rollout is more than one sequence.
    """
    rows = [
        (*_row(trajectory, filler), None if math.isnan(reward) else reward)
        for group in groups_P
        for trajectory, reward in zip(group.trajectories_G_K[0], group.rewards_G_K[0], strict=True)
    ]
    keys = ("prompt_ids", "completion_ids", "env_mask", "logprobs", REWARD)
    columns: dict[str, Any] = dict(zip(keys, map(list, zip(*rows, strict=True)), strict=True))
    return columns if with_logprobs else {**columns, "logprobs": None}


def _row(
    trajectory: Trajectory | LostRollout, filler: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return prompt, completion, and whether each of its tokens has a loss, and its logprob."""
    if not isinstance(trajectory, Trajectory):
        return [filler], [filler], [0], [0.0]
    if (count := [kind for kind, _ in trajectory.seen].count("prompt")) > 1:
        raise ConfigError(
            "dataset: an Env of several turns did not continue earlier turns, so its rollout is "
            f"{count} sequences, and TRL's trainer takes one: train with policy_gradient, or let "
            "every observation begin with the previous one and its action"
        )
    if not (examples := sequences_of(trajectory, 1.0)):  # The policy sampled no token of it.
        return [filler], [filler], [0], [0.0]
    (example,) = examples
    start = len(trajectory.transitions[0].observation.tokens_T)
    return (
        list(example.tokens_T[:start]),
        list(example.tokens_T[start:]),
        [int(learned) for learned in example.learned_T[start:]],
        list(example.sampled_T[start:]),
    )


def _write_losses(path: Path, logs: Sequence[Mapping[str, object]], steps: int) -> None:
    """Write `losses.csv`: a line per step of the optimizer, `steps` of them in a generation."""
    rows: list[Sequence[object]] = [("step", "generation", *_COLUMNS)]
    for step, log in enumerate(logs):
        values = (log.get(key) for key in _COLUMNS.values())
        rows.append([step + 1, step // steps, *("" if v is None else v for v in values)])
    replace_file(path, [(",".join(map(str, row)) + "\n").encode() for row in rows])
