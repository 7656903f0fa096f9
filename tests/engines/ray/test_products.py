"""Engines of a pool on machines that choose different dtypes for matrix products."""

from typing import Any

import pytest

from es_cookbook.common.errors import ConfigError
from tests.engines.ray.test_pool import near_pool
from tests.ray_fakes import LightEngine, NearCluster

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("products", "own"), [("bfloat16", "bfloat16"), (None, "the dtype of the weights")]
)
async def test_engines_that_cannot_multiply_alike_are_refused(
    products: str | None, own: str
) -> None:
    fastest = iter(["float32", products])

    async def build(**_: Any) -> LightEngine:
        return LightEngine("", "", next(fastest))

    with pytest.raises(ConfigError, match=rf"products in {own}, .* float32; .*products=float32"):
        async with near_pool(NearCluster(), engines=2, builder=build):
            pass
