"""Questions that need two searches: the index, the world, rewards and the dataset."""

from collections.abc import Sequence

from es_cookbook.recipes.search.dataset import BM25, SearchEnv, chat_of, people, search
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Trajectory
from tools.bundled import search as warm_start
from tools.warm_start import chat_tokenizer

TOKENIZER = chat_tokenizer(warm_start.CHARACTERS, warm_start.WORDS)
CHAT = Chat(TOKENIZER, ChatOptions(max_turns=4, tools_in="nowhere"), [search])


async def played(texts: Sequence[str]) -> Trajectory:
    env = SearchEnv(CHAT, people()[0], "compact")
    return await run_rollout(env, Script(texts, TOKENIZER))


def test_bm25_prefers_rare_words_short_texts_and_repeated_words() -> None:
    texts = ["a cat", "a cat and a dog and a bird", "a dog", "dog dog a", "a fish"]
    assert BM25(texts).search("cat", 9) == ["a cat", "a cat and a dog and a bird"]
    assert BM25(texts).search("dog", 1) == ["dog dog a"]
    assert BM25(texts).search("the fish, a", 1) == ["a fish"]
    assert BM25(texts).search("horse", 9) == BM25([]).search("cat", 9) == []


async def test_asking_for_the_river_finds_it_and_the_town_alone_does_not() -> None:
    person = people()[0]
    right = await played(chat_of(person, "hermes"))
    assert right.reward == 1.0
    careless = await played(chat_of(person, "hermes", asks_for_river=False))
    assert careless.reward == 0.0
    for trajectory in (right, careless):
        metrics = trajectory.transitions[-1].metrics
        assert (metrics["well_formed"], metrics["tool_calls"], metrics["turns"]) == (1.0, 2.0, 3.0)
