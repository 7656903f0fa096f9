"""The same tokens earn the same rewards here as by the library's own path.

That path is its own: environment, agent, chat program, server of model calls, client of a provider,
message graph and scoring. The provider says what the policy of the bridge said.
"""

import itertools
import json
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from es_cookbook.plugins.verifiers.dataset import TasksetProblems
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Trajectory
from tests.chat_templates import CHATML, tokenizer_with

pytestmark = pytest.mark.xdist_group("verifiers")

TOKENIZER = tokenizer_with(CHATML)


class Provider:
    """Says the turns of a trajectory over HTTP, as an OpenAI-compatible server streams them."""

    def __init__(self) -> None:
        self.turns: list[tuple[str, int, int, str]] = []
        self.asked = 0

    def will_say(self, trajectory: Trajectory) -> None:
        self.turns = [
            (
                turn.action.text,
                len(turn.observation.tokens_T),
                len(turn.action.tokens_T),
                turn.action.stop_reason,
            )
            for turn in trajectory.transitions
        ]

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        from aiohttp import web

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _answer(self, request):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        from aiohttp import web

        text, prompt, sampled, reason = self.turns.pop(0)
        self.asked += 1
        common = {"id": str(self.asked), "object": "chat.completion.chunk", "created": 1}
        delta = {"role": "assistant", "content": text}
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": sampled,
                    "total_tokens": prompt + sampled,
                },
            },
        ]
        lines = [json.dumps({**common, "model": "m", **chunk}) for chunk in chunks]
        body = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
        return web.Response(text=body, content_type="text/event-stream")


def texts_for(answer: int | None, rng: random.Random) -> Sequence[str]:
    if answer is not None:
        return [str(rng.choice([answer, rng.randrange(18)])) + rng.choice(["", "", " apples"])]
    guesses = [str(rng.randrange(1, 9)) for _ in range(60)]
    return [guess + ("!" if rng.random() < 0.1 else "") for guess in guesses]


@pytest.mark.parametrize("package", ["es_sums", "es_guess"])
async def test_twenty_rollouts_have_the_same_rewards_and_metrics(package: str) -> None:
    import verifiers.v1 as vf

    from es_cookbook.plugins.verifiers.library import find_taskset

    problems = TasksetProblems(taskset=find_taskset(package), problems_per_generation=1, num_test=0)
    dataset = (await problems(TOKENIZER)).train
    assert isinstance(dataset, ProblemDataset)
    seat = {"es_sums": "agent", "es_guess": "player"}[package]
    agent = {
        "harness": {"id": "es_in_process"},
        "max_turns": problems.chat.max_turns,
        "runtime": {"type": "subprocess"},
    }
    config = vf.resolve_env_config({"taskset": {"id": package}, seat: agent})
    env, provider, rng = vf.load_environment(config), Provider(), random.Random(1)
    rewards = set[float]()
    async with provider.serving() as url, env.serving():
        client = vf.EvalClientConfig(base_url=url)
        context = vf.ModelContext(model="m", client=client, sampling=vf.SamplingConfig())
        for builder in itertools.islice(itertools.cycle(dataset.builders), 20):
            texts = texts_for(getattr(builder.task.data, "answer", None), rng)
            group = await builder.make_envs(1)
            ours = await run_rollout(group.envs[0], Script(texts, TOKENIZER))
            await group.close()
            provider.will_say(ours)
            episode = await env.run_episode(builder.task, context)
            assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
            (trace,) = episode.traces
            assert trace.reward == ours.reward and not provider.turns
            metrics = ours.transitions[-1].metrics
            for name, value in trace.metrics.items():
                assert metrics[name] == value
            for name, reward in trace.rewards.items():
                assert reward is not None and metrics[f"reward_{name}"] == reward.score
            assert ours.transitions[-1].logs["stop"] == trace.stop_condition
            rewards.add(trace.reward)
    assert len(rewards) > 5
