"""Every causal LM class of transformers on the torch engine: the table of docs/models.md.

    python -m benchmarks.model_families

Each class is built as a tiny random model (`benchmarks.causal_lms`). What is found out:

- the path that the engine takes, or why it refuses the model;
- the share of the parameters that low-rank genomes perturb, at the sizes that are the class's own
  default, and what larger parts they leave out;
- how far the log-probabilities of base, centre and genomes are from those of merged weights
  (`benchmarks.merged_models`);
- what the installed vLLM knows of the class, without starting it;
- whether a run's exports answer as its centre: the model directory in transformers, and an adapter
  in PEFT, as it is or merged.

Classes that are alike are a row of the table.
"""

import asyncio
import dataclasses
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from benchmarks.causal_lms import CAUSAL_LM_CLASSES, CONTEXT, UNBUILDABLE, VOCABULARY, build
from benchmarks.harness import report, row
from benchmarks.merged_models import difference_from_merged
from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import load_causal_lm, parameter_infos
from es_cookbook.common.errors import ModelError
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.self_check import TOLERANCE, right_path
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from tests.runs.recorded_run import record_run
from tests.tiny_models import character_tokenizer

PAGE = Path(__file__).parent / "results/model_families.md"
TABLE, COUNTS = "<!-- table -->", "<!-- counts -->"
"""Each stands before and, with a slash, after what is written here."""
STEPS = (Step((Term(1, 0.02), Term(2, -0.03))),)
LEAST_SHARE = 0.01
"""Share of a model's parameters below which a part is not mentioned."""
LEAST_PARAMETERS = 50_000_000
"""Default sizes below are a placeholder's, such as BLOOM's."""
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Family:
    """Findings on a class.

    Attributes:
        path: description of the path; begins with "refused" or "not tried" if there is none.
        share: share of parameters perturbed by low-rank genomes, at default sizes, if any.
        experts: whether experts are among them.
        left_out: larger parts that are not, excluding embeddings.
        difference: greatest of a log-probability.
    """

    name: str
    path: str
    share: float | None = None
    experts: bool = False
    left_out: str = ""
    difference: float | None = None
    vllm: str = "-"
    export: str = "-"


async def examine(name: str) -> Family:
    """Examine a class, except for what vLLM knows."""
    model = build(name)
    space = LowRank()(parameter_infos(model))
    try:
        path, size = right_path(model, space, CONTEXT)
    except ModelError as error:
        (why,) = re.findall(r"as transformers does: (.*); accepted", str(error))
        return Family(name, f"refused: {why}")
    options = TorchEngineBuilder(num_lanes=2, max_model_len=CONTEXT, max_batch_size=64)
    engine = options.around(model, character_tokenizer(VOCABULARY), space, path, size)
    try:
        difference = await difference_from_merged(engine, model)
    finally:
        await engine.close()
    model = build(name)
    default = default_model(type(model))
    return Family(
        name,
        str(path),
        share(default),
        any(weight.endswith("]") for weight in space.shapes),
        left_out(default or model),
        difference,
        export=exported(model),
    )


def default_model(kind: type[PreTrainedModel]) -> PreTrainedModel | None:
    """Return a class at its default sizes, without memory; None if these are not a model's."""
    try:
        with torch.device("meta"):
            model = kind(cast("type[PreTrainedConfig]", kind.config_class)())
    except Exception:  # of any kind: a default config need not be a model's
        return None
    return model if sum(p.numel() for p in model.parameters()) >= LEAST_PARAMETERS else None


def share(model: PreTrainedModel | None) -> float | None:
    """Return the share of its parameters that low-rank genomes perturb."""
    if model is None:
        return None
    sizes = [math.prod(i.shape) for i in parameter_infos(model) if i.kind == "linear"]
    return sum(sizes) / sum(parameter.numel() for parameter in model.parameters())


