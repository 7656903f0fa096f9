"""Products follow the processor, and nothing that is recorded of steps does."""

import pytest
import torch
from numba.core import config

from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch import host
from es_cookbook.engines.torch.kernels.products import products_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("features", "weights", "products"),
    [
        ("+avx512bf16", torch.bfloat16, torch.bfloat16),
        ("+avx512f,-avx512bf16,-amx-bf16", torch.bfloat16, torch.float32),
        ("+amx-bf16", torch.float16, torch.float32),
        ("+amx-bf16", torch.float32, torch.float32),
        ("no more than VNNI", torch.bfloat16, torch.float32),
    ],
)
def test_products_have_the_fastest_dtype_that_rounds_no_weights(
    monkeypatch: pytest.MonkeyPatch, features: str, weights: torch.dtype, products: torch.dtype
) -> None:
    if features == "no more than VNNI":
        features = "+avx512bf16"
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert products_of(weights, CPU) == products


@pytest.mark.parametrize(("has", "products"), [(True, torch.bfloat16), (False, torch.float32)])
def test_torch_says_whether_an_arm_processor_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, has: bool, products: torch.dtype
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(config, "CPU_FEATURES", "+neon,+lse")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": has})
    assert products_of(torch.bfloat16, CPU) == products


@pytest.mark.parametrize(
    ("dtype", "products", "slow"),
    [
        ("bfloat16", "auto", "engine.dtype=bfloat16: this processor has no instructions"),
        ("auto", "bfloat16", "engine.products=bfloat16: this processor has no instructions"),
        ("auto", "auto", None),
        ("bfloat16", "float32", None),
    ],
)
def test_a_message_says_where_requested_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch, dtype: str, products: str, slow: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(host, "say_once", said.append)
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2")
    chosen = host.chosen_products(products, dtype, torch.bfloat16, CPU)
    if slow is None:
        assert chosen == torch.float32 and not said
    else:
        assert chosen == torch.bfloat16
        assert said[0].startswith(slow) and "engine.products=float32" in said[0]


def test_products_that_would_round_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"these are in float32; set engine\.dtype=bfloat16"):
        host.chosen_products("bfloat16", "auto", torch.float32, CPU)
