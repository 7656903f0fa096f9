"""The search space that an optimizer needs, for tests that try all of them."""

from collections.abc import Mapping

NEEDED: Mapping[str, str] = {
    "cma": "adapter",
    "sep_cma": "adapter",
    "qes": "quant_codes",
    "lozo": "lazy_low_rank",
}
"""Optimizer -> search space; those that are not in it take any."""
