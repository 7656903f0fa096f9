"""What supervised fine-tuning opens, records and closes, so that its loop is the training alone.

`<output>.training/` has `config.json`, `metrics.jsonl` with a line every so many steps, and the
last of `checkpoints/<step>/`: the trained weights and AdamW's moments. In the end the output
directory is written, whole or not at all, with the metrics in it, and the other one goes.
"""

import contextlib
import dataclasses
import functools
import math
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import cast

import anyio.from_thread
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer, no_progress_bar
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError, DataError, nearest, not_installed
from es_cookbook.common.files import whole_directory
from es_cookbook.common.terminal import say
from es_cookbook.evolution.spaces.full_rank import FullRank
from es_cookbook.plugins.gradients.checkpoints import begin
from es_cookbook.plugins.gradients.gradient_run import take_weights
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.plugins.gradients.supervised import Evaluation, SFTConfig, Split
from es_cookbook.population.evaluate import evaluate
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.golds import check_attempted
from es_cookbook.rl.grading.workers import end_idle_workers
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import Metrics, Tokenizer
from es_cookbook.runs.centre.checkpoints import last_directory, next_checkpoint
from es_cookbook.runs.directory.directory import (
    CONFIG,
    METRICS,
    MODEL,
    TENSORBOARD,
    Recorded,
    checked_names,
    keep_date,
    locked,
)
from es_cookbook.runs.directory.opening import decided
from es_cookbook.runs.tracking.base import RunInfo

WEIGHTS = "weights.safetensors"
_MAY_DIFFER = ("output", "log_every", "checkpoint_every", "trackers")
_KEPT = (METRICS, TENSORBOARD, "wandb")
"""What is written into the output directory as well, where it is there."""


class _SFTRun:
    """A training, open: its steps are those from `start` to `num_steps`."""

    def __init__(
        self,
        config: SFTConfig,
        log_path: Path,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        data: Split,
        evaluated: Callable[[], Metrics],
    ) -> None:
        self.train, self._test = data
        self.learner = Learner(
            model,
            [name for name, weight in model.named_parameters() if weight.requires_grad],
            tokens_per_pass=config.tokens_per_pass,
            max_gradient_norm=config.max_gradient_norm,
            packed_length=config.max_length if config.packing else 0,
        )
        if config.packing and not self.learner.packs:
            raise ConfigError(
                f"packing: in a {type(model).__name__} the rows of one sequence would see each "
                "other; leave packing out"
            )
        self.num_steps = max(1, math.ceil(config.epochs * len(self.train) / config.batch_size))
        self.start = _go_on(config, log_path, self.learner)
        self._config = config
        self._log_path = log_path
        self._model = model
        self._tokenizer = tokenizer
        self._evaluated = evaluated
        self._measured: Metrics = {}
        info = RunInfo(
            log_path,
            config_to_json(config),
            config.seed,
            self.num_steps,
            self.start,
            learns="adapter" if config.rank else "model",
        )
        self._tracker = config.trackers(info)
        self.close = self._tracker.close

    def begin(self, step: int) -> None:
        """Measure the weights that a step starts from, where that is due."""
        evaluation = self._config.evaluation
        every = (evaluation.every if evaluation else 0) or self.num_steps
        self._measured = self._held_out() if step % every == 0 else {}

    def record(self, step: int, metrics: Metrics) -> None:
        """Write and print what a step measured, and write a checkpoint, where they are due."""
        metrics = {**self._measured, **metrics}
        if step % self._config.log_every == 0 or self._measured:
            self._log(step, metrics)
        done, every = step + 1, self._config.checkpoint_every
        if every and done % every == 0:
            self._write_checkpoint(done)
            self._tracker.recorded(done)

    def finish(self) -> None:
        """Measure the last weights, write the output, and remove what it took to get there."""
        self._log(self.num_steps, self._held_out())
        last = last_directory(self._log_path)
        if self._tracker.takes_models and (last is None or int(last.name) < self.num_steps):
            self._write_checkpoint(self.num_steps)  # Which is pushed.
        self._tracker.recorded(self.num_steps)
        self._tracker.finish()
        self._tracker.close()
        with whole_directory(Path(self._config.output)) as directory:
            self._save(directory)
            for path in filter(Path.exists, (self._log_path / name for name in _KEPT)):
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, directory / path.name)
        shutil.rmtree(self._log_path)

    def _save(self, directory: Path) -> None:
        """Write the adapter, or the model with its tokenizer."""
        with no_progress_bar():
            self._model.save_pretrained(directory)
        if not self._config.rank:
            self._tokenizer.save_pretrained(directory)

    def _held_out(self) -> Metrics:
        """The mean loss of held-out rows, and what the model does on problems."""
        logprobs = self.learner.logprobs(self._test) if self._test else ()
        surprises = [-each for of in logprobs for each in of]
        loss = {"loss/test": math.fsum(surprises) / len(surprises)} if surprises else {}
        return {**loss, **self._evaluated()}

    def _log(self, step: int, metrics: Metrics) -> None:
        self._tracker.log(step, metrics)
        shown = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        print(f"step {step}/{self.num_steps}  {shown}", flush=True)

    def _write_checkpoint(self, step: int) -> None:
        with next_checkpoint(self._log_path, step) as path:
            weights = {name: w.detach().contiguous() for name, w in self.learner.weights.items()}
            save_file(weights, path / WEIGHTS)
            self.learner.save_moments(path)
            if self._tracker.takes_models:
                self._save(path / MODEL)


