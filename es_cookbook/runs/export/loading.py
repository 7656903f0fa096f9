"""Code and commands that load an export, for its README.md; they run as they stand.

Each names the place of the export in full, so it works from any folder, and generates one answer.
"""

import dataclasses
import json
from pathlib import Path

from es_cookbook.engines.vllm.ranks import slot_rank

_GREEDY = "do_sample=False, max_new_tokens=16"
_ANSWER = f"""\
tokens = model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), {_GREEDY})
print(tokenizer.decode(tokens[0]))"""
_MODEL = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {{path}}
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
{_ANSWER}"""
_ADAPTER = f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {{base}}
adapter = {{path}}
model = AutoModelForCausalLM.from_pretrained(base, dtype="{{dtype}}")
model = PeftModel.from_pretrained(model, adapter)
tokenizer = AutoTokenizer.from_pretrained(base)
{_ANSWER}"""
VECTORS = "steering.safetensors"
"""File of the vectors that are added to layers' outputs, by the layer's name."""
_VECTORS = f"""\
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {{base}}
vectors = {{path}}
model = AutoModelForCausalLM.from_pretrained(base, dtype="{{dtype}}")
tokenizer = AutoTokenizer.from_pretrained(base)


def steer(layer, vector):
    def add(module, inputs, output):
        hidden, *others = output if isinstance(output, tuple) else (output,)
        hidden = hidden + vector.to(hidden)
        return (hidden, *others) if isinstance(output, tuple) else hidden

    model.get_submodule(layer).register_forward_hook(add)


for layer, vector in load_file(vectors).items():
    steer(layer, vector)
{_ANSWER}"""
_VLLM = """\
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes.
    greedy = SamplingParams(temperature=0, max_tokens=16)
    # On a CPU, VLLM_CPU_KVCACHE_SPACE says how many GiB it takes beside the model.
    llm = LLM({path}, dtype="{dtype}")  # vLLM's own choice may be another dtype.
    print(llm.generate("1 + 1 =", greedy)[0].outputs[0].text)"""
_VLLM_ADAPTER = """\
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":  # vLLM starts processes.
    greedy = SamplingParams(temperature=0, max_tokens=16)
    lora = LoRARequest("adapter", 1, {path})
    # On a CPU, VLLM_CPU_KVCACHE_SPACE says how many GiB it takes beside the model.
    llm = LLM({base}, enable_lora=True, max_lora_rank={rank}, dtype="{dtype}")
    print(llm.generate("1 + 1 =", greedy, lora_request=lora)[0].outputs[0].text)"""


@dataclasses.dataclass(frozen=True)
class Lines:
    """Code that loads an export.

    Attributes:
        program: the library or program.
        language: python or bash.
        text: its lines.
    """

    program: str
    language: str
    text: str

    def as_markdown(self) -> str:
        """Return the program's name and its lines as a Markdown code block."""
        return f"{self.program}:\n\n```{self.language}\n{self.text}\n```"


def of_model(path: Path, dtype: str, packages: str | None = None) -> tuple[Lines, ...]:
    """Return loading code for a model directory; a quantised one needs `packages`."""
    transformers, vllm = "transformers", "vLLM"
    if packages is not None:
        transformers += f", with {packages} installed"
        vllm += ", where it has a kernel for the format"
    return (
        Lines(transformers, "python", _MODEL.format(path=_text(path))),
        Lines(vllm, "python", _VLLM.format(path=_text(path), dtype=dtype)),
    )


def of_adapter(path: Path, base: str, dtype: str, rank: int, in_vllm: bool) -> tuple[Lines, ...]:
    """Return loading code for a PEFT adapter on its base, a directory or a name on the Hub."""
    words = {"path": _text(path), "base": _text(base), "dtype": dtype}
    lines = [Lines("PEFT", "python", _ADAPTER.format(**words))]
    if in_vllm:
        text = _VLLM_ADAPTER.format(**words, rank=slot_rank(rank))
        lines.append(Lines("vLLM", "python", text))
    return tuple(lines)


def of_vectors(path: Path, base: str, dtype: str) -> tuple[Lines, ...]:
    """Return loading code for steering vectors on their base."""
    words = {"path": _text(path / VECTORS), "base": _text(base), "dtype": dtype}
    return (Lines("transformers", "python", _VECTORS.format(**words)),)


def _text(path: Path | str) -> str:
    """Return a path as a Python string literal."""
    return json.dumps(str(path), ensure_ascii=False)
