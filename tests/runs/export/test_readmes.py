"""The lines in an export's README.md run as they stand, from another folder, and answer as it does.

Each form of an export, of a run that began from a directory, a GGUF file, another run or a
quantised base of each format. Where llama.cpp is not installed, what it checks of files is checked
in its place.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
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
from es_cookbook.plugins.gguf.form import GGUF
from es_cookbook.plugins.quantised.spaces import QuantScales
from tests.gguf_models import make_gguf_model
from tests.plugins.quantised.test_layers import ALL
from tests.programs import Programs
from tests.quantised_models import ByLibrary, How, quantise
from tests.runs.recorded_run import record_run

PROMPT = "1 + 1 ="
ADAPTER = Adapter(rank=2, alpha=6.0, init="orthogonal")
SPACES: Mapping[str, SearchSpaceBuilder] = {
    "own": LowRank(),
    "head": LowRank(include=("lm_head.weight",)),
    "adapter": ADAPTER,
    "scales": QuantScales(),
}
"""Space of a run -> what it is."""
_FILE: Mapping[str, Any] = {"form": GGUF(matrices="float16")}
FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "whole": ("own", {}),
    "fitted": ("own", {"rank": 8}),
    "adapter": ("adapter", {}),
    "merged": ("adapter", {"merge": True}),
    "quantised": ("scales", {}),
    "dequantised": ("scales", {"merge": True}),
    "whole file": ("own", _FILE),
    "adapter file": ("adapter", _FILE),
    "dequantised file": ("scales", _FILE),
}
"""Form of an export -> space of its run, and options."""
WHOLE = {"own": "whole", "head": "whole", "adapter": "merged", "scales": "quantised"}
"""Space of a run -> the form that has its centre's own bits."""
_LLAMA, _BOTH = {"llama.cpp"}, {"PEFT", "transformers"}
PROGRAMS = {
    form: _LLAMA if "file" in form else _BOTH if form in ("adapter", "fitted") else {"transformers"}
    for form in FORMS
}
"""Form -> what its README.md loads it with, beside vLLM."""


def name_of(how: How | ByLibrary) -> str:
    """Its format, and of fp8 what shares a scale."""
    if how.format == "fp8":
        return "fp8 by block" if isinstance(how, How) and how.group else "fp8 by tensor"
    return "pack-quantized" if how.format == "compressed-tensors" else how.format


QUANTISED = {name_of(how): dataclasses.replace(how, dtype=torch.float32) for how in reversed(ALL)}
"""Name of a quantised base -> how it is made: the first of `ALL` in each format."""
FLOATS = {
    name
    for name, how in QUANTISED.items()
    if name.startswith("fp8") or (isinstance(how, ByLibrary) and how.weights["type"] == "float")
}
"""Those whose own numbers no run moves."""
ALIKE = ("gptq_v2", "naive-quantized")
"""Those that are read otherwise than one of the others, and then written as that is."""
BASES = ("directory", "file", "run", *QUANTISED)
_WITH_BASE = ("adapter", "fitted")


def has(base: str, form: str) -> bool:
    """Whether there are such runs, and whether the base makes a difference."""
    if base == "run":
        return form in _WITH_BASE
    if base in ALIKE:
        return form == "adapter"
    return FORMS[form][0] != "scales" or (base in QUANTISED and base not in FLOATS)


CASES = [
    pytest.param(base, form, marks=pytest.mark.xdist_group(f"exports of {base}"))
    for base in BASES
    for form in FORMS
    if has(base, form)
]
SEVERAL = """\
import contextlib, io, json, runpy, sys, torch, traceback
torch.set_num_threads(1)
said = {}
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except Exception:
            traceback.print_exc(file=out)
    said[path] = out.getvalue()
print(json.dumps(said))
"""
"""Runs scripts one after the other, as starting Python takes longer than each of them."""