def left_out(model: PreTrainedModel) -> str:
    """Return modules with unperturbed matrices, excluding embeddings, routers and convolutions."""
    names = {
        info.name.partition("[")[0] for info in parameter_infos(model) if info.kind == "linear"
    }
    known = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        known_kind = isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d)
        if known_kind or "Router" in type(module).__name__:
            known |= {id(parameter) for parameter in module.parameters(recurse=False)}
    sizes: defaultdict[str, int] = defaultdict(int)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known and parameter.dim() > 1:
                kind = "experts" if "Expert" in type(module).__name__ else f"`{name}`"
                sizes[kind] += parameter.numel()
    return ", ".join(kind for kind, size in sizes.items() if size >= LEAST_SHARE * total)


@torch.no_grad()
def exported(model: PreTrainedModel) -> str:
    """Return the exports of a run on this model that answer as its centre."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory() as directory:
        base, run = Path(directory) / "model", Path(directory) / "run"
        save(model, base)
        recorded = record_run(run, base, LowRank(), STEPS)
        for name, weight in named_weights(model):
            if name in recorded.weights[-1]:
                weight.copy_(recorded.weights[-1][name])
        replay, found = open_replay(run), list[str]()
        write_export(replay, Path(directory) / "whole")
        if same(load_causal_lm(f"{directory}/whole", "auto", CPU), model):
            found.append("directory")
        write_export(replay, Path(directory) / "adapter", rank=len(STEPS[0].terms))
        try:
            adapted = PeftModel.from_pretrained(
                load_causal_lm(str(base), "auto", CPU), f"{directory}/adapter"
            )
        except (ValueError, RuntimeError):  # PEFT does not take it
            return ", ".join(found)
        if same(adapted.eval(), model):
            found.append("adapter")
        elif same(cast("PreTrainedModel", adapted.merge_and_unload()), model):
            found.append("adapter if merged")
        return ", ".join(found)


def save(model: PreTrainedModel, path: Path) -> None:
    """Save a checkpoint; for a part of another class, with the config of the whole."""
    model.save_pretrained(path)
    character_tokenizer(VOCABULARY).save_pretrained(path)
    own, wholes = type(model.config), list(MODEL_FOR_CAUSAL_LM_MAPPING)
    if own not in wholes:
        (whole,) = (w for w in wholes if w.sub_configs.get("text_config") is own)
        make = cast("Callable[..., PreTrainedConfig]", whole)
        make(text_config=model.config.to_dict()).save_pretrained(path)


def same(found: nn.Module, expected: nn.Module) -> bool:
    """Return whether two models give the same log-probabilities for a few tokens."""
    tokens = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    a, b = (m(input_ids=tokens).logits.log_softmax(-1) for m in (found, expected))
    return float((a - b).abs().max()) <= TOLERANCE


def known_to_vllm(families: Iterable[Family]) -> list[Family]:
    """Return the families, with what the installed vLLM's registry says of each class."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    import_module("es_cookbook.engines.vllm.worker")  # adds LoRA to a class of vLLM

    def says(family: Family) -> str:
        if family.name not in ModelRegistry.get_supported_archs():
            return "-"
        try:
            kind = ModelRegistry.models[family.name].load_model_cls()
        except ModuleNotFoundError as error:
            return f"needs {error.name or 'another package'}"
        if ".nvidia." in kind.__module__:
            return "-"
        if not supports_lora(kind):
            return "dense"
        return "low rank, not of experts" if family.experts else "low rank"

    return [dataclasses.replace(family, vllm=says(family)) for family in families]


