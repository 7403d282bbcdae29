"""Divides the memory of a hybrid model between KV blocks and states."""

from __future__ import annotations

from nanovllm.config import EngineConfig
from nanovllm.utils.log import logger

SLOTS_PER_ROW = 2


def num_states(config: EngineConfig, state_bytes: int, max_bytes: int) -> tuple[int, int, int]:
    """Return (rows, slots for the prefix cache, bytes of all states) for states of `state_bytes`.

    States take at most half of `max_bytes`; the KV cache takes the rest. If they do not fit,
    fewer sequences run at a time.
    """
    fit = max_bytes // 2 // state_bytes - 1  # the padding row has a state too
    slots = config.num_state_slots if config.enable_prefix_caching else 0
    if slots is None:
        rows = max(1, min(config.max_num_seqs, fit // (1 + SLOTS_PER_ROW)))
        slots = max(0, min(rows * SLOTS_PER_ROW, fit - rows))
    else:
        rows = max(1, min(config.max_num_seqs, fit - slots))
    size = (rows + 1 + slots) * state_bytes
    if size > max_bytes:
        raise ValueError(
            f"the states of {rows} sequence(s) and num_state_slots={slots:,} take {size:,} bytes, "
            f"and KV cache and states may take {max_bytes:,}; lower num_state_slots, or set "
            "a larger kv_cache_memory_bytes"
        )
    if rows < config.max_num_seqs:
        logger.info(
            f"a state takes {state_bytes / 2**20:,.1f} MiB, which limits max_num_seqs to {rows} "
            f"instead of {config.max_num_seqs}"
        )
    return rows, slots, size
