"""Histories of the oracle with a second tier in host memory."""

import random
from array import array
from types import ModuleType

from nanovllm.engine import scheduler
from nanovllm.features.host_tier import blocks as host_tier
from nanovllm.features.host_tier.blocks import TieredBlockManager
from nanovllm.tools.oracle.oracle import History, require


class TieredHistory(History):
    """Most of these histories evict blocks that a later request wants."""

    repeats = 0.9

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, tiers: ModuleType = host_tier
    ) -> None:
        self.tiers = tiers  # may contain a fault
        super().__init__(seed, schedulers)

    def make_blocks(self, _: ModuleType) -> TieredBlockManager:
        rng: random.Random = self.rng
        self.size, self.num_blocks = rng.choice((1, 1, 2, 3)), rng.randint(3, 8)
        self.host_blocks = rng.choice((2, 4, 8, 30))
        return self.tiers.TieredBlockManager(self.num_blocks, self.size, self.host_blocks)

    def check(self) -> None:
        """What each tier holds is what its index says, and the same under the same identity."""
        super().check()
        blocks = self.blocks
        held = [block.block_id for block in blocks.host_index.values()]
        everything = sorted([*held, *blocks.host_free])
        require(everything == list(range(blocks.num_host_blocks)), "host")
        names = dict[int, tuple[int, bytes]]()
        for block in (*blocks.host_index.values(), *blocks.blocks):
            if block.identity:
                name = block.parent, block.token_ids
                same = names.setdefault(block.identity, name) == name
                require(same, "host", "an identity has two blocks")
        for key, block in blocks.host_index.items():
            pairs = self.runner.host[block.block_id]
            tokens = array("I", [pair[0] if pair else 99 for pair in pairs]).tobytes()
            require(block.hash == key and tokens == block.token_ids, "host")
