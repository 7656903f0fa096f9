"""Soft prompts and steering vectors: as plain transformers answers with them, and exported."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from es_cookbook import LowRank, RayPoolBuilder, TorchEngineBuilder, VLLMEngineBuilder
from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.checkpoints.models import parameter_infos
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.engines.base import LogprobsRequest, SampleRequest, Target
from es_cookbook.evolution.genome import Genome, Offsets, Step, Term
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.vectors.spaces import SoftPrompt, Steering
from es_cookbook.rl.types import Action
from es_cookbook.runs.centre.replay import open_replay
from es_cookbook.runs.export.export import write_export
from tests.engines.torch.reference import request, running_engine, sample_all, score_all
from tests.runs.recorded_run import record_run
from tests.tiny_models import VOCABULARY, new_model, save_with_tokenizer
from tests.tiny_run import tiny

SPACES: dict[str, SearchSpaceBuilder] = {
    "soft prompt": SoftPrompt(num_tokens=3, init_seed=4),
    "steering": Steering(),
}
PROMPT, SIGMA = (5, 7, 9, 12, 30, 3), 0.5


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def tokenized(space: SearchSpaceBuilder, path: Path) -> SearchSpaceBuilder:
    return space.tokenized(lambda text: AutoTokenizer.from_pretrained(path).encode(text))


class Plain:
    """A plain transformers model, given vectors by `inputs_embeds` or by hooks."""

    def __init__(self, path: Path, space: SearchSpaceBuilder) -> None:
        from es_cookbook.checkpoints.linear_weights import named_weights
        from es_cookbook.evolution.centre import Centre

        self.model = load(path)
        self.space = tokenized(space, path)(parameter_infos(self.model))
        self.centre = Centre(dict(named_weights(self.model)), self.space)
        self.path = path

    @torch.no_grad()
    def logits(self, genome: Genome | None, tokens: tuple[int, ...]) -> torch.Tensor:
        """Those of the tokens; None is the base."""
        if genome is None:
            return self.model(torch.tensor([tokens])).logits[0]
        values = {name: self.centre.perturbed(genome, name) for name in self.space.shapes}
        embeds = self.model.get_input_embeddings()(torch.tensor([tokens]))
        if self.space.num_virtual:
            (prompt,) = values.values()
            logits = self.model(inputs_embeds=torch.cat([prompt[None], embeds], 1)).logits[0]
            return logits[len(prompt) :]
        assert self.space.vectors is not None
        hooks = [
            self.model.get_submodule(module).register_forward_hook(
                lambda _, __, out, v=values[name]: (
                    (out[0] + v, *out[1:]) if isinstance(out, tuple) else out + v
                )
            )
            for name, module in self.space.vectors.items()
        ]
        logits = self.model(inputs_embeds=embeds).logits[0]
        for hook in hooks:
            hook.remove()
        return logits

    def check(self, genomes_G: list[Genome], asked: SampleRequest, action: Action) -> None:
        genome = self.who(genomes_G, asked.target)
        prompt = asked.observation.tokens_T
        logits = self.logits(genome, prompt + action.tokens_T)[len(prompt) - 1 : -1]
        assert tuple(logits.argmax(-1).tolist()) == action.tokens_T
        own = logits.log_softmax(-1).gather(1, torch.tensor(action.tokens_T)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(action.logprobs_T), own, rtol=0, atol=1e-4)

    @staticmethod
    def who(genomes_G: list[Genome], target: Target) -> Genome | None:
        if isinstance(target, int):
            return genomes_G[target]
        return Genome() if target == "centre" else None


def any_model(family: str, tiny_model: Callable[[str], Path], path: Path) -> Path:
    """A tiny model; those that are not of the flat path are made here."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    match family:
        case "bloom":
            model = new_model("bloom", **sizes, n_head=4)
        case "mamba":
            model = new_model("mamba", **sizes, state_size=4)
        case "smollm3":
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
            model = new_model("smollm3", **sizes, no_rope_layers=[1, 0], pad_token_id=0)
        case "gpt2":
            model = new_model("gpt2", **sizes, num_attention_heads=4)
        case "phi":
            model = new_model("phi", **sizes, num_attention_heads=4, intermediate_size=48)
        case _:
            return tiny_model(family)
    save_with_tokenizer(model, path)
    return path


