"""The code in an export's README.md runs as it stands, and answers as the centre does.

Exports of runs that began from a directory, a GGUF file, another run or a quantised base.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.quantised.spaces import QuantScales
from tests.gguf_models import make_gguf_model
from tests.programs import Programs
from tests.quantised_models import How, quantise
from tests.runs.recorded_run import record_run

PROMPT = "1 + 1 ="
ADAPTER = Adapter(rank=2, alpha=6.0, init="orthogonal")
FORMS: Mapping[str, tuple[SearchSpaceBuilder, Mapping[str, Any], str]] = {
    "whole": (LowRank(), {}, "transformers"),
    "fitted": (LowRank(), {"rank": 8}, "PEFT"),
    "adapter": (ADAPTER, {}, "PEFT"),
    "merged": (ADAPTER, {"merge": True}, "transformers"),
    "dequantised": (QuantScales(), {"merge": True}, "transformers"),
}
"""Form of an export -> space of its run, options, and the library that loads it beside vLLM."""
CASES = {
    "directory": ("whole", "fitted", "adapter", "merged"),
    "file": ("adapter",),
    "run": ("fitted",),
    "quantised": ("adapter", "merged", "dequantised"),
}
"""Base of a run -> forms of its exports."""
SEVERAL = """\
import contextlib, io, json, runpy, sys, torch
torch.set_num_threads(1)
said = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    said[path] = out.getvalue()
print(json.dumps(said))
"""
"""Runs scripts one after the other, as starting Python takes longer than each of them."""


class Exports:
    """Exports of runs on each base, and the answers that the code in their README.md prints."""

    def __init__(self, path: Path, programs: Programs) -> None:
        self.path, self.programs = path, programs
        self.plain = make_gguf_model("llama", path / "directory")
        self.export = functools.cache(self._export)
        self.answers = functools.cache(self._answers)

    @functools.cached_property
    def bases(self) -> Mapping[str, Path]:
        file, run, quantised = (self.path / name for name in ("base.gguf", "run", "quantised"))
        write_gguf(self.plain, file, "bfloat16", str(self.plain))
        record_run(run, self.plain, LowRank())
        how = How("compressed-tensors", symmetric=False, dtype=torch.float32)
        untied = make_gguf_model("llama 3", self.path / "untied")
        quantise(untied, quantised, self.path / "in numbers", how)
        return {"directory": self.plain, "file": file, "run": run, "quantised": quantised}

    def _export(self, base: str, form: str) -> Path:
        """An export, in a folder with a space in its name."""
        space, options, _ = FORMS[form]
        run = self.path / f"{type(space).__name__} on {base}"
        if not run.exists():
            record_run(run, self.bases[base], space, dtype="float32")
        output = self.path / f"{form} of {base}"
        export(ExportConfig(log_path=str(run), output=str(output), **options))
        return output

    def _answers(self) -> Mapping[str, str]:
        """Path of a script in an export -> what it prints."""
        scripts: list[Path] = []
        for base, forms in CASES.items():
            for form in forms:
                code = dict(blocks(self.export(base, form)))[FORMS[form][2]]
                scripts.append(self.export(base, form) / "load.py")
                scripts[-1].write_text(code)
        (self.path / "several").write_text(SEVERAL)
        done = self.programs.run(self.path / "several", *scripts, cwd=self.path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Iterator[Exports]:
    with pytest.MonkeyPatch.context() as patched:
        path = tmp_path_factory.mktemp("exports")
        patched.setenv(CACHE, str(path / "cache"))
        yield Exports(path, programs)


def blocks(export: Path) -> list[tuple[str, str]]:
    """Libraries and code in the README.md of an export."""
    part = (export / "README.md").read_text().split("## How to load it")[1].split("\n## ")[0]
    return re.findall(r"^([^\n]+):\n\n```python\n(.*?)\n```$", part, re.M | re.S)


@pytest.mark.xdist_group("exports")
@pytest.mark.parametrize(
    ("base", "form"), [(base, form) for base, forms in CASES.items() for form in forms]
)
def test_the_code_of_a_readme_answers_as_the_centre(base: str, form: str, exports: Exports) -> None:
    export = exports.export(base, form)
    assert {name for name, _ in blocks(export)} == {FORMS[form][2], "vLLM"}
    whole = {"fitted": "whole", "adapter": "merged"}.get(form, form)
    expected: Any = load_causal_lm(str(exports.export(base, whole)), "auto", torch.device("cpu"))
    tokenizer: Any = AutoTokenizer.from_pretrained(expected.name_or_path)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    answer = expected.generate(**tokens, do_sample=False, max_new_tokens=16)[0]
    assert exports.answers()[str(export / "load.py")] == tokenizer.decode(answer) + "\n"
