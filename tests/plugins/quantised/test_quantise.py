"""The command that writes a model in 4 or 8 bits: what it says, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors", reason="it comes with vLLM, and with es-cookbook[dev]")

from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.said import typed


def test_it_says_what_it_left(tmp_path: Path) -> None:
    output = tmp_path / "new" / "copy"
    said = typed("quantise", f"model_name={BUNDLED_MODEL}", f"output={output}", "group_size=128")
    left, done = said.stdout.splitlines()
    assert left.startswith("not quantised (group_size=128 does not divide 448 inputs): model.")
    assert left.endswith("model.layers.2.mlp.down_proj and 1 more")
    assert done == f"24 layers quantised, 3.4 MiB -> 789.7 KiB: {output}"
    assert said.stderr == f"rounding {BUNDLED_MODEL} to 4 bits\n", "no bars"
    how = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (how["quant_method"], how["format"]) == ("compressed-tensors", "pack-quantized")
    again = typed("quantise", f"model_name={output}", f"output={tmp_path / 'again'}")
    assert again.stderr.endswith("is quantised already; give the whole model\n")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("output={here}", "is there already; give another one"),
        ("model_name={here}/nowhere", "/nowhere"),
        ("group_size=100", "no layer of the model can be quantised: group_size=100 does not"),
        ("group_size=0", "group_size must be at least 2, found 0"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(tmp_path: Path, option: str, said: str) -> None:
    given = (f"model_name={BUNDLED_MODEL}", f"output={tmp_path / 'copy'}")
    done = typed("quantise", *given, option.format(here=tmp_path))
    *others, error = done.stderr.splitlines()
    assert done.returncode and said in error and all(each.startswith("rounding") for each in others)


def test_the_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    done = typed("quantise", f"model_name={BUNDLED_MODEL}", f"output={tmp_path / 'copy'}")
    assert "pip install 'es-cookbook[quantise]'" in done.stderr
