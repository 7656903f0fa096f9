"""Ranks of vLLM's LoRA slots, which a Config is checked by without torch."""

from es_cookbook.common.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM supports (`max_lora_rank`)."""


def slot_rank(rank: int) -> int:
    """Return the least rank of vLLM's LoRA slots that holds genomes of this rank.

    Raises:
        ConfigError: There is none.
    """
    offered = next((offer for offer in LORA_RANKS if offer >= rank), None)
    if offered is None:
        raise ConfigError(
            f"genomes need LoRA slots of rank {rank} (search_space.rank, for low-rank ones x "
            f"engine.terms_per_genome), and vLLM's have a rank of at most {LORA_RANKS[-1]}"
        )
    return offered
