"""What a run needs, before anybody pays for GPUs: memory, tokens, and bytes sent and kept.

    python -m es_cookbook plan model_name=Qwen/Qwen2.5-7B-Instruct num_engines=8 engine=vllm

Only the model's config.json is read, and no GPU is needed. Options default to the main job's. The
numbers are those of `plan_numbers`. docs/multi_gpu.md is the guide.
"""

from functools import partial

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, nearest
from es_cookbook.common.terminal import say
from es_cookbook.engines.base import ENGINE_NAMES
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder

_ENGINES = Names({name: ENGINE_NAMES[name] for name in ("torch", "vllm")}, default="torch")
_SEARCH_SPACES = Names(
    {name: SEARCH_SPACE_NAMES[name] for name in ("low_rank", "full_rank")}, default="low_rank"
)
GPUS = {
    "a10": 24,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "b200": 180,
    "h100": 80,
    "h200": 141,
    "l4": 24,
    "l40s": 48,
    "rtx-4090": 24,
}
"""Memory in GB (10⁹ bytes), from NVIDIA's data sheets; the SXM version where there are several."""


@chz.chz
class PlanConfig:
    """Print what a run needs of its GPUs: memory, tokens, bytes sent and kept."""

    model_name: str = chz.field(doc="model directory (config.json is enough) or Hub name")
    num_engines: int = chz.field(default=1, doc="engines that share the population")
    engine: TorchEngineBuilder | VLLMEngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="kind of engine"
    )
    search_space: SearchSpaceBuilder = chz.field(
        meta_factory=_SEARCH_SPACES,
        default_factory=_SEARCH_SPACES.build_default,
        doc="which parameters genomes perturb, and how",
    )
    population_size: int = chz.field(default=64, doc="genomes per generation, in mirrored pairs")
    problems_per_generation: int = chz.field(default=32, doc="problems that each genome attempts")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    prompt_tokens: int = chz.field(default=12, doc="tokens per prompt")
    sampled_tokens: int = chz.field(
        default=32, doc="tokens sampled per rollout, at most sampling.max_tokens"
    )
    gpu: str = chz.field(default="h100", doc=f"one of {', '.join(GPUS)}")
    gpu_memory: float | None = chz.field(
        default=None, doc="memory per GPU in GB, for a GPU that is not listed"
    )

    @chz.validate
    def _fields(self) -> None:
        fields = chz.chz_fields(self)
        numbers = [name for name in fields if isinstance(getattr(self, name), int | float)]
        check_range(self, *numbers, above=0)
        if isinstance(self.engine, VLLMEngineBuilder):
            self.engine.check_space(self.search_space)
        ES(population_size=self.population_size)  # Refuses an odd one: pairs are mirrored.
        if self.gpu not in GPUS:
            raise ConfigError(
                f"gpu={self.gpu} is not in the table: {nearest(self.gpu, GPUS)}; describe another "
                "one with gpu_memory"
            )
        if self.num_engines > self.population_size:
            raise ConfigError(
                f"num_engines={self.num_engines} is more than population_size="
                f"{self.population_size}: some would have no genome"
            )


def main(config: PlanConfig) -> None:
    """Check the plan and print it."""
    say(f"reading the config.json of {config.model_name}")
    # torch, which the options do without.
    from es_cookbook.commands.prepare.plan_numbers import Plan, check, read_architecture, report

    plan = Plan(config, read_architecture(config.model_name))
    check(plan)
    print(report(plan))


cli = partial(run_cli, main, PlanConfig)
