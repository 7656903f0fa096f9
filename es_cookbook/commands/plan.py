"""What a run needs, before anybody pays for GPUs: memory, tokens, time and bytes.

    python -m es_cookbook plan model_name=Qwen/Qwen2.5-7B-Instruct num_engines=8 engine=vllm
    python -m es_cookbook plan --help

The model's config.json is all that is read of it, and no GPU is needed. Options that are not given
are those of the main job (`es_cookbook.recipes.countdown.train_cli`), and `engine.*` and
`search_space.*` are the same options as there. Formulas, and what they leave out, are in
`plan_formulas`; docs/multi_gpu.md is the guide.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import chz
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from es_cookbook.checkpoints.models import load_architecture
from es_cookbook.commands.plan_formulas import Plan
from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import Names
from es_cookbook.common.errors import ConfigError, ModelError, nearest
from es_cookbook.engines.base import ENGINE_NAMES, EngineBuilder
from es_cookbook.engines.torch.population_layers import no_attention_hook
from es_cookbook.engines.vllm.memory import GIB, show_bytes
from es_cookbook.evolution.spaces.base import SEARCH_SPACE_NAMES, SearchSpaceBuilder

_ENGINES = Names({name: ENGINE_NAMES[name] for name in ("torch", "vllm")}, default="torch")
_SEARCH_SPACES = Names(
    {name: SEARCH_SPACE_NAMES[name] for name in ("low_rank", "full_rank")}, default="low_rank"
)
_NOT_COUNTED = ("num_experts", "num_local_experts", "kv_lora_rank", "quantization_config")


@dataclasses.dataclass(frozen=True)
class GPU:
    """What a data sheet says.

    Attributes:
        memory: GB (10⁹ bytes).
        tflops_16: TFLOP/s of 16-bit matmuls, without sparsity, and `tflops_32` of plain float32.
        bandwidth: GB/s of its memory.
    """

    memory: float
    tflops_16: float
    tflops_32: float
    bandwidth: float

    def tflops(self, size: int) -> float:
        """TFLOP/s of numbers of this many bytes."""
        return self.tflops_32 if size == 4 else self.tflops_16


GPUS = {
    "a10": GPU(24, 125, 31.2, 600),
    "a100-40gb": GPU(40, 312, 19.5, 1555),
    "a100-80gb": GPU(80, 312, 19.5, 2039),
    "b200": GPU(180, 2250, 75, 7700),
    "h100": GPU(80, 989, 67, 3350),
    "h200": GPU(141, 989, 67, 4800),
    "l4": GPU(24, 121, 30.3, 300),
    "l40s": GPU(48, 362, 91.6, 864),
    "rtx-4090": GPU(24, 165, 82.6, 1008),
}
"""NVIDIA's data sheets; the SXM kind where there are several."""


@chz.chz
class PlanConfig:
    """Print what a run needs of its GPUs: memory, tokens, least time, bytes sent and kept."""

    model_name: str = chz.field(doc="model directory (config.json is enough) or Hub name")
    num_engines: int = chz.field(default=1, doc="engines that share the population")
    engine: EngineBuilder = chz.field(
        meta_factory=_ENGINES, default_factory=_ENGINES.build_default, doc="what each of them is"
    )
    search_space: SearchSpaceBuilder = chz.field(
        meta_factory=_SEARCH_SPACES,
        default_factory=_SEARCH_SPACES.build_default,
        doc="which parameters genomes perturb, and how",
    )
    population_size: int = chz.field(default=64, doc="genomes a generation, in mirrored pairs")
    problems_per_generation: int = chz.field(default=32, doc="problems that each genome attempts")
    attempts: int = chz.field(default=1, doc="rollouts of one genome at one problem")
    prompt_tokens: int = chz.field(default=12, doc="tokens of a prompt")
    sampled_tokens: int = chz.field(
        default=32, doc="tokens that a rollout samples; the most is sampling.max_tokens"
    )
    gpu: str = chz.field(default="h100", doc=f"its name in the table: {', '.join(GPUS)}")
    gpu_memory: float | None = chz.field(default=None, doc="its memory in GB, if not the table's")
    gpu_tflops: float | None = chz.field(
        default=None, doc="its TFLOP/s in the dtype that samples, if not the table's"
    )
    gpu_bandwidth: float | None = chz.field(
        default=None, doc="GB/s of its memory, if not the table's"
    )

    @chz.validate
    def _fields(self) -> None:
        fields = chz.chz_fields(self)
        numbers = [name for name in fields if isinstance(getattr(self, name), int | float)]
        check_range(self, *numbers, above=0)
        if self.gpu not in GPUS:
            raise ConfigError(
                f"gpu={self.gpu} is not in the table: {nearest(self.gpu, GPUS)}; describe another "
                "one with gpu_memory, gpu_tflops and gpu_bandwidth"
            )
        if self.num_engines > self.population_size:
            raise ConfigError(
                f"num_engines={self.num_engines} is more than population_size="
                f"{self.population_size}: some would have no genome"
            )

    def rollouts(self) -> int:
        """Population · problems · attempts."""
        return self.population_size * self.problems_per_generation * self.attempts

    def hardware(self, size: int) -> GPU:
        """The GPU, with what is given in place of what the table says."""
        known = GPUS[self.gpu]
        given = {
            "memory": self.gpu_memory,
            "tflops_32" if size == 4 else "tflops_16": self.gpu_tflops,
            "bandwidth": self.gpu_bandwidth,
        }
        return dataclasses.replace(known, **{k: v for k, v in given.items() if v is not None})


