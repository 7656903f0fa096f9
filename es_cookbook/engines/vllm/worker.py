"""The worker extension that makes a vLLM worker host genomes.

vLLM imports this module in every worker before the model is loaded and mixes `GenomeWorker` into
the worker. The engine calls its methods by name; arguments and answers are plain numbers, texts,
bytes and lists: once the search space, then seeds (or a small space's coordinates), never weights.
"""

import functools
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel
from vllm.platforms import current_platform

from es_cookbook.checkpoints.models import load_architecture, stored_form
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.engines.vllm import cpu
from es_cookbook.engines.vllm.rank import FingerprintPiece, RankGenomes, host_genomes
from es_cookbook.engines.wire import decode_genomes, decode_steps

if current_platform.is_cpu():
    cpu.prepare()

Answer: TypeAlias = tuple[str, object]
"""Nothing and what was asked for, or an error's class and its sentence."""

_LORA_OF_GPT2: dict[str, object] = {
    "supports_lora": True,
    "packed_modules_mapping": {"c_attn": ["c_attn"]},
    "embedding_modules": {"lm_head": "output_embeddings"},
    "lora_skip_prefixes": [],
    "is_3d_moe_weight": False,
    "is_non_gated_moe": False,
    "lora_manager": None,
}
"""vLLM has LoRA layers for all linear weights of GPT-2, but its model does not say so."""

for _name, _value in _LORA_OF_GPT2.items():
    setattr(GPT2LMHeadModel, _name, _value)

_Arguments = ParamSpec("_Arguments")


def slot_request(slot: int) -> LoRARequest:
    """What names a slot in a vLLM request; it never leads to a file."""
    return LoRARequest(f"slot-{slot}", slot + 1, "filled by es_cookbook")


def _answers(method: Callable[_Arguments, object]) -> Callable[_Arguments, Answer]:
    """Bring our own errors home as themselves: vLLM would make a text of them."""

    @functools.wraps(method)
    def answer(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Answer:
        try:
            return "", method(*args, **kwargs)
        except ESCookbookError as error:
            return type(error).__name__, str(error)

    return answer


class GenomeWorker:
    """Mixed into a vLLM worker; see the module's text."""

    model_runner: Any  # vLLM's own
    _genomes: RankGenomes

    @_answers
    def genomes_open(self, what: bytes, num_slots: int) -> list[FingerprintPiece]:
        """Get ready to host genomes.

        Args:
            what: the search space and the Hugging Face model's parameters, pickled.
            num_slots: LoRA slots; 0 where the space needs none.
        """
        space, infos = pickle.loads(what)
        if num_slots:
            self._take_slots(num_slots)
        model = cast(torch.nn.Module, self.model_runner.model)
        with set_current_vllm_config(self.model_runner.vllm_config):  # its activations ask for it
            as_stored = stored_form(load_architecture(self.model_runner.model_config.model))
        with _writing_weights():
            self._genomes = host_genomes(model, space, infos, as_stored)
            if num_slots:
                self._genomes.load([])
        return self._genomes.fingerprint()

    @_answers
    def genomes_load(self, genomes: bytes) -> None:
        with torch.no_grad():
            self._genomes.load(decode_genomes(genomes))

    @_answers
    def genomes_use(self, weights: int | Literal["centre", "base"]) -> None:
        with _writing_weights():
            self._genomes.use(weights)

    @_answers
    def genomes_apply(self, step: bytes) -> list[FingerprintPiece]:
        (decoded,) = decode_steps(step)
        with _writing_weights():
            return self._genomes.apply(decoded)

    @_answers
    def genomes_restore(self, steps: bytes, snapshot: str | None) -> list[FingerprintPiece]:
        path = None if snapshot is None else Path(snapshot)
        with _writing_weights():
            return self._genomes.restore(list(decode_steps(steps)), path)

    def _take_slots(self, num_slots: int) -> None:
        """Take LoRA slots for good, so that requests that name one find it there."""
        manager = self.model_runner.lora_manager
        for slot in range(num_slots):
            manager.add_dummy_lora(slot_request(slot), 1)
            manager._adapter_manager.activate_adapter(slot + 1)
        # Before each step vLLM looks whether the batch's adapters are there, one by one; they are.
        vars(manager)["_apply_adapters"] = _nothing


@contextmanager
def _writing_weights() -> Generator[None]:
    """Inside, the model's weights may be written."""
    try:
        with torch.no_grad():
            yield
    finally:
        cpu.weights_changed()


def _nothing(requests: object) -> None:
    del requests
