"""The model that answers for a run, as a model of inspect-ai.

    get_model("es/centre", source=Source(...), memoize=False)

inspect-ai evaluates a model with its own tasks: a dataset, a solver, which may let the model call
tools over many turns, and scorers. It asks for one turn at a time and passes the whole chat. A chat
that continues a turn of this model continues from its tokens; other chats are rendered as a whole.

A turn's sampling seed follows from the run's seed, the prompt, and how often it came before.
So an evaluation gives the same answers for any order of its samples.

Source: https://inspect.aisi.org.uk/extensions.html#model-apis
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import chz
from inspect_ai import Task, eval_async
from inspect_ai._eval.loader import load_tasks
from inspect_ai._util.error import PrerequisiteError
from inspect_ai._util.registry import registry_info, registry_params
from inspect_ai.log import EvalLog
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    get_model,
    modelapi,
)
from inspect_ai.tool import ToolCall as InspectToolCall
from inspect_ai.tool import ToolChoice, ToolInfo
from typing_extensions import override

from es_cookbook.common.errors import ConfigError, DataError, RequestError, nearest
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import printable
from es_cookbook.plugins.inspect.config import InspectConfig
from es_cookbook.rl.messages.chat import Chat, ChatOptions, KeptTurns
from es_cookbook.rl.messages.message import Message, Parsed, ToolCall, read_turn
from es_cookbook.rl.messages.thoughts import opened_thought, spoken, whole_turn
from es_cookbook.rl.messages.tools import ToolSchema
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.types import Action, Answer, Observation, SamplingParams, Tokenizer

_AT_ONCE = 1024
"""Limit on concurrent turns, which the engine batches."""
_REFUSED = (
    "best_of",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "presence_penalty",
    "prompt_logprobs",
    "response_schema",
    "top_k",
    "top_logprobs",
)
"""Options that change answers and that engines do not support."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The model that answers.

    Attributes:
        answer: returns an action; called on the event loop of the evaluation.
        context_length: maximum tokens of a chat.
        sampling: defaults of a task's options.
        chat: how chats are rendered; the task limits the turns.
        seed: sampling seed.
    """

    answer: Answer
    tokenizer: Tokenizer
    context_length: int
    sampling: SamplingParams
    chat: ChatOptions
    seed: int = 0


@modelapi(name="es")
class _RunModel(ModelAPI):
    """A centre, a base or a genome as a model of inspect-ai."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as the base class has it
        source: Source | None = None,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if source is None:
            raise RequestError(
                f"es/{model_name} answers for a run: use `es-cookbook inspect log_path=RUN "
                "task=TASK`, or give get_model a source"
            )
        self._source = source
        self._chat_of = functools.lru_cache(maxsize=64)(self._chat_with)
        self._counts: Counter[bytes] = Counter()
        self._kept = KeptTurns()

    @override
    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        source = self._source
        params = _params(source.sampling, config)
        if tool_choice not in ("auto", "none"):
            raise RequestError(
                f"{self.qualified_model_name}: the task wants tool_choice={tool_choice!r}, and "
                "this model cannot be made to call a tool; accepted: auto, none"
            )
        used = [] if tool_choice == "none" else tools
        chat, names = None, [message.id for message in input]
        if source.tokenizer.chat_template is None:
            observation: Observation | None = self._plain(input, used)
        else:
            chat = self._chat_of(_schemas(used))
            shown = chat.with_system([_message(message) for message in input])
            names = [*[None] * (len(shown) - len(input)), *names]
            observation = self._next(chat, shown, names)
        if observation is None:
            return ModelOutput.from_content(self._name, "", stop_reason="model_length")
        observation = dataclasses.replace(
            observation, stop=(*observation.stop, *(config.stop_seqs or ()))
        )
        action = await source.answer(observation, params, self._seed(observation, config))
        parsed = Parsed(action.text)
        if chat and used:
            schemas = [tool.schema for tool in chat.tools]
            parsed = read_turn(
                chat.tokenizer, chat.form, observation.tokens_T, action, schemas=schemas
            )
        output = self._output(observation, action, parsed)
        if chat is not None:
            names.append(output.choices[0].message.id)
            self._kept.keep(chat.renderer, names, observation.tokens_T, action)
        return output

    @override
    def max_connections(self) -> int:
        return _AT_ONCE

    @property
    def _name(self) -> str:
        return self.qualified_model_name or f"es/{self.model_name}"

    def _chat_with(self, schemas: str) -> Chat:
        found = cast("list[dict[str, dict[str, str]]]", json.loads(schemas))
        tools = [ToolSchema(schema["function"]["name"], schema) for schema in found]
        options = chz.replace(self._source.chat, max_turns=2**31)
        return Chat(self._source.tokenizer, options, tools)

    def _next(
        self, chat: Chat, messages: Sequence[Message], names: Sequence[str | None]
    ) -> Observation | None:
        """Return the model's observation of a chat; None if there is no room left for a turn.

        Messages have inspect's ids as names: samples that read alike go on from their own tokens.
        """
        tokens_T = self._kept.prompt(chat.renderer, messages, names)
        stream = chat.stream(tokens_T, self._source.context_length)
        return stream.observation if len(tokens_T) < stream.most else None

    def _plain(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo]
    ) -> Observation | None:
        """Return the observation of a question, for a tokenizer without a chat template."""
        system = [_text(m) for m in messages if isinstance(m, ChatMessageSystem)]
        others = [m for m in messages if not isinstance(m, ChatMessageSystem)]
        if tools or len(others) != 1 or others[0].role != "user":
            raise RequestError(
                f"the tokenizer of {self._name} has no chat template, so it can be asked one "
                "question, without tools"
            )
        question = _text(others[0])
        tokens_T = render_prompt(
            self._source.tokenizer, question, chat=False, system="\n\n".join(system)
        )
        if len(tokens_T) >= self._source.context_length:
            return None
        return Observation(tokens_T, stop=self._source.chat.stop)

    def _seed(self, observation: Observation, config: GenerateConfig) -> int:
        prompt = hashlib.blake2b(repr(observation.tokens_T).encode(), digest_size=8).digest()
        self._counts[prompt] += 1
        seed = self._source.seed if config.seed is None else config.seed
        return derive_seed(seed, "inspect", int.from_bytes(prompt, "big"), self._counts[prompt])

    def _output(self, observation: Observation, action: Action, parsed: Parsed) -> ModelOutput:
        calls = [
            InspectToolCall(f"call_{i}", call.name, dict(call.arguments))
            for i, call in enumerate(parsed.calls)
        ]
        calls += [
            InspectToolCall(f"call_{i}", "unreadable", {}, parse_error=problem)
            for i, problem in enumerate(parsed.problems, len(calls))
        ]
        # As inspect's own models, whose thoughts scorers do not see.
        opened = opened_thought(self._source.tokenizer, observation.tokens_T)
        content = spoken(whole_turn(parsed.content, opened))
        message = ChatMessageAssistant(
            content=content, tool_calls=calls or None, model=self._name, source="generate"
        )
        ended = "tool_calls" if calls else "stop"
        stop_reason = "max_tokens" if action.stop_reason == "length" else ended
        shown, sampled = len(observation.tokens_T), len(action.tokens_T)
        return ModelOutput(
            model=self._name,
            choices=[ChatCompletionChoice(message=message, stop_reason=stop_reason)],
            usage=ModelUsage(
                input_tokens=shown, output_tokens=sampled, total_tokens=shown + sampled
            ),
        )


