"""Answers in the form of OpenAI's API, whole or as a stream of events."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

from es_cookbook.plugins.endpoint.requests import ChatRequest, TextRequest
from es_cookbook.plugins.endpoint.translator import Answer, Prompt
from es_cookbook.rl.messages.message import as_json
from es_cookbook.rl.types import Tokenizer

DONE = b"data: [DONE]\n\n"
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [each for each in range(256) if each not in _PRINTED]
_BYTES = dict(zip(map(chr, [*_PRINTED, *range(256, 324)]), _PRINTED + _OTHERS, strict=True))
"""The characters by which byte-level tokenizers write bytes."""

Piece: TypeAlias = tuple[int, str, Answer | None]
"""The number of an answer, the next piece of its text, and with the last piece the answer."""


@dataclasses.dataclass
class Reply:
    """The reply to a request.

    Attributes:
        model: the requested name.
        prompts: one for each group of answers.
        tokenizer: the model's tokenizer.
        answers: number -> answer: all to the first prompt, then to the second, and so on.
        cached: prompt tokens with cached keys and values, if the engine reports them.
    """

    model: str
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    cached: int | None = None

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the reply by its prompts, so that the ids in a program's chats repeat."""
        found = hashlib.sha256(repr(self.model).encode())
        for prompt in self.prompts:
            found.update(array("q", (len(prompt.tokens_T), *prompt.tokens_T)))
        return found.hexdigest()[:24]

    @property
    def in_order(self) -> list[Answer]:
        """All answers, by number."""
        return [self.answers[at] for at in sorted(self.answers)]

    @property
    def usage(self) -> dict[str, Any]:
        read = sum(len(prompt.tokens_T) for prompt in self.prompts)
        wrote = sum(len(answer.action.tokens_T) for answer in self.answers.values())
        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": wrote}
        usage["total_tokens"] = read + wrote
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage

    def _head(self, kind: str, prefix: str) -> dict[str, object]:
        return {
            "id": f"{prefix}-{self.digest}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def chat(self, request: ChatRequest) -> dict[str, object]:
        """Return a `chat.completion`."""
        choices = [
            {
                "index": at,
                "message": self.message(at),
                "logprobs": self._of_tokens(answer) if request.draw.logprobs else None,
                "finish_reason": answer.finish,
            }
            for at, answer in enumerate(self.in_order)
        ]
        head = self._head("chat.completion", "chatcmpl")
        return {**head, "choices": choices, "usage": self.usage}

    async def chat_events(
        self, request: ChatRequest, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[bytes]:
        """Yield `chat.completion.chunk`s: role, text and finish reason of each answer."""
        head = self._head("chat.completion.chunk", "chatcmpl")

        def chunk(
            at: int, delta: object, finish: str | None = None, logprobs: object = None
        ) -> bytes:
            choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            usage = {"usage": None} if request.usage else {}
            return event({**head, "choices": [choice], **usage})

        begun: set[int] = set()
        async for at, text, answer in pieces:
            if at not in begun:
                begun.add(at)
                yield chunk(at, {"role": "assistant", "content": ""})
            logprobs = self._of_tokens(answer) if answer and request.draw.logprobs else None
            if text or logprobs:
                yield chunk(at, {"content": text}, None, logprobs)
            if answer:
                if answer.calls:
                    calls = enumerate(self._calls(at, answer))
                    yield chunk(at, {"tool_calls": [{"index": i, **call} for i, call in calls]})
                yield chunk(at, {}, answer.finish)
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def text(self, request: TextRequest) -> dict[str, object]:
        """Return a `text_completion`."""
        head = self._head("text_completion", "cmpl")
        choices = [self._text(at, answer, request) for at, answer in enumerate(self.in_order)]
        return {**head, "choices": choices, "usage": self.usage}

    async def text_events(
        self, request: TextRequest, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[bytes]:
        """Yield `text_completion`s, the last of an answer with its finish reason."""
        head = self._head("text_completion", "cmpl")
        usage = {"usage": None} if request.usage else {}
        async for at, text, answer in pieces:
            finish = answer.finish if answer else None
            choice = {"index": at, "text": text, "logprobs": None, "finish_reason": finish}
            yield event({**head, "choices": [choice], **usage})
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def _text(self, at: int, answer: Answer, request: TextRequest) -> dict[str, object]:
        prompt, text = self.prompts[at // request.draw.n], answer.content
        if request.echo:
            shown = self.tokenizer.decode(list(prompt.tokens_T), skip_special_tokens=True)
            text = f"{shown}{text}"
        wanted = request.draw.logprobs
        logprobs = self._logprobs(prompt, answer, request.tops) if wanted else None
        return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": answer.finish}

    def message(self, at: int) -> dict[str, object]:
        """Return an answer as the assistant's message."""
        answer = self.answers[at]
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        message["refusal"] = None
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = self._calls(at, answer)
        return message

    def _calls(self, at: int, answer: Answer) -> list[dict[str, object]]:
        return [
            {
                "id": f"call_{self.digest}{at:02x}{i:02x}",
                "type": "function",
                "function": {"name": call.name, "arguments": as_json(dict(call.arguments))},
            }
            for i, call in enumerate(answer.calls)
        ]

    def _one(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _of_tokens(self, answer: Answer) -> dict[str, object]:
        """Return the log-probabilities of a chat's answer."""
        content: list[dict[str, object]] = []
        action = answer.action
        for token, logprob in zip(action.tokens_T, action.logprobs_T or (), strict=True):
            text = self._one(token)
            raw = raw_bytes(text, str(self.tokenizer.convert_ids_to_tokens(token)))
            content.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _logprobs(self, prompt: Prompt, answer: Answer, asks_tops: bool) -> dict[str, object]:
        """Return log-probabilities of sampled tokens, with `tops` also of the prompt's."""
        tokens_T, tops = answer.action.tokens_T, answer.tops
        logprobs: Sequence[float | None] = answer.action.logprobs_T or ()
        if tops is not None:  # The first token has no probability.
            tokens_T = prompt.tokens_T + tokens_T
            logprobs = [None, *(top.logprob for top in tops)]
        texts = [self._one(token) for token in tokens_T]
        best: list[dict[str, float] | None] = [None]
        for text, top in zip(texts[1:], tops or (), strict=False):
            best.append({text: top.logprob, self._one(top.best): top.best_logprob})
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": best if asks_tops else None,
            "text_offset": [*itertools.accumulate(map(len, texts), initial=0)][:-1],
        }


def raw_bytes(text: str, name: str) -> list[int] | None:
    """Return the bytes of a token, which may be part of a character; None if unknown.

    Args:
        text: decoded.
        name: the token in the vocabulary.
    """
    if "\ufffd" not in text:
        return list(text.encode())
    if re.fullmatch("<0x[0-9A-F]{2}>", name):  # SentencePiece
        return [int(name[3:5], 16)]
    return None if set(name) - _BYTES.keys() else [_BYTES[each] for each in name]


def as_text(value: object) -> str:
    """Return compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(body: Mapping[str, object]) -> bytes:
    """Encode an event of a stream; one with a type is named by it (Responses API)."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