def read_architecture(model_name: str) -> PreTrainedModel:
    """The model on the meta device, which takes no memory; a directory needs no weights.

    Raises:
        ModelError: It cannot be read, or is of a kind that is not counted.
    """
    if (Path(model_name) / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(model_name)
            with torch.device("meta"):
                model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
        except Exception as error:  # transformers raises many kinds; to the user it is one mistake
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"model_name: cannot read {model_name!r}: {reason}") from error
    else:
        model = load_architecture(model_name)
    for field in _NOT_COUNTED:
        if getattr(model.config.get_text_config(), field, None):
            raise ModelError(
                f"model_name: {model_name!r} has {field} in its config.json; experts, compressed "
                "keys and quantised weights are not counted here"
            )
    return model


def prompt_tokens(config: PlanConfig) -> int:
    """Population · problems · attempts · tokens of a prompt, over all engines."""
    return config.rollouts() * config.prompt_tokens


def sampled_tokens(config: PlanConfig) -> int:
    """Population · problems · attempts · sampled tokens, over all engines."""
    return config.rollouts() * config.sampled_tokens


def genome_message_bytes(engines: int, genomes: int) -> int:
    """Engines · 4 + genomes · (4 + 8 + 8): counts of 32 bits, seed and coefficient of 64.

    The format is `wire`'s, little-endian; a genome has one term and goes to one engine.
    """
    return engines * 4 + genomes * 20


def step_message_bytes(engines: int, terms: int) -> int:
    """Engines · (8 + 8 + terms · (8 + 8)): lengths, decay, and seed and coefficient a term."""
    return engines * (16 + terms * 16)


def prompt_message_bytes(engines: int, problems: int, attempts: int, tokens: int) -> int:
    """At most engines · (300 + problems · (20 + attempts · 20 + tokens · 5)): pickled questions.

    A prompt goes to an engine once a block of genomes, whatever their number.
    """
    return engines * (300 + problems * (20 + attempts * 20 + tokens * 5))


def history_bytes(terms: int, genomes: int) -> int:
    """About 150 + terms · 39 + genomes · 20: hexadecimal seeds and shortest decimals, one line."""
    return 150 + terms * 39 + genomes * 20