@pytest.mark.daily
@pytest.mark.parametrize("family", ["qwen2", "gpt_neox", "bloom", "mamba"])
@pytest.mark.parametrize("which", SPACES)
async def test_every_target_answers_as_a_plain_model_with_its_vectors(
    tiny_model: Callable[[str], Path], tmp_path: Path, which: str, family: str
) -> None:
    path = any_model(family, tiny_model, tmp_path / "model")
    plain = Plain(path, SPACES[which])
    number = sum(torch.Size(shape).numel() for shape in plain.space.shapes.values())
    genomes_G = [Genome((Term(seed, SIGMA),)) for seed in (1, 2)]
    genomes_G.append(Genome(offsets=Offsets.of(np.linspace(-1, 1, number))))
    targets: tuple[Target, ...] = (0, 1, 2, "centre", "base")
    step = Step((Term(9, 0.3),))
    asked = [request(t, PROMPT[:n], max_tokens=6, seed=n) for t in targets for n in (6, 6, 5, 2)]
    async with running_engine(path, SPACES[which]) as engine:
        await engine.load(genomes_G)
        actions = await sample_all(engine, asked)
        again = [(await sample_all(engine, [one]))[0] for one in asked]
        # Alone, and with cached prefixes; a model's own forward may round differently.
        tokens = [[action.tokens_T for action in each] for each in (actions, again)]
        assert tokens[0] == tokens[1] and (again == actions or family in ("bloom", "mamba"))
        for one, action in zip(asked, actions, strict=True):
            plain.check(genomes_G, one, action)
        assert len({action.logprobs_T for action in actions[::4]}) >= 4
        turns = zip(asked[::4], actions[::4], strict=True)
        turns = [(o.target, (*o.observation.tokens_T, *a.tokens_T, 5)) for o, a in turns]
        asked_next = [request(target, tokens, max_tokens=4) for target, tokens in turns]
        for one, action in zip(asked_next, await sample_all(engine, asked_next), strict=True):
            plain.check(genomes_G, one, action)
        scored = [LogprobsRequest(t, PROMPT[:4], PROMPT[4:]) for t in targets]
        for one, logprobs in zip(scored, await score_all(engine, scored), strict=True):
            logits = plain.logits(plain.who(genomes_G, one.target), PROMPT)[3:-1].log_softmax(-1)
            own = logits.gather(1, torch.tensor(PROMPT[4:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), own, rtol=0, atol=1e-4)
        assert await engine.apply(step) == plain.centre.apply(step)
        await engine.load(genomes_G[:2])
        asked = [one for one in asked if one.target != 2]
        for one, action in zip(asked, await sample_all(engine, asked), strict=True):
            plain.check(genomes_G, one, action)


async def test_auto_goes_as_far_as_the_embedding_is_large(
    tiny_model: Callable[[str], Path],
) -> None:
    infos = parameter_infos(load(tiny_model("qwen2")))
    table = load(tiny_model("qwen2")).get_input_embeddings().weight
    rms = float(table.square().mean().sqrt())
    assert SoftPrompt()(infos).largest_sigma == pytest.approx(rms)
    assert Steering()(infos).largest_sigma == math.inf
    unknown = [dataclasses.replace(info, rms=None) for info in infos]
    assert SoftPrompt()(unknown).largest_sigma == math.inf, "an architecture without weights"


async def test_a_soft_prompt_of_a_text_begins_as_that_text(
    tiny_model: Callable[[str], Path],
) -> None:
    path = tiny_model("qwen2")
    text = AutoTokenizer.from_pretrained(path).encode("123", add_special_tokens=False)
    asked = [request("centre", PROMPT), request("base", (*text, *PROMPT))]
    async with running_engine(path, SoftPrompt(text="123"), max_model_len=40) as engine:
        assert engine.traits.context_length == 40 - len(text)
        centre, base = await sample_all(engine, asked)
    assert centre == base
    longer = SoftPrompt(text_tokens=(3, 4), num_tokens=5)(parameter_infos(load(path)))
    found = longer.base(dict(load(path).named_parameters()))
    rows = load(path).get_input_embeddings().weight[[3, 4, 3, 4, 3]]
    assert all(torch.equal(value, rows) for value in found.values())


@pytest.mark.parametrize("which", SPACES)
def test_an_export_answers_as_the_run(
    tiny_model: Callable[[str], Path], tmp_path: Path, which: str
) -> None:
    path = tiny_model("qwen2")
    steps = (Step((Term(1, 0.5),)), Step((Term(2, 0.3),)))
    run = record_run(tmp_path / "run", path, SPACES[which], steps)
    written = write_export(open_replay(run.path), tmp_path / "out")
    plain = Plain(path, SPACES[which])
    plain.centre.restore(steps)
    expected = plain.logits(Genome(), PROMPT)
    if which == "soft prompt":
        model = PeftModel.from_pretrained(load(path), str(tmp_path / "out")).eval()
    else:
        there: dict[str, PreTrainedModel] = {}
        exec(written.loading[0].text, there)  # the code that its README gives
        model = there["model"].float()
    with torch.no_grad():
        found = model(input_ids=torch.tensor([PROMPT])).logits[0, -len(PROMPT) :]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    refused = ({"rank": 1},) if which == "steering" else ({"merge": True}, {"rank": 1})
    for options in refused:
        with pytest.raises(
            ModelError, match="vectors beside the model's weights: es-cookbook export"
        ):
            write_export(open_replay(run.path), tmp_path / "no", **options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "smollm3", "gpt2", "phi"])
