"""Every causal LM class of transformers is right on the torch engine, or refused with a sentence.

Held against transformers itself, by other code than the engine's own check (`merged_models`).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.causal_lms import CAUSAL_LM_CLASSES, CONTEXT, VARIANTS, VOCABULARY, build
from benchmarks.merged_models import difference_from_merged
from benchmarks.model_families import PAGE, documented
from es_cookbook import LowRank, TorchEngineBuilder
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ModelError
from es_cookbook.engines.torch.self_check import TOLERANCE, right_path
from tests.families import sampled
from tests.tiny_models import character_tokenizer

REFUSED: Mapping[str, str] = {
    "MusicgenForCausalLM": "it does not take tokens of one vocabulary",
    "MusicgenMelodyForCausalLM": "it does not take tokens of one vocabulary",
}
DOCUMENTED = documented(PAGE.read_text(encoding="utf-8"))
TEXT = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*CAUSAL_LM_CLASSES, *VARIANTS], 12))
async def test_a_class_of_transformers_is_right_or_refused_as_the_page_says(name: str) -> None:
    model = build(name)
    said = DOCUMENTED[type(model).__name__]
    space = LowRank()(parameter_infos(model))
    try:
        path, size = right_path(model, space, CONTEXT)
    except ModelError as error:
        assert f"cannot run {type(model).__name__} " in str(error)
        assert REFUSED[name] in str(error)
        assert said == f"refused: {REFUSED[name]}"
        return
    assert name not in REFUSED
    assert said == str(path)
    options = TorchEngineBuilder(num_lanes=1, max_model_len=CONTEXT, max_batch_size=32)
    engine = options.around(model, character_tokenizer(VOCABULARY), space, path, size)
    try:
        assert await difference_from_merged(engine, model) <= TOLERANCE
    finally:
        await engine.close()


def test_excluding_weights_read_outside_of_their_layer_allows_mixed_batches() -> None:
    """By the patterns that the page names, to the paths that it names."""
    rows = re.findall(r"^\| (.*) \| `'(.*)'` \| (.*) \|$", TEXT, flags=re.MULTILINE)
    families = {"Mamba", "Falcon-Mamba", "Jamba", "LongCat-Flash"}
    assert {name for names, *_ in rows for name in names.split(", ")} == families
    for names, pattern, path in rows:
        for family in names.split(", "):
            name = f"{family.replace('-', '').replace('Cat', 'cat')}ForCausalLM"
            assert "one genome a batch" in DOCUMENTED[name]
            model = build(name)
            space = LowRank(exclude=(pattern,))(parameter_infos(model))
            assert str(right_path(model, space, CONTEXT)[0]) == path