def check(plan: Plan) -> None:
    """Refuse what no engine would start with.

    Raises:
        ModelError: The torch engine cannot run the model.
        ConfigError: What cannot be divided, is too long, or does not fit.
    """
    config = plan.config
    length = config.prompt_tokens + config.sampled_tokens
    if plan.vllm and plan.vllm.quantization:
        raise ConfigError("engine.quantization: quantised weights are not counted here; leave it")
    if plan.torch and not getattr(plan.model, "_supports_attention_backend", False):
        raise no_attention_hook(plan.model)
    if not _divides(plan, plan.tp):
        accepted = [str(tp) for tp in range(1, plan.heads + 1) if _divides(plan, tp)]
        raise ConfigError(
            f"engine.tensor_parallel_size={plan.tp} does not divide this model's {plan.heads} "
            f"attention heads, {plan.kv_heads} key and value heads and the sides of its weights; "
            f"accepted: {', '.join(accepted)}"
        )
    if length > plan.context:
        raise ConfigError(
            f"prompt_tokens + sampled_tokens = {length} is more than the engine's context of "
            f"{plan.context} tokens; lower them, or raise engine.max_model_len as far as the model "
            "goes"
        )
    engine = plan.torch or plan.vllm
    cache_gib = engine.kv_cache_gib if engine else None
    if cache_gib is not None and plan.context_bytes() > cache_gib * GIB:
        least = math.ceil(plan.context_bytes() / GIB * 1000) / 1000
        raise ConfigError(
            f"engine.kv_cache_gib={cache_gib} is too little for a context of {plan.context} "
            f"tokens; raise it to {least}, or lower engine.max_model_len: this plan needs {length}"
        )
    usable, missing = plan.usable_bytes(), plan.shortfall_bytes()
    if missing > 0:
        raise ConfigError(
            f"model_name: {config.model_name} does not fit: each GPU would need "
            f"{show_bytes(usable + missing)} and can give {show_bytes(usable)}, "
            f"{show_bytes(missing)} too little; what would do: "
            f"{', or '.join(_changes(plan)) or 'no one option alone'}"
        )


def _divides(plan: Plan, tp: int) -> bool:
    """As vLLM asks: key and value heads may be kept several times, all else is divided evenly."""
    sides = (side for info in plan.body for side in info.shape)
    kv_heads = plan.kv_heads % tp == 0 or tp % plan.kv_heads == 0
    return kv_heads and plan.heads % tp == 0 and all(side % tp == 0 for side in sides)


def _changes(plan: Plan) -> Iterator[str]:
    """Options that by themselves make it fit, the least of each kind."""
    config = plan.config

    def engine(name: str, value: object) -> tuple[str, PlanConfig]:
        changed = chz.replace(config.engine, **{name: value})
        return f"engine.{name}={value}", chz.replace(config, engine=changed)

    by_memory = sorted(GPUS, key=lambda name: GPUS[name].memory)
    kinds = [[(f"gpu={gpu}", chz.replace(config, gpu=gpu, gpu_memory=None)) for gpu in by_memory]]
    kinds.append([engine("max_model_len", config.prompt_tokens + config.sampled_tokens)])
    if plan.size == 4:
        kinds.append([engine("dtype", "bfloat16")])
    if plan.vllm:
        kinds.append([engine("max_genomes", plan.share())])
        sizes = [tp for tp in range(plan.tp + 1, plan.heads + 1) if _divides(plan, tp)]
        kinds.insert(0, [engine("tensor_parallel_size", tp) for tp in sizes])
    for kind in kinds:
        enough = (opt for opt, changed in kind if Plan(changed, plan.model).shortfall_bytes() <= 0)
        yield from itertools.islice(enough, 1)


def report(plan: Plan) -> str:
    """The page that is printed."""
    return "\n".join(itertools.chain(_title(plan), _memory(plan), _work(plan), _messages(plan)))


