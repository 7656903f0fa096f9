"""Adapters in the torch engine: PEFT's own are a start, and a saved centre has them merged."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from es_cookbook.engines.base import LogprobsRequest
from es_cookbook.evolution.genome import Step, Term
from es_cookbook.evolution.spaces.adapter import Adapter
from tests.engines.torch.reference import running_engine, score_all
from tests.tiny_models import TinyModel

STEP = Step((Term(1, 0.05), Term(2, -0.1)))


async def test_it_goes_on_from_an_adapter_of_pefts_and_answers_as_peft_does(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32)
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2"), dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    prompt, continuation = (5, 7, 9), (11, 12, 13)
    with torch.no_grad():
        logits = peft(torch.tensor([[*prompt, *continuation]])).logits[0]
    logprobs = logits[2:-1].log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    async with running_engine(
        tiny_model("qwen2"), Adapter(start=str(tmp_path / "adapter"))
    ) as engine:
        asked = [LogprobsRequest(target, prompt, continuation) for target in ("centre", "base")]
        centre, of_base = await score_all(engine, asked)
        torch.testing.assert_close(torch.tensor(centre), logprobs, rtol=0, atol=1e-5)
        assert not torch.allclose(torch.tensor(of_base), logprobs, atol=1e-3)
