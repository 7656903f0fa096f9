"""A running vLLM engine: `AsyncLLM` in its own process, whose workers host genomes.

Low-rank genomes are resident LoRA slots, so the whole population is in one batch; a slot is written
in the worker from seeds (`worker`), and no adapter file is ever made. Dense genomes take the
place of the model's weights, one at a time (`Turnstile`). The last slot stays zero: it is the
centre, and every request names a slot, because some builds of vLLM give a request without an
adapter another request's.

Prefix caching is on: every request carries a salt that names the weights which answer it, so that
it never finds what other weights left in the cache.

A request is a function of (centre, genome, prompt, sampling seed) if vLLM's kernels do not depend
on the batch; where they do, a rare near-tie may flip a token. For equal bits in any batch, set
VLLM_BATCH_INVARIANT=1 on recent NVIDIA GPUs, or use engine=torch on the CPU.

Requests that need other weights take turns: those that need the current set run together; the
others wait until none is running, and then the set with the longest wait is loaded. Running
requests wait for vLLM alone, so every set gets its turn as long as requests end.
"""

import asyncio
import itertools
import math
import pickle
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from es_cookbook.checkpoints.linear_weights import named_weights
from es_cookbook.checkpoints.models import Vocabulary, load_causal_lm, parameter_infos, save_model
from es_cookbook.common import errors
from es_cookbook.common.errors import EngineError, ESCookbookError, RequestError
from es_cookbook.engines.base import (
    Engine,
    EngineTraits,
    LogprobsRequest,
    Progress,
    SampleRequest,
    Target,
    Top,
    Usage,
    check_logprobs,
    check_sample,
)
from es_cookbook.engines.vllm.output import LEAST_TEMPERATURE, Output, informative_line
from es_cookbook.engines.wire import encode_genomes, encode_step
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.spaces.base import SearchSpace
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.types import Action

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VLLMParams
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    from es_cookbook.engines.vllm.worker import FingerprintPiece