async def test_a_whole_model_with_biases_answers_as_the_run(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    path = any_model(family, tiny_model, tmp_path / "base")
    space = Steering(exclude=("*.0.*",))  # the last layer of two
    steps = (Step((Term(1, 0.5),)), Step((Term(2, 0.3),)))
    run = record_run(tmp_path / "run", path, space, steps)
    out = tmp_path / "out"
    write_export(open_replay(run.path), out, merge=True)
    plain = Plain(path, space)
    plain.centre.restore(steps)
    model = load(out)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([PROMPT])).logits[0]
    expected = plain.logits(Genome(), PROMPT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (expected - plain.logits(None, PROMPT)).abs().max() > 0.1
    if family in ("llama", "qwen2"):
        (vector,) = plain.centre.weights.values()
        assert torch.equal(model.get_parameter("model.layers.1.mlp.down_proj.bias"), vector)
        assert not model.get_parameter("model.layers.0.mlp.down_proj.bias").any()
    names = (AutoTokenizer.from_pretrained(each).encode("1234") for each in (path, out))
    assert len({tuple(tokens) for tokens in names}) == 1
    asked = [request("centre", PROMPT, max_tokens=8)]
    async with running_engine(path, space) as engine:
        for step in steps:
            await engine.apply(step)
        (own,) = await sample_all(engine, asked)
    for again in (out, run.path):  # the export, and the run as a base
        async with running_engine(again, LowRank()) as engine:
            (action,) = await sample_all(engine, asked)
        assert action.tokens_T == own.tokens_T
        torch.testing.assert_close(action.logprobs_T, own.logprobs_T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_without_such_biases_makes_no_whole_model(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    run = record_run(tmp_path / "run", tiny_model(family), Steering(), (Step((Term(1, 0.5),)),))
    with pytest.raises(ModelError, match=f"layers of {family.title()}ForCausalLM have no bias"):
        write_export(open_replay(run.path), tmp_path / "no", merge=True)
    with pytest.raises(ModelError, match=f"model_name={run.path}: the layers of"):
        model_directory(str(run.path))


async def test_what_cannot_be_searched_is_one_sentence(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    for space in SPACES.values():
        with pytest.raises(ConfigError, match=r"engine=vllm cannot host (SoftPrompt|Steering)"):
            tiny(tmp_path, search_space=space, engine=RayPoolBuilder(engine=VLLMEngineBuilder()))
    with pytest.raises(ConfigError, match=r"leave out search_space\.include"):
        SoftPrompt(include=("*q_proj*",))
    with pytest.raises(ConfigError, match="text must not be empty"):
        SoftPrompt(text="")
    with pytest.raises(ConfigError, match="leave it out beside a text"):
        SoftPrompt(text="a", init_seed=1)
    with pytest.raises(ConfigError, match=r"num_tokens must be at least 2, .* found 1"):
        SoftPrompt(text="a b", num_tokens=1).tokenized(lambda text: [*map(len, text.split())])
    with pytest.raises(ConfigError, match="selects no layer"):
        Steering(include=("*embed*",))(parameter_infos(load(tiny_model("qwen2"))))
    with pytest.raises(ConfigError, match="text_tokens must be 0 to"):
        SoftPrompt(text_tokens=(10**6,))(parameter_infos(load(tiny_model("qwen2"))))
    with pytest.raises(ConfigError, match="Gemma3ForCausalLM cannot have vectors"):
        await TorchEngineBuilder()(model_name=str(tiny_model("gemma3")), search_space=SoftPrompt())
    with pytest.raises(ConfigError, match="40 virtual tokens leave no room"):
        await TorchEngineBuilder(device="cpu", max_model_len=41)(
            model_name=str(tiny_model("qwen2")), search_space=SoftPrompt(num_tokens=40)
        )
