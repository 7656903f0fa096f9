"""Answers in the form of OpenAI's API, whole or as a stream of events."""

import dataclasses
import functools
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TypeAlias

from es_cookbook.bridges.endpoint.requests import ChatRequest, TextRequest
from es_cookbook.bridges.endpoint.translator import Answer, Prompt
from es_cookbook.rl.types import Tokenizer

DONE = b"data: [DONE]\n\n"

Piece: TypeAlias = tuple[int, str | Answer]
"""The number of an answer, and what its content goes on with; at last all of it."""


@dataclasses.dataclass
class Reply:
    """What a request is answered.

    Attributes:
        model: as it was asked for.
        prompts: of each group of answers.
        tokenizer: of the model.
        answers: by number: all answers to the first prompt, then to the second, and so on.
        cached: prompt tokens whose keys and values were there already, if the engine tells.
    """

    model: str
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    answers: dict[int, Answer] = dataclasses.field(default_factory=dict)
    cached: int | None = None

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same prompt and answers, so that a program that logs it repeats.

        A stream that begins before its answers are known has one that is drawn.
        """
        if not self.answers:
            return secrets.token_hex(12)
        tokens = [
            *(prompt.tokens_T for prompt in self.prompts),
            *(answer.action.tokens_T for answer in self.in_order),
        ]
        return hashlib.sha256(repr((self.model, tokens)).encode()).hexdigest()[:24]

    @property
    def in_order(self) -> list[Answer]:
        """All answers."""
        return [self.answers[at] for at in sorted(self.answers)]

    @property
    def usage(self) -> dict[str, object]:
        read = sum(len(prompt.tokens_T) for prompt in self.prompts)
        wrote = sum(len(answer.action.tokens_T) for answer in self.answers.values())
        told = self.cached is not None
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}} if told else {}
        return {
            "prompt_tokens": read,
            "completion_tokens": wrote,
            "total_tokens": read + wrote,
            **details,
        }

    async def pieces(self) -> AsyncIterator[Piece]:
        """Of answers that are complete."""
        for at, answer in enumerate(self.in_order):
            yield at, answer

    def _head(self, kind: str, prefix: str) -> dict[str, object]:
        return {
            "id": f"{prefix}-{self.digest}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def chat(self, request: ChatRequest) -> dict[str, object]:
        """`chat.completion`."""
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
        """`chat.completion.chunk`s: for each answer who speaks, what, and why it ends."""
        head = self._head("chat.completion.chunk", "chatcmpl")

        def piece(at: int, delta: object, finish: str | None, logprobs: object) -> bytes:
            choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            usage = {"usage": None} if request.usage else {}
            return event({**head, "choices": [choice], **usage})

        sent: dict[int, int] = {}
        async for at, said in pieces:
            if at not in sent:
                sent[at] = 0
                yield piece(at, {"role": "assistant", "content": ""}, None, None)
            is_whole = isinstance(said, Answer)
            if content := said.content[sent[at] :] if is_whole else said:
                sent[at] += len(content)
                logprobs = self._of_tokens(said) if is_whole and request.draw.logprobs else None
                yield piece(at, {"content": content}, None, logprobs)
            if is_whole:
                if said.calls:
                    calls = enumerate(self._calls(at, said))
                    numbered = [{"index": i, **call} for i, call in calls]
                    yield piece(at, {"tool_calls": numbered}, None, None)
                yield piece(at, {}, said.finish, None)
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def text(self, request: TextRequest) -> dict[str, object]:
        """`text_completion`."""
        head = self._head("text_completion", "cmpl")
        texts = [self._text(at, answer, request) for at, answer in enumerate(self.in_order)]
        return {**head, "choices": texts, "usage": self.usage}

    async def text_events(
        self, request: TextRequest, pieces: AsyncIterator[Piece]
    ) -> AsyncIterator[bytes]:
        """`text_completion`s, the last of an answer with why it ends."""
        head = self._head("text_completion", "cmpl")
        usage = {"usage": None} if request.usage else {}
        sent: dict[int, int] = {}
        async for at, said in pieces:
            if isinstance(said, Answer):
                choice = self._text(at, said, request, sent.get(at, 0))
            else:
                choice = {"index": at, "text": said, "logprobs": None, "finish_reason": None}
                sent[at] = sent.get(at, 0) + len(said)
            yield event({**head, "choices": [choice], **usage})
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def _text(
        self, at: int, answer: Answer, request: TextRequest, sent: int = 0
    ) -> dict[str, object]:
        return {
            "index": at,
            "text": answer.content[sent:],
            "logprobs": self._of_texts(answer) if request.draw.logprobs else None,
            "finish_reason": answer.finish,
        }

    def message(self, at: int) -> dict[str, object]:
        """An answer as the assistant's message."""
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
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for i, call in enumerate(answer.calls)
        ]

    def _tokens(self, answer: Answer) -> Iterator[tuple[str, float]]:
        logprobs_T = answer.action.logprobs_T or ()
        for token, logprob in zip(answer.action.tokens_T, logprobs_T, strict=True):
            yield str(self.tokenizer.decode([token])), logprob

    def _of_tokens(self, answer: Answer) -> dict[str, object]:
        content = [
            {"token": token, "logprob": logprob, "bytes": [*token.encode()], "top_logprobs": []}
            for token, logprob in self._tokens(answer)
        ]
        return {"content": content, "refusal": None}

    def _of_texts(self, answer: Answer) -> dict[str, object]:
        tokens = [*self._tokens(answer)]
        starts = [0]
        for token, _ in tokens:
            starts.append(starts[-1] + len(token))
        return {
            "tokens": [token for token, _ in tokens],
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": None,
            "text_offset": starts[:-1],
        }


def event(body: Mapping[str, object], is_named: bool = False) -> bytes:
    """One of a stream's; the Responses API also names its type before it."""
    name = f"event: {body['type']}\n" if is_named else ""
    return f"{name}data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