class VLLMEngine(Engine):
    """An engine on `AsyncLLM`; call `open` before anything else.

    Args:
        llm: started, with `GenomeWorker` as its workers' extension.
        output: output of its processes; closed with the engine.
        model: the Hugging Face model that runs there, without its weights.
        space: its parameters that genomes perturb.
        num_slots: LoRA slots, more than its capacity; 0 for dense genomes.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        output: Output,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        space: SearchSpace,
        traits: EngineTraits,
        num_slots: int,
    ) -> None:
        self._llm: AsyncLLM | None = llm
        self._output = output
        self.tokenizer = tokenizer
        self.traits = traits
        self.space = space
        self._model_name, self._infos = str(model.name_or_path), parameter_infos(model)
        self._num_slots = num_slots
        vocabulary = Vocabulary(model, tokenizer)
        self._limits = traits.context_length, vocabulary.size
        self._never = vocabulary.never
        # A tokenizer may know more tokens than the model; vLLM refuses these.
        self._eos_token_ids = [token for token in vocabulary.ends if token < vocabulary.size]
        self._perturbs_logits = "lm_head.weight" in self.space.weights
        self._texts = AnswerTexts(tokenizer)
        self._usage = Usage()
        self._turnstile = Turnstile(
            lambda weights: self._call("genomes_use", cast(Any, weights)[0])
        )
        self._steps: list[Step] = []
        self._num_loaded = 0
        self._version = 0
        self._request_ids = map(str, itertools.count())
        self._in_flight: set[str] = set()
        self._slot_requests: list[LoRARequest] = []
        self._counters = {"tokens": 0, "requests": 0, "prefilled_tokens": 0, "cached_tokens": 0}

    async def open(self) -> int:
        """Find the model's parameters in the workers. Returns the base's fingerprint.

        Raises:
            ModelError: The search space's parameters cannot be found in vLLM's model.
        """
        from es_cookbook.engines.vllm.worker import slot_request

        self._slot_requests = [slot_request(slot) for slot in range(self._num_slots)]
        what = pickle.dumps((self.space, self._infos, self.traits.base_dtype, self._never))
        pieces = await self._call("genomes_open", what, self._num_slots)
        self._turnstile.current = self._weights_of("centre")
        return merge_fingerprints(pieces, self.space.shapes)

    @override
    async def load(self, genomes_G: Sequence[Genome]) -> None:
        """Write low-rank genomes into slots; dense ones are written when requests come."""
        with self._usage.changing("load genomes"):
            capacity = self.traits.capacity
            if len(genomes_G) > capacity:
                raise EngineError(
                    f"{len(genomes_G)} genomes do not fit: the engine hosts {capacity} at a "
                    "time (engine.max_genomes for low-rank ones)"
                )
            await self._call("genomes_load", encode_genomes(genomes_G))
            self._num_loaded = len(genomes_G)
            self._version += 1

    @override
    async def sample(self, request: SampleRequest) -> Action:
        limit = check_sample(request, *self._limits)
        output = await self._generate(
            request.target,
            request.observation.tokens_T,
            self._params(request, limit),
            request.progress,
        )
        answer = output.outputs[0]
        tokens_T = tuple(answer.token_ids)
        self._counters["tokens"] += len(tokens_T)
        # vLLM's own text ends with a stop string, which may end inside a token.
        text = self._texts.before(request.cut_at, self._texts.text(tokens_T))
        logprobs_T = None
        if request.params.logprobs and answer.logprobs is not None:
            chosen = zip(tokens_T, answer.logprobs, strict=True)
            logprobs_T = tuple(cast(Any, of_token)[token].logprob for token, of_token in chosen)
        reason = "length" if answer.finish_reason == "length" else "stop"
        return Action(tokens_T, text, reason, logprobs_T)

    @override
    async def logprobs(self, request: LogprobsRequest) -> list[float]:
        return [of_tokens[token].logprob for of_tokens, token in await self._scored(request)]

    @override
    async def tops(self, request: LogprobsRequest) -> list[Top]:
        found: list[Top] = []
        for of_tokens, token in await self._scored(request, most=1):
            best = max(of_tokens, key=lambda each: of_tokens[each].logprob)
            found.append(Top(of_tokens[token].logprob, best, of_tokens[best].logprob))
        return found

    async def _scored(
        self, request: LogprobsRequest, most: int = 0
    ) -> "list[tuple[Mapping[int, Logprob], int]]":
        """Return each place's log-probabilities, with `most` probable tokens, and its own token."""
        from vllm import SamplingParams as VLLMParams
        from vllm.sampling_params import RequestOutputKind

        check_logprobs(request, *self._limits, self._never)
        if isinstance(request.target, int) and self._num_slots and self._perturbs_logits:
            raise RequestError(
                "vLLM cannot score with a genome whose lm_head.weight is perturbed; leave it out "
                "(search_space.exclude=lm_head.weight), score with the centre, or use engine=torch"
            )
        # The last token is asked about, not sent: a full context has no room to sample after it.
        *sent_T, last = request.prompt_T + request.continuation_T
        output = await self._generate(
            request.target,
            sent_T,
            VLLMParams(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=most,
                logprob_token_ids=[last],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        of_sent, of_sampled = cast(Any, (output.prompt_logprobs, output.outputs[0].logprobs))
        places = range(len(request.prompt_T), len(sent_T))
        return [*((of_sent[i], sent_T[i]) for i in places), (of_sampled[0], last)]

    @override
    async def apply(self, step: Step) -> int:
        with self._usage.changing("move the centre"), self.spans.span(self.label, "apply"):
            fingerprint = await self._move("genomes_apply", encode_step(step))
            self._steps.append(step)
            return fingerprint

    @override
    async def restore(self, steps: Iterable[Step], snapshot: Path | None = None) -> int:
        with self._usage.changing("restore the centre"):
            self._steps = list(steps)
            plain = b"".join(map(encode_step, self._steps))
            path = None if snapshot is None else str(snapshot.absolute())
            return await self._move("genomes_restore", plain, path)

    @override
    async def save(self, path: Path) -> None:
        """Write the centre, rebuilt from the base model and the steps: weights never travel."""
        with self._usage.changing("save the centre"):
            await asyncio.to_thread(self._save, path)

    @override
    def stats(self) -> Mapping[str, float]:
        """Return counters: `tokens` sampled, `requests` taken, and tokens of their prompts.

        `prefilled_tokens` of those were run, and `cached_tokens` were in the cache.
        """
        return dict(self._counters)

    @override
    async def close(self) -> None:
        self._usage.closed = True
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if not llm.errored:
            await llm.abort(self._in_flight)
            await asyncio.sleep(0)  # waiting tasks get the error
        if llm.output_handler is not None:  # it would take the end for a failure
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown)
        # vLLM's destructor shuts down again, and fails where the interpreter is ending.
        vars(llm)["shutdown"] = lambda: None
        self._output.close()

    def _save(self, path: Path) -> None:
        model = load_causal_lm(self._model_name, self.traits.base_dtype, torch.device("cpu"))
        parameters = dict(named_weights(model))
        centre = Centre(parameters, self.space)
        centre.restore(self._steps)
        with torch.inference_mode():
            self.space.merge_(parameters, centre.weights)
        save_model(model.save_pretrained, self.tokenizer, path)

    async def _move(self, method: str, *arguments: object) -> int:
        pieces = await self._call(method, *arguments)
        self._num_loaded = 0
        self._version += 1
        self._turnstile.current = self._weights_of("centre")
        return merge_fingerprints(pieces, self.space.shapes)

    async def _generate(
        self,
        target: Target,
        tokens_T: Sequence[int],
        params: "VLLMParams",
        progress: Progress | None = None,
    ) -> "RequestOutput":
        """Have one request answered, when the weights it needs are there."""
        with self._usage.request():
            if isinstance(target, int) and not 0 <= target < self._num_loaded:
                raise RequestError(f"there is no genome {target}: {self._num_loaded} are loaded")
            async with self._turnstile.using(self._weights_of(target)):
                self._counters["requests"] += 1
                # Without "type" the prompt goes through a thread of vLLM's that renders it.
                prompt = {
                    "type": "token",
                    "prompt_token_ids": list(tokens_T),
                    # A permanent name of the weights that answer: the base's never change.
                    "cache_salt": "base" if target == "base" else f"{target} of {self._version}",
                }
                slot = self._slot_of(target)
                request_id = next(self._request_ids)
                answers = self._running().generate(
                    cast(Any, prompt),
                    params,
                    request_id,
                    lora_request=self._slot_requests[slot] if self._num_slots else None,
                )
                self._in_flight.add(request_id)
                try:
                    with self._our_errors():
                        last = None
                        async for last in answers:
                            if progress is not None and progress.follows:
                                progress.sampled(last.outputs[0].token_ids)
                finally:
                    self._in_flight.discard(request_id)
        if last is None or last.outputs[0].finish_reason not in ("stop", "length"):
            raise EngineError("vLLM gave a request up: the engine was closed, or has failed")
        cached = last.num_cached_tokens or 0
        if progress is not None:
            progress.cached_tokens = cached
        self._counters["cached_tokens"] += cached
        self._counters["prefilled_tokens"] += len(last.prompt_token_ids or ()) - cached
        return last

    def _params(self, request: SampleRequest, max_tokens: int) -> "VLLMParams":
        from vllm import SamplingParams as VLLMParams
        from vllm.sampling_params import RequestOutputKind

        params, stop_token_ids = request.params, request.observation.stop_token_ids
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise RequestError(
                f"vLLM samples at temperature 0 (greedy), or from {LEAST_TEMPERATURE:g} on, found "
                f"{params.temperature:g}"
            )
        named = {*stop_token_ids, *self._texts.stop_tokens(request.stop)}
        follows = request.progress is not None and request.progress.follows
        with self._our_errors():
            return VLLMParams(
                max_tokens=max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                # Generators on the CPU see the low 32 bits alone; the high ones are mixed in.
                seed=request.seed ^ request.seed >> 32 if params.temperature > 0 else None,
                stop=list(request.stop),
                stop_token_ids=[*self._eos_token_ids, *named],
                spaces_between_special_tokens=False,
                include_stop_str_in_output=True,
                ignore_eos=True,  # they are among the stop tokens
                logprobs=0 if params.logprobs else None,
                detokenize=bool(request.stop),
                output_kind=(
                    RequestOutputKind.CUMULATIVE if follows else RequestOutputKind.FINAL_ONLY
                ),
            )

    def _running(self) -> "AsyncLLM":
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._llm

    def _slot_of(self, target: Target) -> int:
        """Return a target's slot: the centre's follows the genomes', and the base's is the last."""
        if isinstance(target, int):
            return target
        return self.traits.capacity if target == "centre" else self._num_slots - 1

    def _weights_of(self, target: Target) -> tuple[Target, int]:
        """Return which weights of the model a target needs: a key of the turnstile."""
        if target == "base" and self.space.adapter is None:
            return ("base", 0)
        if isinstance(target, int) and not self._num_slots:
            return (target, self._version)
        return ("centre", 0)

    @contextmanager
    def _our_errors(self) -> Generator[None]:
        """Raise errors of vLLM about a request as ours.

        Raises:
            RequestError: vLLM refuses it.
            EngineError: vLLM has failed.
        """
        from vllm.exceptions import VLLMClientError

        try:
            yield
        except (ValueError, VLLMClientError) as error:
            raise RequestError(f"vLLM refuses a request: {informative_line(error)}") from error
        except Exception as error:
            raise self._output.failure("vLLM failed", error) from error

    async def _call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `GenomeWorker` in every rank.

        Raises:
            ESCookbookError: As the worker raised it.
            EngineError: vLLM has failed.
        """
        llm = self._running()
        try:
            answers = await llm.collective_rpc(method, args=arguments)
        except Exception as error:
            raise self._output.failure(f"vLLM failed in {method}", error) from error
        for kind, answer in answers:
            if kind:
                error_class = getattr(errors, kind, EngineError)
                assert issubclass(error_class, ESCookbookError)
                raise error_class(answer)
        return [answer for _, answer in answers]


class Turnstile:
    """Admits requests by the weights that they need. For the tasks of one event loop.

    Args:
        switch: brings in a set of weights; called when no request is inside.

    Attributes:
        current: the set that is there, None if none is known to be.
    """

    def __init__(self, switch: Callable[[Hashable], Awaitable[object]]) -> None:
        self.current: Hashable | None = None
        self._switch = switch
        self._num_inside = 0
        self._num_waiting = Counter[Hashable]()  # the longest waiting comes first
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def using(self, weights: Hashable) -> AsyncGenerator[None]:
        """Load these weights, and keep them while the block runs.

        Raises:
            Exception: What `switch` raised.
        """
        self._num_waiting[weights] += 1
        try:
            while weights != self.current:
                if self._num_inside or next(iter(self._num_waiting)) != weights:
                    await self._changed.wait()
                    continue
                self.current, self._num_inside = None, 1  # The switch is inside, alone.
                try:
                    await self._switch(weights)
                    self.current = weights
                finally:
                    self._num_inside = 0
            self._num_inside += 1
        finally:
            self._num_waiting[weights] -= 1
            if not self._num_waiting[weights]:
                del self._num_waiting[weights]
            self._wake()
        try:
            yield
        finally:
            self._num_inside -= 1
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def merge_fingerprints(
    pieces_of_ranks: "Sequence[Sequence[FingerprintPiece]]", shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the centre's fingerprint: the sum over its parts, each counted once.

    Raises:
        EngineError: Ranks disagree about a part, or lack a part of a parameter.
    """
    values: dict[tuple[str | int, ...], int] = {}
    for pieces in pieces_of_ranks:
        for *place, value in pieces:
            if values.setdefault(tuple(place), int(value)) != value:
                raise EngineError(
                    f"vLLM's ranks disagree about {place[0]}: the engine must be restored"
                )
    covered = Counter[str]()
    for name, row, end_row, column, end_column in values:
        covered[str(name)] += (int(end_row) - int(row)) * (int(end_column) - int(column))
    for name, shape in shapes.items():
        if covered[name] != math.prod(shape):
            raise EngineError(
                f"vLLM's ranks have {covered[name]} elements of {name} between them, and it has "
                f"{math.prod(shape)}"
            )
    return sum(values.values()) % 2**64