def _title(plan: Plan) -> Iterator[str]:
    config, gpu = plan.config, plan.gpu
    space = f"low rank, rank {plan.rank}" if plan.rank else "full rank"
    yield (
        f"{config.model_name}: {plan.parameters():,} parameters in {plan.dtype}, of which genomes "
        f"perturb {plan.perturbed_elements():,} ({space})"
    )
    yield (
        f"{_count(config.num_engines, 'engine')} ({'vllm' if plan.vllm else 'torch'}) with "
        f"{_count(plan.tp, 'GPU')} each: {config.gpu}, {gpu.memory:g} GB, "
        f"{gpu.tflops(plan.size):g} TFLOP/s, {gpu.bandwidth:,g} GB/s"
    )
    yield (
        f"{_count(config.population_size, 'genome')} x "
        f"{_count(config.problems_per_generation, 'problem')} x "
        f"{_count(config.attempts, 'attempt')}; an engine has {_count(plan.share(), 'genome')} and "
        f"{_count(plan.requests(), 'rollout')}"
    )


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.rank and plan.vllm:
        residents = "genomes: one at a time, in the weights' place"
    else:
        kind = "LoRA slots" if plan.vllm else "rows of tables" if plan.rank else "sets of weights"
        count = plan.resident_bytes() // plan.genome_bytes()
        rank = f" of rank {plan.slot_rank()}" if plan.vllm else ""
        residents = f"genomes: {count:,} {kind}{rank}, {show_bytes(plan.genome_bytes())} each"
    total = int(plan.gpu.memory * 1e9)
    slots = plan.slots() if plan.torch else plan.rows()
    yield from _section("Memory of each GPU")
    whose = ", the base's and the centre's" if plan.torch else ""
    yield _line(f"weights{whose}", show_bytes(plan.weight_bytes()))
    yield _line("centre, float32", show_bytes(plan.centre_bytes()))
    yield _line(residents, show_bytes(plan.resident_bytes()))
    if plan.gathered_bytes():
        yield _line("copies of these rows for a batch", show_bytes(plan.gathered_bytes()))
    yield _line("work space, an estimate", show_bytes(plan.work_bytes()))
    yield _line(
        f"keys and values of {slots:,} requests of {plan.request_tokens():,} tokens, "
        f"{show_bytes(plan.kv_bytes())} a token",
        show_bytes(plan.cache_bytes()),
    )
    what = ", and what engine.gpu_memory_utilization leaves" if plan.vllm else ""
    yield _line(f"CUDA and temporaries{what}", show_bytes(total - plan.usable_bytes()))
    whose = ", which vLLM adds to the cache" if plan.vllm and not plan.vllm.kv_cache_gib else ""
    yield _line(f"remains{whose}", show_bytes(plan.remaining_bytes()))
    yield _line("all of it", show_bytes(total))
    if plan.vllm:
        yield from _section("Memory of an engine's machine")
        yield _line(f"base copy, {plan.dtype}", show_bytes(plan.base_copy_bytes()))


def _work(plan: Plan) -> Iterator[str]:
    config = plan.config
    prefill, prefill_bound = plan.seconds(plan.prefill_flops(), plan.prefill_traffic())
    decode, decode_bound = plan.seconds(plan.decode_flops(), plan.decode_traffic())
    load, step = plan.load_seconds(), plan.step_seconds()
    yield from _section("Tokens of a generation, all engines")
    yield _line("prompts", f"{prompt_tokens(config):,}")
    yield _line("sampled", f"{sampled_tokens(config):,}")
    yield from _section("Least time of a generation: nothing reaches data-sheet speed")
    yield _line(f"load {_count(plan.share(), 'genome')}", _seconds(load))
    yield _line(f"prefill, bound by {prefill_bound}", _seconds(prefill))
    yield _line(
        f"decode, bound by {decode_bound}: {_count(plan.decode_steps(), 'step')} of "
        f"{_count(plan.rows(), 'request')}",
        _seconds(decode),
    )
    yield _line("move the centre", _seconds(step))
    yield _line("together", _seconds(load + prefill + decode + step))


def _messages(plan: Plan) -> Iterator[str]:
    config, terms = plan.config, plan.terms()
    engines, problems = config.num_engines, config.problems_per_generation
    prompts = prompt_message_bytes(engines, problems, config.attempts, config.prompt_tokens)
    genomes = genome_message_bytes(engines, config.population_size)
    yield from _section("Bytes of a generation, all engines")
    yield _line("sent through Ray: genomes, a seed and coefficient each", show_bytes(genomes))
    yield _line(
        f"sent through Ray: the step, {terms:,} of the same to every engine",
        show_bytes(step_message_bytes(engines, terms)),
    )
    yield _line("sent through Ray: prompts, at most", show_bytes(plan.blocks() * prompts))
    kept = history_bytes(terms, config.population_size)
    yield _line("kept: the history's line, about", show_bytes(kept))
    yield from _section("Genomes on an engine at once")
    yield _line("in this plan", f"{plan.resident():,}")
    yield _line("that would fit beside the same requests in flight", f"{plan.genomes_that_fit():,}")


def _section(title: str) -> tuple[str, str]:
    return "", title


def _line(label: str, value: str) -> str:
    return f"  {label:<72}{value:>14}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    """27 s, 3.2 s, 20 ms."""
    value, unit = (seconds, "s") if seconds >= 0.1 else (1000 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def main(config: PlanConfig) -> None:
    """Check the plan and print it."""
    plan = Plan(config, read_architecture(config.model_name))
    check(plan)
    print(report(plan))


def cli() -> None:
    """The console entry point."""
    run_cli(main, PlanConfig)
