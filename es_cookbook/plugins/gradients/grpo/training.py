"""TRL's `GRPOTrainer` over a run of ours: who calls whom.

The trainer's loop runs in a thread. Its data set has a row for each problem of each generation,
which says nothing but "generation, place", in order; the sampler of the trainer repeats each as
many times as there are attempts. When the trainer wants answers, it calls `rollout_func` with such
rows, and only then are the problems chosen, from all that was learned of earlier ones (curricula,
replay), and attempted through the run's engine. When a generation's last step is done, which the
trainer logs (`on_log`), the engine takes the moved weights and the run records the generation.

A checkpoint has the weights as a model directory, and in `trainer` what TRL's trainer remembers:
optimizer, learning rate, random numbers and its own state. It is written at the end of a
generation, since answers that are half learned from are not kept.

A chat of several turns is one completion, in which the model's own tokens have a loss and what the
Env says has none (`env_mask`). A lost rollout has no token with a loss, and its reward is None: TRL
leaves it out of its group's mean and standard deviation, and gives it the advantage 0. Losses that
are means over answers (`loss_type=grpo`, `sapo`) still count it among them, and so do `dr_grpo` and
`luspo`; sums over tokens (`dapo`, `bnpo`, `cispo`, `vespo`) do not.
"""

import copy
import csv
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.from_thread
import anyio.to_thread
import torch
from datasets import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerState,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_TEXT, appending, read_file
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import Engine
from es_cookbook.engines.vocabulary import learn_tokens_alone
from es_cookbook.plugins.gradients.gradient_run import GradientRun, Gradients
from es_cookbook.plugins.gradients.grpo.arguments import (
    GRPOConfig,
    GRPOTrainer,
    add_fused_lm_head,
    arguments,
    refused_by_trl,
)
from es_cookbook.plugins.gradients.grpo.config import Config
from es_cookbook.plugins.gradients.learner import dtype_of_products, trained_weights
from es_cookbook.rl.rollouts import Example, mean_of, sequences_of
from es_cookbook.rl.types import LostRollout, Metrics, Tokenizer, Trajectory, TrajectoryGroup
from es_cookbook.runs.directory.directory import LOSSES
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.setup import opened

TRAINER = "trainer"
REWARD = "env_reward"
"""The key under which rewards reach the reward function."""
_COLUMNS = {
    "loss": "loss",
    "gradient_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "reward": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "kl": "kl",
    "clipped": "clip_ratio/region_mean",
}
"""Column of losses.csv -> TRL's; empty where TRL does not measure it in this run."""
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache")
_MEASURED = {
    "policy/loss": "loss",
    "policy/gradient_norm": "grad_norm",
    "policy/entropy": "entropy",
    "policy/kl": "kl",
    "policy/clipped": "clip_ratio/region_mean",
    "optimizer/learning_rate": "learning_rate",
}
"""Our metric -> what TRL logs at each step; it is the mean over a generation's steps."""