def _params(sampling: SamplingParams, config: GenerateConfig) -> SamplingParams:
    """Return the sampling parameters: the task's, or else the run's."""
    for name in _REFUSED:
        if getattr(config, name):
            raise RequestError(f"the task sets {name}, which engines do not support")
    if (config.num_choices or 1) != 1:
        raise RequestError(f"the task wants {config.num_choices} choices at once; use epochs")
    given = {
        name: value
        for name in ("max_tokens", "temperature", "top_p")
        if (value := getattr(config, name)) is not None
    }
    return chz.replace(sampling, **given)


def _schemas(tools: Sequence[ToolInfo]) -> str:
    """Return the tools as chat templates expect them, as JSON."""
    return json.dumps(
        [
            {"type": "function", "function": tool.model_dump(exclude_none=True, mode="json")}
            for tool in tools
        ]
    )


def _message(message: ChatMessage) -> Message:
    if isinstance(message, ChatMessageTool):
        error = f"error: {message.error.message}" if message.error else ""
        text = "\n".join(filter(None, (error, _text(message))))
        return Message("tool", text, name=message.function)
    calls = message.tool_calls if isinstance(message, ChatMessageAssistant) else None
    return Message(
        message.role,
        _text(message),
        tuple(ToolCall(call.function, call.arguments) for call in calls or ()),
    )


def _text(message: ChatMessage) -> str:
    """Return the text of a message.

    Raises:
        DataError: It holds something else.
    """
    if isinstance(message.content, list):
        for part in message.content:
            if not isinstance(part, ContentText):
                raise DataError(
                    f"a message of the task has a part of the kind {part.type!r}, and only text is "
                    "bridged"
                )
    return message.text


async def run_task(
    config: InspectConfig, source: Source, metadata: Mapping[str, object]
) -> list[EvalLog]:
    """Evaluate a model with the tasks of a script, or one of an installed package.

    Raises:
        ConfigError: The task does not exist, or inspect cannot run it here.
    """
    tasks = _tasks(config.task, config.arguments())
    try:
        return await eval_async(
            tasks,
            get_model(f"es/{config.subject}", source=source, memoize=False),
            limit=config.limit,
            epochs=config.epochs,
            log_dir=config.log_dir,
            metadata=dict(metadata),
            ctl_server=False,
        )
    except PrerequisiteError as error:
        raise ConfigError(f"inspect cannot run task={config.task}: {_line(str(error))}") from error


def _tasks(name: str, arguments: Mapping[str, object]) -> list[Task]:
    # Inspect finds scripts by a pattern below the current directory, which takes no absolute path.
    below = os.path.relpath(name) if os.path.isabs(name) else name
    try:
        tasks = load_tasks([below], dict(arguments))
    except Exception as error:  # Any error of the task's code.
        raise ConfigError(
            f"task={name} cannot be made of task_args={json.dumps(arguments)}: "
            f"{type(error).__name__}: {_line(str(error))}"
        ) from error
    if not tasks:
        raise ConfigError(
            f"there is no task of inspect-ai called {name}: it is neither a script with one nor "
            "registered by an installed package, as inspect_evals/gsm8k is by inspect-evals"
        )
    for task in tasks:
        known = registry_info(task).metadata["params"]
        for argument in arguments.keys() - {*known, *registry_params(task)}:  # Inspect drops them.
            raise ConfigError(
                f"task_args: {task.name} has no argument {argument!r}; {nearest(argument, known)}"
            )
    return tasks


def _line(text: str) -> str:
    return printable(" ".join(text.split()))[:300]