def documented(page: str) -> dict[str, str]:
    """Return class -> path in words, as the page's table has it."""
    table = page.partition(TABLE)[2].partition(_end(TABLE))[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {name: path for names, path, *_ in cells[2:] for name in names.split(", ")}


def counts(paths: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the numbers of classes that are right, refused and not tried."""
    refused = sum(path.startswith("refused") for path in paths.values())
    not_tried = sum(path.startswith("not tried") for path in paths.values())
    return len(paths) - refused - not_tried, refused, not_tried


def said_of(paths: Mapping[str, str]) -> str:
    """Return the counts as text for the page."""
    right, refused, not_tried = counts(paths)
    return (
        f"Of the {len(paths)} causal language model classes of transformers, {right} are right, "
        f"{refused} are refused,\nand {not_tried} are not tried."
    )


def table_of(families: Iterable[Family]) -> str:
    """Return a Markdown table with one row for all classes that are alike."""
    groups: defaultdict[tuple[str, ...], list[Family]] = defaultdict(list)
    for f in families:
        perturbed = "experts too" * f.experts
        not_perturbed = f"not: {f.left_out}" if f.left_out else ""
        noted = ", ".join(filter(None, (perturbed, not_perturbed)))
        groups[f.path, noted, f.vllm, f.export].append(f)
    order = ["flat", "own", "not tried", "refused"]
    lines = [
        "| classes | path | low rank perturbs | off by | vLLM | exports |",
        "|---|---|---|---|---|---|",
    ]
    for (path, noted, vllm, export), alike in sorted(
        groups.items(), key=lambda item: (order.index(re.split("[,:]", item[0][0])[0]), item[0])
    ):
        found = [100 * f.share for f in alike if f.share is not None]
        perturbs = ""
        if found:
            low, high = (f"{percent:.0f}" for percent in (min(found), max(found)))
            perturbs = f"{low} %" if low == high else f"{low} to {high} %"
        perturbs = ", ".join(filter(None, (perturbs, noted))) or "-"
        differences = [f.difference for f in alike if f.difference is not None]
        off = f"{max(differences):.0e}".replace("e-0", "e-") if differences else "-"
        names = ", ".join(f.name for f in alike)
        lines.append(f"| {names} | {path} | {perturbs} | {off} | {vllm} | {export} |")
    return "\n".join(lines)


def rewrite(page: str, families: Iterable[Family]) -> str:
    """Return the page with this table and its counts."""
    table = table_of(families)
    page = _replace(page, TABLE, f"\n\n{table}\n\n")
    return _replace(page, COUNTS, f"\n{said_of(documented(page))}\n")


def _replace(page: str, mark: str, text: str) -> str:
    before, _, rest = page.partition(mark)
    return f"{before}{mark}{text}{_end(mark)}{rest.partition(_end(mark))[2]}"


def _end(mark: str) -> str:
    return mark.replace("<!-- ", "<!-- /")


def main() -> None:
    """Examine all, report, and write the table."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny
    found: list[Family] = []
    for name in CAUSAL_LM_CLASSES:
        found.append(asyncio.run(examine(name)))
        print(found[-1], flush=True)
    found = known_to_vllm(found)
    found += [Family(name, f"not tried: {why}") for name, why in UNBUILDABLE.items()]
    right, refused, not_tried = counts({family.name: family.path for family in found})
    differences = [family.difference for family in found if family.difference is not None]
    wrong = sum(not difference <= TOLERANCE for difference in differences)

    def number(word: str) -> list[float]:
        return [sum(word in f.export.split(", ") for f in found)]

    report(
        "model_families",
        [
            row("classes", [len(found)], f"in transformers {transformers.__version__}"),
            row("right", [right - wrong], "classes"),
            row("silently wrong", [wrong], "classes", at_most=0),
            row("refused with a sentence", [refused], "classes"),
            row("not tried, because they cannot be built small", [not_tried], "classes"),
            row(
                "right, of those that can be built small",
                [100 * (right - wrong) / (right + refused)],
                "%",
                at_least=90,
            ),
            row("on the flat path", [sum(f.path == "flat" for f in found)], "classes"),
            row(
                "greatest difference of a log-probability from merged weights",
                [max(differences)],
                "",
                at_most=TOLERANCE,
            ),
            row("exported model directories that answer as the centre", number("directory"), ""),
            row("exported adapters that do so in PEFT", number("adapter"), ""),
            row("that do so once merged", number("adapter if merged"), ""),
        ],
    )
    PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
