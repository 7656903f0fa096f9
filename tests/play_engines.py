"""What tests of talking to a run need: a model that is always the same, and engines that none is.

One of them attacks, one repeats, one keeps silent.
"""

import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

import anyio
import anyio.lowlevel
import chz

from es_cookbook.engines.base import Engine, EngineBuilder, SampleRequest, check_sample
from es_cookbook.evolution.genome import Genome
from es_cookbook.rl.types import Action
from tests.fakes import FakeEngine

if TYPE_CHECKING:
    from es_cookbook.evolution.spaces.base import SearchSpaceBuilder


HOSTILE = "two\nlines \\ \x1b[2J\x1b]0;title\x07\x9b1A \u202egnp.exe\u2028\r\x7f\ud800 end"


def hostile_answer(who: Genome | str, request: SampleRequest) -> str:
    return HOSTILE


@chz.chz
class HostileBuilder(EngineBuilder):
    """Builds an engine whose answers are escape sequences."""

    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        return FakeEngine(answer=hostile_answer)


class Codes:
    """A tokenizer of code points."""

    chat_template = None
    unk_token_id = None
    added_tokens_decoder: ClassVar[dict[int, object]] = {}
    all_special_ids = all_special_tokens = ()

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens_T: list[int], **_: object) -> str:
        return "".join(map(chr, tokens_T))


class EchoEngine(FakeEngine):
    """Whose tokens are the codes of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = cast(Any, Codes())

    async def sample(self, request: SampleRequest) -> Action:
        check_sample(request, self.traits.context_length, sys.maxunicode)
        return Action((0,), "".join(map(chr, request.observation.tokens_T)), "stop")


@chz.chz
class EchoBuilder(EngineBuilder):
    """Builds an engine that answers with the prompt."""

    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        return EchoEngine()


class SilentEngine(FakeEngine):
    async def sample(self, request: SampleRequest) -> Action:
        if request.target != "base":
            await anyio.sleep_forever()
        return await super().sample(request)


@chz.chz
class SilentBuilder(EngineBuilder):
    """Builds an engine of which only the base ever answers."""

    async def __call__(self, *, model_name: str, search_space: "SearchSpaceBuilder") -> Engine:
        return SilentEngine()