@contextlib.contextmanager
def opened(config: SFTConfig) -> Generator[_SFTRun]:
    """Open a training, new or interrupted; closes all of it however it ends.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    output = Path(config.output)
    log_path = output.with_name(f"{output.name}.training")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(log_path))
        if CONFIG in checked_names(log_path):
            elsewhere = f"remove {log_path} to begin again"
            decided(Recorded(log_path), config_to_json(config), "resume", _MAY_DIFFER, elsewhere)
        say(f"loading {config.model_name}")
        tokenizer = load_tokenizer(config.model_name)
        keep_date(log_path, tokenizer)
        data = _shortened(config.dataset(tokenizer), config.max_length)
        model = _model(config)
        evaluated: Callable[[], Metrics] = dict
        if config.evaluation is not None:
            evaluated = stack.enter_context(_evaluated(config, config.evaluation, model))
        run = _SFTRun(config, log_path, model, tokenizer, data, evaluated)
        stack.callback(run.close)
        yield run


def _shortened(data: Split, max_length: int) -> Split:
    """Without what is beyond the length; rows of which nothing is left to learn are left out."""

    def short(examples: Sequence[Example]) -> list[Example]:
        cut = (
            dataclasses.replace(
                each, tokens_T=each.tokens_T[:max_length], learned_T=each.learned_T[:max_length]
            )
            for each in examples
        )
        return [each for each in cut if any(each.learned_T[1:])]

    train, test = map(short, data)
    if not train:
        raise DataError(
            f"max_length={max_length} leaves nothing to learn of any row: all prompts are as long"
        )
    if lost := len(data[0]) - len(train):
        say(f"{lost} rows are left out: their prompts alone have max_length={max_length} tokens")
    return train, test


def _model(config: SFTConfig) -> PreTrainedModel:
    """The model with an adapter, or itself; what learns requires gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(config.model_name, "float32", device)
    if not config.rank:
        return model.requires_grad_(True)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise not_installed("rank (LoRA)", "peft", "es-cookbook[baselines]") from error
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {""}
    for target in config.targets:
        if target not in names:
            hint = nearest(target, names)
            raise ConfigError(f"targets: {config.model_name} has no layer {target!r}: {hint}")
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
    )
    with torch.random.fork_rng():  # PEFT draws from torch's global generator
        torch.manual_seed(config.seed)
        adapted = get_peft_model(model, lora)
    return cast(PreTrainedModel, adapted.eval())


def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the base model's names, the weights that learn: themselves, or with their adapters in."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = cast(Callable[[str], torch.Tensor], module.get_delta_weight)("default")
            weight = cast(torch.Tensor, module.weight)
            found[f"{name.removeprefix('base_model.model.')}.weight"] = weight + delta
    return found or {n: w for n, w in model.named_parameters() if w.requires_grad}


@contextlib.contextmanager
def _evaluated(
    config: SFTConfig, evaluation: Evaluation, model: PreTrainedModel
) -> Generator[Callable[[], Metrics]]:
    """Inside, what measures the model as it is then, on an engine that runs beside the training."""
    weights = functools.partial(torch.no_grad()(merged_weights), model)
    space = FullRank(include=tuple(weights()))
    with anyio.from_thread.start_blocking_portal() as portal, contextlib.ExitStack() as stack:
        build = functools.partial(
            evaluation.engine, model_name=config.model_name, search_space=space
        )
        engine = portal.call(build)
        stack.callback(portal.call, engine.close)
        stack.callback(end_idle_workers)
        test_P = portal.call(evaluation.dataset, engine.tokenizer).test_P
        of = engine.tokenizer, engine.traits.context_length, evaluation.sampling
        portal.call(check_attempted, test_P, *of)
        sampler = PopulationSampler(engine, sampling=evaluation.sampling, run_seed=config.seed)
        how = evaluation.attempts, evaluation.temperature

        def measured() -> Metrics:
            portal.call(take_weights, engine, weights())
            return portal.call(evaluate, sampler, test_P, *how)

        yield measured


def _go_on(config: SFTConfig, log_path: Path, learner: Learner) -> int:
    """Load the last checkpoint and cut the metrics after it; returns the first step to do."""
    start, path = 0, last_directory(log_path)
    if path is not None:
        start = int(path.name)
        learner.load(load_file(path / WEIGHTS), path)
        say(f"going on from step {start}")
    begin(log_path, config, start)
    return start
