"""A solution of `python -m lessons build policy`."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.policies import AGING
from nanovllm.engine.sequence import Sequence


def longest_output_first(seq: Sequence, blocks: BlockManager) -> int:
    return AGING * seq.arrival - (seq.max_length - seq.num_prompt)
