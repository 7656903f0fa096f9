"""Single-turn problems: an Env, its group builder and its prompt."""

import functools

import pytest

from es_cookbook.common.errors import ModelError
from es_cookbook.rl.messages import template as templates
from es_cookbook.rl.problem_env import Grade, ProblemEnv, ProblemGroupBuilder, TrainedOn, digest_of
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.types import Action, Observation
from tests.fakes import Word
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_tokenizer


class Parrot(ProblemEnv):
    """Pays for the right word."""

    def __init__(self, observation: Observation, word: str) -> None:
        super().__init__(observation)
        self.word = word

    def grade(self, text: str) -> Grade:
        return Grade(float(text == self.word), {"length": float(len(text))}, {"said": text})


BUILDER = ProblemGroupBuilder(
    functools.partial(Parrot, Observation((1, 2)), "hi"), name="parrot", problem_tags=("birds",)
)


async def test_one_answer_is_graded_and_ends_the_rollout() -> None:
    (env,) = (await BUILDER.make_envs(1)).envs
    assert await env.initial_observation() == Observation((1, 2), is_last=True)
    result = await env.step(Action((3, 4), "hi", "stop"))
    assert (result.reward, result.done, result.next_observation) == (1.0, True, None)
    assert (result.metrics, result.logs) == ({"length": 2.0}, {"said": "hi"})


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}", r"roles system, user \(TemplateSyntaxError: Unexpected end of"),
        (
            "{{ raise_exception('no\nsystem') }}",
            r"roles system, user \(TemplateError: no..system\)",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            r"\(TimeoutError: it does not end within 0.2 s\)",
        ),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_said(
    template: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "PATIENCE", 0.2)
    tokenizer = build_tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=sentence):
        render_prompt(tokenizer, "3,4=7", chat=True, system="9")


def test_characters_that_the_tokenizer_does_not_know_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = build_tokenizer("0123456789+=")
    render_prompt(tokenizer, "1+2=", chat=False)
    assert not caplog.messages
    render_prompt(tokenizer, "[1]+[é]=", chat=False)
    render_prompt(tokenizer, "[2]=", chat=False)  # Told before.
    (line,) = caplog.messages
    assert "does not know '[', ']', 'é': the model does not see them in '[1]+[é]='" in line


HEAD = b"es_cookbook digests of training problems 1\n"


def problem(content: str, *prompt_T: int) -> ProblemGroupBuilder:
    env = functools.partial(Word, Observation(prompt_T))
    contents = (digest_of(content),) if content else ()
    return ProblemGroupBuilder(env, "a name", contents=contents)


def test_problems_of_one_content_or_one_prompt_are_the_same() -> None:
    known = TrainedOn.of(p.digests for p in (problem("1+1", 5, 6), problem("", 7)))
    assert known is not None
    same = [problem("1+1", 8), problem("2+2", 5, 6), problem("", 7)]
    asked = [*same, problem("2+2", 5), problem("", 8)]
    assert [known.overlap([p.digests]) for p in asked] == [1, 1, 1, 0, 0]
    assert known.overlap(p.digests for p in asked) == 3
    assert known.overlap([(0,), (2**64 - 1,)]) == 0


def test_a_digest_takes_eight_bytes_and_is_read_back() -> None:
    known = TrainedOn.of((digest_of(str(i)),) for i in range(1000))
    assert known is not None
    data = known.and_of(known).encode()
    digests = data.removeprefix(HEAD)
    assert (len(data), len(digests)) == (len(HEAD) + 8000, 8000)
    read = TrainedOn.decode(data)
    assert read is not None and read.overlap((digest_of(str(i)),) for i in range(2000)) == 1000
    assert digest_of("7").to_bytes(8, "little") in digests
