"""Histories in which the prefix cache is saved, lost and loaded again, and faults of loading.

tests/features/memory/test_disk_cache.py catches these and more. No torch.
"""

from types import ModuleType
from typing import Any

from lessons.oracle.mutants import Mutant
from lessons.oracle.oracle import History
from nanovllm.engine import block_manager, scheduler
from nanovllm.engine.block_manager import Block
from nanovllm.features.memory import disk_cache

MUTANTS = {
    "a block is loaded with the KV of another one": Mutant(
        disk_cache, "restore", "[-1]]), i", "[-1]]), max(0, i - 1)"
    ),
    "a loaded block is found after any beginning": Mutant(
        disk_cache, "restore", "hash_block(parent_hash, token_ids)", "hash_block(b'', token_ids)"
    ),
}


class DiskHistory(History):
    """A reset is a restart: a new process loads what the old one saved, maybe after a request.

    All requests end before it.
    """

    def __init__(
        self,
        seed: int,
        schedulers: ModuleType = scheduler,
        managers: ModuleType = block_manager,
        disks: ModuleType = disk_cache,
    ) -> None:
        super().__init__(seed, schedulers, managers)
        self.disks: Any = disks
        self.num_loaded = 0
        self.restarts: list[int] = []  # after which steps

    def kv_of(self, block: Block) -> list[tuple[int, int] | None]:
        start = block.block_id * self.size
        return self.runner.memory[start : start + self.size]

    def write_kv(self, block: Block, content: list[tuple[int, int] | None]) -> None:
        start = block.block_id * self.size
        self.runner.memory[start : start + self.size] = content

    def run_all(self) -> None:
        while self.scheduler.has_work():
            self.step()

    def reset(self) -> None:
        self.run_all()
        self.restarts.append(self.steps)
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