class Exports:
    """Bases of each kind, runs on them, and what the lines of their exports print."""

    def __init__(self, path: Path, programs: Programs) -> None:
        self.path, self.programs = path, programs
        self.plain = make_gguf_model("llama", path / "directory")
        self.untied = make_gguf_model("llama 3", path / "untied")
        self.answers = functools.cache(self._answers)
        self.expected = functools.cache(self._expected)
        self.base = functools.cache(self._base)

    def _base(self, base: str) -> Path:
        path = self.path / base
        if base == "file":
            path = self.path / "base.gguf"
            write_gguf(self.plain, path, "bfloat16", str(self.plain))
        elif base == "run":
            record_run(path, self.plain, LowRank())
        elif base in QUANTISED:
            quantise(self.untied, path, self.path / f"{base} in numbers", QUANTISED[base])
        return path

    def run(self, base: str, space: str) -> Path:
        """A run directory, made once."""
        run = self.path / f"{space} on {base}"
        if not run.exists():
            record_run(run, self.base(base), SPACES[space], dtype="float32")
        return run

    def export(self, base: str, form: str, name: str = "out") -> Path:
        """An export, in a folder with a space in its name, made once."""
        space, options = FORMS[form]
        space = "head" if space == "own" and base.split(" in ")[0] in QUANTISED else space
        output = self.path / f"{name} {base} {form}"
        if not output.exists():
            run = self.run(base, space)
            export(ExportConfig(log_path=str(run), output=str(output), **options))
        return output

    def _answers(self, base: str) -> Mapping[tuple[str, str], str]:
        """Form and program -> what the Python lines print."""
        elsewhere = self.path / f"elsewhere, {base}"
        elsewhere.mkdir()
        scripts: dict[tuple[str, str], str] = {}
        for form in (form for form in FORMS if has(base, form)):
            for program, language, text in blocks(self.export(base, form)):
                if language == "python" and not program.startswith("vLLM"):
                    script = elsewhere / f"{len(scripts)}.py"
                    script.write_text(text)
                    scripts[form, program] = str(script)
        (elsewhere / "several").write_text(SEVERAL)
        done = self.programs.run(elsewhere / "several", *scripts.values(), cwd=elsewhere)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        return {case: said[script] for case, script in scripts.items()}

    def _expected(self, base: str, space: str) -> Any:
        """The centre as transformers loads it; over numbers that the tests dequantised."""
        if base in QUANTISED and space != "scales":
            self.base(base)
            base = f"{base} in numbers"
        whole = self.export(base, WHOLE[space], "expected")
        return load_causal_lm(str(whole), "auto", torch.device("cpu"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Iterator[Exports]:
    with pytest.MonkeyPatch.context() as patched:
        path = tmp_path_factory.mktemp("exports")
        patched.setenv(CACHE, str(path / "cache"))
        yield Exports(path, programs)


def blocks(export: Path) -> list[tuple[str, str, str]]:
    """What an export's README.md says how to load it: program, language and lines."""
    card = (export / "README.md").read_text()
    part = card.split("## How to load it")[1].split("\n## ")[0]
    return re.findall(r"^([^\n]+):\n\n```(python|bash)\n(.*?)\n```$", part, re.M | re.S)


LLAMA_CLI = f"""\
#!{sys.executable}
import argparse, gguf
words = argparse.ArgumentParser()
for name in ("model", "prompt", "predict"):
    words.add_argument(f"--{{name}}")
given = words.parse_args()
model = gguf.GGUFReader(given.model)
weights = {{tensor.name: tensor.shape.tolist() for tensor in model.tensors}}
print(len(weights), given.prompt)
"""
"""Reads what `llama-cli` is given, and refuses what llama.cpp's loader refuses of shapes."""


@pytest.fixture(scope="module")
def llama_cli(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PATH."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "llama-cli").write_text(LLAMA_CLI)
    (folder / "llama-cli").chmod(0o700)
    return str(folder)


def greedy(model: torch.nn.Module, tokenizer: Any) -> str:
    """16 tokens after the prompt, and the prompt."""
    found: Any = model
    tokens = tokenizer(PROMPT, return_tensors="pt")
    return tokenizer.decode(found.generate(**tokens, do_sample=False, max_new_tokens=16)[0])


@pytest.mark.parametrize(("base", "form"), CASES)
def test_the_lines_of_a_readme_run_as_they_stand(
    base: str, form: str, exports: Exports, tmp_path: Path, llama_cli: str
) -> None:
    export, expected = exports.export(base, form), exports.expected(base, FORMS[form][0])
    loaded = blocks(export)
    assert {program.partition(",")[0] for program, _, _ in loaded} - {"vLLM"} == PROGRAMS[form]
    if "file" in form:
        ((_, _, command),) = loaded
        environment = {"PATH": os.pathsep.join((llama_cli, os.environ["PATH"]))}
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True)
        if base in QUANTISED:
            found = load_causal_lm(str(export), "float32", torch.device("cpu"))
            weights = dict(found.named_parameters())
            for name, weight in expected.named_parameters():
                torch.testing.assert_close(weights[name], weight, rtol=2**-7, atol=2e-3)
        return
    answer = greedy(expected, AutoTokenizer.from_pretrained(expected.name_or_path))
    answers = {p: said for (f, p), said in exports.answers(base).items() if f == form}
    for program, said in answers.items():
        if "gptqmodel" in program and importlib.util.find_spec("gptqmodel") is None:
            assert re.search("ImportError: Loading an? .* requires (optimum|gptqmodel)", said)
        elif form == "quantised" and base == "int-quantized":
            assert said.startswith(PROMPT)  # Its activations are rounded, as the README.md says.
        else:
            assert said == answer + "\n", program