class _TrainedByTRL:
    """A model whose named weights TRL's trainer moves.

    Raises:
        ConfigError: A name is no parameter's own.
    """

    def __init__(self, model: PreTrainedModel, engine: Engine) -> None:
        self.model = model
        self.weights = trained_weights(model, engine.space.shapes)
        self.kept = kept_settings(model)
        self.checkpoint: Path | None = None
        self.trainer: _Trainer | None = None

    def load(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Go on from weights, and, once there is a trainer, from what it remembered."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])
        self.checkpoint = directory / TRAINER

    def save_moments(self, directory: Path) -> None:
        assert self.trainer is not None
        self.trainer.save_state_in(directory)


def kept_settings(model: PreTrainedModel) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Where the model's configs have what TRL changes and a checkpoint must not, and its values."""
    configs = model.config, model.config.get_text_config(), model.generation_config
    places = [vars(config) for config in configs]
    return [(place, {n: place[n] for n in _KEPT if n in place}) for place in places]


async def train(config: Config, more: Mapping[str, object]) -> None:
    """Open the run, and train all generations that are still to come.

    Raises:
        ESCookbookError: Anything that the user can put right: TRL refuses a setting, the problems
            are not of a kind that it can take, and as for `opened`.
    """
    async with opened(Gradients(config, _TrainedByTRL)) as run:
        if run is None or not run.generations:
            return
        num_problems = len(run.dataset.get_batch(run.generations.start))
        traits, device = run.engine.traits, run.learner.model.device
        products = dtype_of_products(config.products, traits.base_dtype, device)
        args = arguments(config, more, num_problems, traits.context_length, products)
        await anyio.to_thread.run_sync(_train, config, args, num_problems, run)


def _train(
    config: Config, args: GRPOConfig, num_problems: int, run: GradientRun[_TrainedByTRL]
) -> None:
    torch.set_num_threads(num_cores())  # this thread, which is not torch's first, has one core
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


def padded(tokenizer: Tokenizer, model: PreTrainedModel) -> tuple[Tokenizer, int]:
    """A copy that has a padding token, whichever, and that: no real token sees it."""
    tokenizer = copy.deepcopy(tokenizer)
    num_tokens = cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    usable = [token for token in known if isinstance(token, int) and token < num_tokens]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(usable[0])
    return tokenizer, usable[0]


def env_reward(**rows: object) -> list[float | None]:
    """TRL's reward function: what the Envs gave, None for lost rollouts."""
    return cast("list[float | None]", rows[REWARD])


class _Trainer(GRPOTrainer):
    """Keeps its state where the run does, and has the run's learning rate and temperature.

    Attributes:
        factor: on the learning rate, by step.
        forwards: of each model, before its head was given another temperature.
    """

    factor: Callable[[int], float]
    forwards: dict[PreTrainedModel, Callable[..., object]]

    @override
    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        of = cast(torch.optim.Optimizer, self.optimizer) if optimizer is None else optimizer
        num_warmup_steps = self.args.get_warmup_steps(num_training_steps)

        def factor(step: int) -> float:
            # As transformers warms up: from 0, so the first step of all moves nothing.
            is_warm = step >= num_warmup_steps
            return self.factor(step) * (1.0 if is_warm else step / num_warmup_steps)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(of, factor)
        return self.lr_scheduler

    def set_temperature(self, temperature: float) -> None:
        """Compute log-probabilities at another temperature from now on.

        TRL gives it to the head that computes them when the trainer is made.
        """
        if temperature == self.temperature:
            return
        self.temperature = temperature
        heads = {self.model: ("log_probs", "entropy"), self.ref_model: ("log_probs",)}
        for of, outputs in heads.items():
            if of is None:
                continue
            model = cast(PreTrainedModel, of)
            # Each head is around the forward that it finds, so it is given the first one.
            model.forward = self.forwards.setdefault(model, model.forward)
            add_fused_lm_head(
                model,
                temperature=temperature,
                cast_lm_head_to_fp32=cast(GRPOConfig, self.args).cast_lm_head_to_fp32,
                outputs=outputs,
            )

    def save_state_in(self, directory: Path) -> None:
        """Write all that the trainer remembers but the weights to `trainer` in a directory."""
        self.args.output_dir = str(directory)
        self._save_checkpoint(cast(torch.nn.Module, self.model), None)
        written = directory / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        written.rename(directory / TRAINER)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The weights are the run's to write."""
        os.makedirs(str(output_dir), exist_ok=True)

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run has none."""

    @override
    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The weights are there already."""


class _Generations(TrainerCallback):
    """What TRL's trainer calls, in its thread; the run itself is on the event loop."""

    def __init__(
        self, config: Config, run: GradientRun[_TrainedByTRL], num_problems: int, filler: int
    ) -> None:
        self._config = config
        self._run = run
        self._num_problems = num_problems
        self._filler = filler
        self._steps = config.num_iterations * config.steps
        self._losses = _Losses(Path(config.log_path), run.generations.start * self._steps)
        self._groups_P: Sequence[TrajectoryGroup] = ()
        self._logs: list[Mapping[str, object]] = []
        self._began = 0.0

    def learning_rate_factor(self, step: int) -> float:
        """Of a step, counted from 0 over the whole run."""
        generations = self._config.num_generations
        return self._config.learning_rate_schedule(step // self._steps, generations)

    def roll_out(self, prompts: Sequence[str], trainer: "_Trainer") -> dict[str, Any]:
        """TRL's `rollout_func`: the attempts at the problems that stand for these rows."""
        config = self._config
        generation = int(prompts[0].partition(" ")[0])
        problems_P = self._run.dataset.get_batch(generation)
        if len(problems_P) != self._num_problems:
            raise ConfigError(
                f"dataset: TRL's batches are of one size, and generation {generation} has "
                f"{len(problems_P)} problems where the first had {self._num_problems}"
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
        logs: Mapping[str, object] = kwargs["logs"]
        if "loss" not in logs:  # A summary of the whole training.
            return
        anyio.from_thread.check_cancelled()
        done = state.global_step
        generation = (done - 1) // self._steps
        self._losses.add(done, generation, logs)
        self._logs.append(logs)
        if done % self._steps == 0:
            anyio.from_thread.run(self._end, generation)

    async def _end(self, generation: int) -> None:
        """A generation's last step is done: the engine takes the weights, the run records it."""
        self._run.recorder.took(generation, "learn", self._began, time.perf_counter())
        await self._run.learned(generation)
        measured = {**_means(self._logs), "policy/weighted": _weighted(self._groups_P)}
        self._logs = []
        await self._run.record(generation, self._groups_P, measured)


def _means(logs: Sequence[Mapping[str, object]]) -> Metrics:
    """Over steps, of what TRL measured; the rest is left out."""
    found: dict[str, float] = {}
    for key, name in _MEASURED.items():
        values = [value for each in logs if isinstance(value := each.get(name), float)]
        if values:
            found[key] = mean_of(values)
    return found


def _weighted(groups_P: Sequence[TrajectoryGroup]) -> float:
    """The share of rollouts in groups whose rewards differ; lost ones count as others do not."""
    rewards_P_K = [
        [reward for reward in group.rewards_G_K[0] if not math.isnan(reward)] for group in groups_P
    ]
    weighted = sum(len(rewards) for rewards in rewards_P_K if len(set(rewards)) > 1)
    return weighted / max(sum(map(len, rewards_P_K)), 1)


def rows_of(
    groups_P: Sequence[TrajectoryGroup],
    *,
    filler: int,
    with_logprobs: bool = True,
) -> dict[str, Any]:
    """What TRL's `rollout_func` returns, problem by problem, attempt by attempt.

    Args:
        groups_P: of one genome each, the model.
        filler: a token that stands where there is none, without a loss.
        with_logprobs: the probabilities with which tokens were sampled are those that TRL computes,
            so it may compare them.

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
    """Prompt, completion, and of each of its tokens whether it has a loss, and its logprob."""
    if not isinstance(trajectory, Trajectory) or (example := _sequence(trajectory)) is None:
        return [filler], [filler], [0], [0.0]
    start = len(trajectory.transitions[0].observation.tokens_T)
    return (
        list(example.tokens_T[:start]),
        list(example.tokens_T[start:]),
        [int(learned) for learned in example.learned_T[start:]],
        list(example.sampled_T[start:]),
    )


def _sequence(trajectory: Trajectory) -> Example | None:
    """The one sequence of a rollout; None where it has no token that the policy sampled."""
    found = sequences_of(trajectory, 1.0)
    kinds = [kind for kind, _ in trajectory.seen]
    if kinds.count("prompt") > 1:
        raise ConfigError(
            "dataset: an Env of several turns did not go on from what was said before, so its "
            f"rollout is {kinds.count('prompt')} sequences, and TRL's trainer takes one: train "
            "with policy_gradient, or let every observation begin with the one before it and its "
            "action"
        )
    return found[0] if found else None


class _Losses:
    """`losses.csv`: a line for each step of the optimizer, to be read by anything.

    Args:
        step: steps that are done; lines after them are cut.
    """

    def __init__(self, log_path: Path, step: int) -> None:
        self._path = log_path / LOSSES
        kept = [_line(("step", "generation", *_COLUMNS)), *(_lines_upto(self._path, step))]
        replace_file(self._path, [text.encode() for text in kept])

    def add(self, step: int, generation: int, logs: Mapping[str, object]) -> None:
        """One step, counted from 1, as TRL logged it."""
        values = [logs.get(key) for key in _COLUMNS.values()]
        with appending(self._path) as file:
            file.write(_line((step, generation, *("" if v is None else v for v in values))))


def _line(values: tuple[object, ...]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _lines_upto(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to this one."""
    try:
        text = read_file(path, LARGEST_TEXT, path.parent).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [
        f"{each}\n"
        for each in text.split("\n")[:-1]
        if each.partition(",")[0].isdecimal()
        if int(each.partition(",")[0]) <= step
    ]
