"""Histories of the oracle with a host cache."""

import random
from types import ModuleType

from lessons.oracle.oracle import History, require
from nanovllm.engine import scheduler
from nanovllm.features.kv.host_cache import host_blocks as host_cache
from nanovllm.features.kv.host_cache.host_blocks import HostCacheBlockManager


class HostCacheHistory(History):
    """Most of these histories evict blocks that a later request wants."""

    repeats = 0.9

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, block_managers: ModuleType = host_cache
    ) -> None:
        self.block_managers = block_managers  # may contain a fault
        super().__init__(seed, schedulers)

    def make_blocks(self, _: ModuleType) -> HostCacheBlockManager:
        rng: random.Random = self.rng
        self.size, self.num_blocks = rng.choice((1, 1, 2, 3)), rng.randint(3, 8)
        sizes = self.num_blocks, self.size, rng.choice((2, 4, 8, 30))
        return self.block_managers.HostCacheBlockManager(*sizes)

    def check(self) -> None:
        """The host cache holds what its blocks say, and nothing else."""
        super().check()
        blocks = self.block_manager
        held = [block.block_id for block in blocks.hash_to_host_block.values()]
        everything = sorted([*held, *blocks.host_free])
        require(everything == list(range(blocks.num_host_blocks)), "host")
        for block_hash, block in blocks.hash_to_host_block.items():
            tokens = [pair and pair[0] for pair in self.runner.host.get(block.block_id, [])]
            require(block.block_hash == block_hash and tokens == block.token_ids, "host")
