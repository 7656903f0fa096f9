"""Answers in the form of OpenAI's API, whole or as a stream of events.

An engine gives an answer when it is complete, so a stream's pieces come together; programs that
read streams are served as they expect.
"""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence

from es_cookbook.bridges.endpoint.requests import ChatRequest, TextRequest
from es_cookbook.bridges.endpoint.translator import Answer, Prompt
from es_cookbook.rl.types import Tokenizer

DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a request is answered.

    Attributes:
        model: as it was asked for.
        prompts: of each group of answers.
        answers: all answers to the first prompt, then to the second, and so on.
        tokenizer: of the model.
    """

    model: str
    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    tokenizer: Tokenizer

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same prompt and answers, so that a program that logs it repeats."""
        tokens = [
            *(prompt.tokens_T for prompt in self.prompts),
            *(answer.action.tokens_T for answer in self.answers),
        ]
        return hashlib.sha256(repr((self.model, tokens)).encode()).hexdigest()[:24]

    @property
    def usage(self) -> dict[str, int]:
        read = sum(len(prompt.tokens_T) for prompt in self.prompts)
        wrote = sum(len(answer.action.tokens_T) for answer in self.answers)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

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
            for at, answer in enumerate(self.answers)
        ]
        head = self._head("chat.completion", "chatcmpl")
        return {**head, "choices": choices, "usage": self.usage}

    def chat_events(self, request: ChatRequest) -> Iterator[bytes]:
        """`chat.completion.chunk`s: for each answer who speaks, what, and why it ends."""
        head = self._head("chat.completion.chunk", "chatcmpl")

        def piece(at: int, delta: object, finish: str | None, logprobs: object) -> bytes:
            choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            usage = {"usage": None} if request.usage else {}
            return event({**head, "choices": [choice], **usage})

        for at, answer in enumerate(self.answers):
            logprobs = self._of_tokens(answer) if request.draw.logprobs else None
            said = self.message(at)
            role, content = said.pop("role"), said.pop("content")
            yield piece(at, {"role": role, "content": ""}, None, None)
            if content:
                yield piece(at, {"content": content}, None, logprobs)
            if calls := said.get("tool_calls"):
                assert isinstance(calls, list)
                numbered = [{"index": i, **call} for i, call in enumerate(calls)]
                yield piece(at, {"tool_calls": numbered}, None, None)
            yield piece(at, {}, answer.finish, None)
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def text(self, request: TextRequest) -> dict[str, object]:
        """`text_completion`."""
        head = self._head("text_completion", "cmpl")
        return {**head, "choices": self._texts(request), "usage": self.usage}

    def text_events(self, request: TextRequest) -> Iterator[bytes]:
        """`text_completion`s, one an answer."""
        head = self._head("text_completion", "cmpl")
        usage = {"usage": None} if request.usage else {}
        for choice in self._texts(request):
            yield event({**head, "choices": [choice], **usage})
        if request.usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield DONE

    def _texts(self, request: TextRequest) -> list[dict[str, object]]:
        return [
            {
                "index": at,
                "text": answer.content,
                "logprobs": self._of_texts(answer) if request.draw.logprobs else None,
                "finish_reason": answer.finish,
            }
            for at, answer in enumerate(self.answers)
        ]

    def message(self, at: int) -> dict[str, object]:
        """An answer as the assistant's message."""
        answer = self.answers[at]
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        message["refusal"] = None
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.digest}{at:02x}{i:02x}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for i, call in enumerate(answer.calls)
            ]
        return message

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
