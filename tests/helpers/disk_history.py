"""Histories in which the prefix cache is saved, lost and loaded again."""

from types import ModuleType
from typing import Any

from lessons.oracle.oracle import History
from nanovllm.engine import scheduler
from nanovllm.engine.block_manager import Block
from nanovllm.features.kv import disk_cache


class DiskHistory(History):
    """A reset is a restart: a new process loads what the old one saved, maybe after a request.

    All requests end before it.
    """

    def __init__(
        self, seed: int, schedulers: ModuleType = scheduler, disks: ModuleType = disk_cache
    ) -> None:
        super().__init__(seed, schedulers)
        self.disks: Any = disks  # may contain a fault
        self.num_loaded = 0

    def kv_of(self, block: Block) -> list[Any]:
        return self.runner.memory[self.runner.slots_of(block.block_id)]

    def write_kv(self, block: Block, content: list[Any]) -> None:
        self.runner.memory[self.runner.slots_of(block.block_id)] = content

    def run_all(self) -> None:
        while self.scheduler.has_work():
            self.step()

    def reset(self) -> None:
        self.run_all()
        cached = self.disks.cached_blocks(self.block_manager)
        saved = [(block.parent_block_hash.hex(), block.token_ids) for block in cached]
        kv = [self.kv_of(block) for block in cached]
        super().reset()
        if self.rng.random() < 0.5:
            self.add()
            self.run_all()
        if self.block_manager.enable_prefix_caching:
            for block, i in self.disks.restore(self.block_manager, saved):
                self.write_kv(block, kv[i])
                self.num_loaded += 1

    abandon = reset  # so that it happens more often
