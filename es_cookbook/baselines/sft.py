"""Supervised fine-tuning of a LoRA adapter, with TRL: a start for ESSA and other adapter runs.

    python -m es_cookbook.baselines.sft model_name=Qwen/Qwen2.5-0.5B-Instruct data=rows.jsonl
    output=sft

The rows are JSON lines (or a Parquet file, or a Hub set) with the texts `prompt` and `completion`.
The model learns to complete the prompt and to stop afterwards: the loss is the completion's
cross-entropy alone. Prompts are used unchanged, so they must have the form in which the model will
see them later, chat template included. The output is a PEFT adapter:

    ... search_space=singular_values search_space.start=sft optimizer=cma
    ... search_space=adapter search_space.start=sft

Left out: packing, validation, checkpoints and the other options of TRL's `SFTTrainer`.
"""

from pathlib import Path

import chz

from es_cookbook.common.checks import check_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, nearest, not_installed
from es_cookbook.common.files import whole_directory
from es_cookbook.rl.data.rows import Row, load_rows


@chz.chz
class SFTConfig:
    """Fine-tune a LoRA adapter on prompts and completions."""

    model_name: str = chz.field(doc="Hugging Face model directory or Hub name")
    data: str = chz.field(doc=".jsonl or .parquet file, or Hub set, of prompt and completion")
    output: str = chz.field(doc="directory to write the PEFT adapter to; it must not exist")
    targets: tuple[str, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"), doc="last names of the adapted layers"
    )
    rank: int = chz.field(default=8, doc="of the adapter")
    alpha: int = chz.field(default=16, doc="the adapter is scaled by alpha / rank")
    learning_rate: float = chz.field(default=2e-4, doc="of AdamW; it decays linearly to 0")
    batch_size: int = chz.field(default=32, doc="rows per step")
    epochs: float = chz.field(default=1.0, doc="passes over the rows")
    max_length: int = chz.field(default=1024, doc="tokens of a row; longer rows are truncated")
    seed: int = chz.field(default=0, doc="of the adapter's first factors and the order of the rows")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "rank", "alpha", "batch_size", "max_length", at_least=1)
        check_range(self, "learning_rate", "epochs", above=0)
        if not self.targets:
            raise ConfigError("targets must name a layer, for example targets=q_proj,v_proj")


def main(config: SFTConfig) -> None:
    """Train, and write the adapter.

    Raises:
        ConfigError: The output is there already, TRL is missing, or the model has no such layers.
        DataError: There are no rows, or one lacks a text.
        ModelError: The model cannot be read.
    """
    output = Path(config.output)
    if output.exists():
        raise ConfigError(f"output {str(output)!r} is there already; give another one")
    rows = [
        {name: _text(row, name) for name in ("prompt", "completion")}
        for row in load_rows(config.data, option="data")
    ]
    if not rows:
        raise DataError(f"{config.data}: there are no rows")
    try:
        from peft import LoraConfig, get_peft_model
        from trl.trainer.sft_config import SFTConfig as TRLConfig
        from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as error:
        raise not_installed("fine-tuning", str(error.name), "es-cookbook[baselines]") from error
    import torch
    from datasets import Dataset

    from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer

    model = load_causal_lm(config.model_name, "float32", torch.device("cpu"))
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
    output.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(output) as directory:
        trainer = SFTTrainer(
            model=adapted,
            processing_class=load_tokenizer(config.model_name),
            train_dataset=Dataset.from_list(rows),
            args=TRLConfig(
                output_dir=str(directory),
                num_train_epochs=config.epochs,
                per_device_train_batch_size=config.batch_size,
                learning_rate=config.learning_rate,
                max_length=config.max_length,
                completion_only_loss=True,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                seed=config.seed,
                save_strategy="no",
                logging_steps=10,
                report_to="none",
            ),
        )
        trainer.train()
        adapted.save_pretrained(str(directory))
    print(f"written to {output}")


def _text(row: Row, name: str) -> str:
    text = row.optional_text(name)
    if text is None:
        raise row.error(f"field {name!r} is missing; rows need prompt and completion")
    return text


def cli() -> None:
    """The console entry point."""
    run_cli(main, SFTConfig)


if __name__ == "__main__":
    cli()
