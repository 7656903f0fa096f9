"""vLLM raises temperatures below 0.01 to 0.01, so they are refused."""

import re

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.engines.ray.pool import RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.engines.vllm.output import LEAST_TEMPERATURE
from es_cookbook.evolution.schedules import Exponential
from es_cookbook.recipes.countdown.train_cli import CLIConfig
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.config import Config

VLLM = VLLMEngineBuilder()


def config(engine: EngineBuilder, temperature: float, **more: object) -> Config:
    sampling = SamplingParams(max_tokens=9, temperature=temperature)
    return chz.replace(CLIConfig(), engine=engine, sampling=sampling, **more)


@pytest.mark.parametrize("engine", [VLLM, RayPoolBuilder(engine=VLLM)])
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.0099])
def test_a_temperature_that_vllm_would_raise_is_refused(
    engine: EngineBuilder, temperature: float
) -> None:
    said = f"={temperature:g}: engine={engine.name} samples at 0 (greedy), or from 0.01 on"
    with pytest.raises(ConfigError, match=re.escape(f"sampling.temperature{said}")):
        config(engine, temperature)
    with pytest.raises(ConfigError, match=re.escape(f"eval_temperature{said}")):
        config(engine, 1.0, eval_temperature=temperature)
    with pytest.raises(ConfigError, match=re.escape("temperature_schedule must stay above 0")):
        config(engine, 1.0, temperature_schedule=Exponential(final=1e-9))
    for accepted in (0.0, LEAST_TEMPERATURE, 1.0):
        config(engine, accepted, eval_temperature=accepted)
    config(TorchEngineBuilder(), temperature, eval_temperature=temperature)


def test_it_is_the_temperature_from_which_on_vllm_leaves_them() -> None:
    params = pytest.importorskip("vllm.sampling_params").SamplingParams
    assert params(temperature=LEAST_TEMPERATURE).temperature == LEAST_TEMPERATURE
    assert params(temperature=LEAST_TEMPERATURE * 0.999).temperature == LEAST_TEMPERATURE
