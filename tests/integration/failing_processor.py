"""A logits processor for vLLM that fails at a request's first token, in the engine's process."""

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor


class FailingProcessor(LogitsProcessor):
    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        raise ArithmeticError("no logits today")
