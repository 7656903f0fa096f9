"""Engines of a pool on machines that choose different dtypes for matrix products."""

from typing import Any

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Step, Term
from tests.engines.ray.test_pool import near_pool
from tests.ray_fakes import LightEngine, NearCluster

pytestmark = pytest.mark.anyio


async def test_engines_on_different_machines_multiply_as_the_first_does_and_so_do_later_ones() -> (
    None
):
    fastest = iter(["bfloat16", "float32", "float32", "float32", "float32"])
    built: list[str] = []

    @chz.chz
    class OnManyMachines(TorchEngineBuilder):
        async def __call__(self, **_: Any) -> Any:
            machine = next(fastest)
            built.append(machine if self.products == "auto" else self.products)
            return LightEngine("", "", built[-1])

    cluster = NearCluster()
    async with near_pool(cluster, engines=2, builder=OnManyMachines()) as pool:
        assert built == ["bfloat16", "float32", "bfloat16"]
        cluster.dies_in = ["apply"]
        await pool.apply(Step((Term(7, 0.25),)))
        await pool.add_engines(1)
        assert built[3:] == ["bfloat16", "bfloat16"]
        assert pool.traits.products == "bfloat16"
        assert {member.built[0].products for member in pool.members} == {"bfloat16"}


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
