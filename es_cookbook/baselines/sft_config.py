"""The options of supervised fine-tuning."""

import chz

from es_cookbook.baselines.supervised import SupervisedDatasetBuilder
from es_cookbook.common.checks import check_range
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.schedules import SCHEDULE_NAMES, Linear, Schedule
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder
from es_cookbook.population.evaluate import check_evaluation
from es_cookbook.rl.types import RLDatasetBuilder, SamplingParams

_ROWS = Names({"rows": "es_cookbook.baselines.supervised:SupervisedRows"}, default="rows")
_PROBLEMS = Names({"rows": "es_cookbook.rl.data.task:Task"}, default=None)
_ENGINES = Names(ENGINE_NAMES, default="torch")


@chz.chz
class Evaluation:
    """Problems on which the model is measured while it learns."""

    dataset: RLDatasetBuilder = chz.field(
        meta_factory=_PROBLEMS, doc="of which the held-out problems are attempted"
    )
    sampling: SamplingParams = chz.field(default_factory=SamplingParams, doc="how tokens are drawn")
    engine: EngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="what samples"
    )
    every: int = chz.field(default=0, doc="steps between; 0: before and after only")
    attempts: int = chz.field(default=1, doc="at each problem; several also measure test/pass@k")
    temperature: float = chz.field(default=0.0, doc="of the attempts; 0 is greedy")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "every", at_least=0, prefix="evaluation.")
        check_evaluation(self.attempts, self.temperature, "evaluation.")


@chz.chz
class SFTConfig:
    """Fine-tune a LoRA adapter, or all weights, on rows that say what the model should write."""

    model_name: str = chz.field(doc="Hugging Face model directory or Hub name")
    dataset: SupervisedDatasetBuilder = chz.field(meta_factory=_ROWS, doc="rows to learn from")
    output: str = chz.field(doc="directory to write the adapter or model to; it must not exist")
    rank: int = chz.field(default=8, doc="of the LoRA adapter; 0 trains all weights instead")
    alpha: int = chz.field(default=16, doc="the adapter is scaled by alpha / rank")
    targets: tuple[str, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), doc="last names of the adapted layers"
    )
    learning_rate: float = chz.field(default=2e-4, doc="of AdamW")
    learning_rate_schedule: Schedule = chz.field(
        default=Linear(),
        meta_factory=Names(SCHEDULE_NAMES, default="linear"),
        doc="factor on learning_rate over the steps",
    )
    max_gradient_norm: float = chz.field(default=1.0, doc="longer gradients are cut to this length")
    batch_size: int = chz.field(default=32, doc="rows per step")
    epochs: float = chz.field(default=1.0, doc="passes over the rows")
    max_length: int = chz.field(default=1024, doc="tokens of a row; longer rows are truncated")
    packing: bool = chz.field(
        default=False, doc="several rows in one sequence of max_length, where none sees another"
    )
    tokens_per_pass: int = chz.field(
        default=16_384, doc="most tokens, padding included, of one backward pass; bounds memory"
    )
    log_every: int = chz.field(default=10, doc="steps between lines of metrics")
    checkpoint_every: int = chz.field(default=100, doc="steps between checkpoints; 0: none")
    evaluation: Evaluation | None = chz.field(
        default=None, doc="problems on which the model is measured: evaluation.dataset=..."
    )
    seed: int = chz.field(default=0, doc="of the adapter's first factors and the order of the rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "alpha", "batch_size", "tokens_per_pass", "log_every", at_least=1)
        check_range(self, "max_length", at_least=2)
        check_range(self, "rank", "checkpoint_every", at_least=0)
        check_range(self, "learning_rate", "epochs", "max_gradient_norm", above=0)
        if self.rank and not self.targets:
            raise ConfigError("targets must name a layer, for example targets=q_proj,v_proj")
