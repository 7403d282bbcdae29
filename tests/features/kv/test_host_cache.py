"""The host cache: evicted KV blocks that come back. Bookkeeping, copies, and whole engines."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_llm
from host_cache_history import HostCacheHistory
from oracle_engine import plain_sequence

from lessons.oracle.mutants import Mutant, apply
from lessons.oracle.oracle import run_history
from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import Sequence
from nanovllm.features.kv.host_cache import host_blocks as host_cache
from nanovllm.features.kv.host_cache import pool as host_pool
from nanovllm.features.kv.host_cache.host_blocks import HostBlock, HostCacheBlockManager
from nanovllm.features.kv.host_cache.pool import HostPool
from nanovllm.loading import memory
from nanovllm.models.fp8 import FP8
from nanovllm.plan import BlockCopy, StepPlan

SLOW = pytest.mark.slow
GIB = 2**30


# ---- the bookkeeping: histories and mutants ----


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 600), marks=SLOW)])
def test_random_histories(seeds: range) -> None:
    histories = [run_history(seed, make=HostCacheHistory) for seed in seeds]
    managers = [history.block_manager for history in histories]
    assert sum(blocks.saved_blocks for blocks in managers) > 5 * len(seeds)
    assert 2 * sum(blocks.loaded_blocks for blocks in managers) > len(seeds)
    assert sum(blocks.lost_blocks for blocks in managers) > len(seeds)
    assert sum(history.scheduler.preemptions for history in histories) > len(seeds)


BLOCKS = host_cache
BLOCKS_MUTANTS = {
    "a save is not planned": Mutant(
        BLOCKS, "_save", "self._saves.append(BlockCopy(block.block_id, host_id))", "pass"
    ),
    "a block is saved after it was overwritten": Mutant(
        BLOCKS,
        "fill_copies",
        "plan.saves, plan.loads = self._saves, self._loads",
        "plan.saves, plan.loads, self.late = ([*getattr(self, 'late', [])], self._loads, self._saves)",
    ),
    "a load is not planned": Mutant(
        BLOCKS,
        "_load",
        "self._loads.append(BlockCopy(host_block.block_id, block.block_id))",
        "pass",
    ),
    "a host block that is loaded is saved over": Mutant(
        BLOCKS, "attach_cached", "self._busy.add(matched[i].block_id)", "pass"
    ),
    "two blocks of a step are saved to one": Mutant(
        BLOCKS, "_save", "self._busy.add(host_id)", "pass"
    ),
    "blocks for loads are not counted": Mutant(
        BLOCKS,
        "_save",
        "HostBlock(host_id, 0, *content)",
        "HostBlock(host_id, 1, *content)",
    ),
    "a saved block is not forgotten when it is replaced": Mutant(
        BLOCKS, "_drop", "del self.hash_to_host_block[block.block_hash]", "pass"
    ),
    "an abandoned step's host blocks stay cached": Mutant(
        BLOCKS,
        "_free_all",
        "self.hash_to_host_block: OrderedDict[bytes, HostBlock] = OrderedDict()",
        "self.hash_to_host_block = getattr(self, 'hash_to_host_block', OrderedDict())",
    ),
}


@SLOW
@pytest.mark.parametrize("name", BLOCKS_MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    mutant = apply(BLOCKS_MUTANTS[name])
    with pytest.raises(AssertionError):
        for seed in range(400):
            run_history(seed, make=HostCacheHistory, block_managers=mutant)


class Blocks(HostCacheBlockManager):
    """Computes sequences of tokens at once, and returns the moves that this takes."""

    def run(self, *token_ids: int) -> tuple[Sequence, StepPlan]:
        seq, plan = plain_sequence(list(token_ids)), StepPlan()
        self.attach_cached(seq, self.match(seq))
        while self.num_needed(seq, len(token_ids)):
            self.append_block(seq)
        seq.num_computed = len(token_ids)
        self.cache_full_blocks(seq)
        self.fill_copies(plan)
        return seq, plan

    def where(self, *token_ids: int) -> str:
        """Of each matched block of a prompt: d on the device, h in host memory."""
        matched = self.match(plain_sequence([*token_ids, 0]))
        return "".join("h" if isinstance(b, HostBlock) else "d" for b in matched)


def test_an_evicted_block_comes_back_once_saved() -> None:
    blocks = Blocks(3, 2, 8)
    seq, plan = blocks.run(1, 1, 2, 2, 3)
    assert (plan.saves, plan.loads) == ([], [])
    blocks.release(seq)
    assert blocks.where(1, 1, 2, 2) == "dd"
    other, plan = blocks.run(7, 7, 8, 8, 9, 9)  # takes all three blocks
    assert [move.target for move in plan.saves] == [0, 1]
    assert blocks.where(1, 1, 2, 2) == "hh"
    blocks.release(other)
    seq, plan = blocks.run(1, 1, 2, 2, 3)
    assert [move.source for move in plan.loads] == [1, 0]  # the first block was saved last
    assert [move.target for move in plan.loads] == seq.block_table[:2]
    assert seq.num_computed == 5
    assert blocks.stats()["host_spared_tokens"] == 4
    # It keeps its copy: evicted again, it is not saved again.
    blocks.release(seq)
    saved = blocks.saved_blocks
    other, plan = blocks.run(7, 7, 8, 8, 9, 9)
    assert blocks.where(1, 1, 2, 2) == "hh"
    assert blocks.saved_blocks == saved
    assert not {0, 1} & {move.target for move in plan.saves}


# ---- the copies ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_copies_of_every_dtype(dtype: torch.dtype) -> None:
    cache = torch.randn(3, 2, 6, 2, 4, 8).to(dtype)
    before, pool = cache.clone(), HostPool(4, cache)
    pool.save(cache, [BlockCopy(5, 0), BlockCopy(2, 3)])
    cache.view(torch.uint8).fill_(255)  # NaN
    pool.load(cache, [BlockCopy(3, 1), BlockCopy(0, 4)])
    assert torch.equal(cache[:, :, 1].float(), before[:, :, 2].float())
    assert torch.equal(cache[:, :, 4].float(), before[:, :, 5].float())
    assert cache[:, :, [0, 2, 3, 5]].float().isnan().all()


@pytest.mark.parametrize("backend", ["numba", "sdpa", "triton"])
def test_the_order_of_moves(path: Path, backend: str) -> None:
    """A plan saves a block, copies another over it, and loads what it has just saved."""
    if backend == "numba":
        pytest.importorskip("numba")
    llm = random_llm(path, swap_space=2**-10, attention_backend=backend)
    runner = llm.engine.runner
    cache = runner.attention.cache
    cache.normal_()
    before = cache.clone()
    moves = dict(
        saves=[BlockCopy(1, 7)],
        block_copies=[BlockCopy(2, 1), BlockCopy(1, 3)],
        loads=[BlockCopy(7, 2)],
    )
    runner.run(StepPlan(**moves, **one_token()))()
    assert torch.equal(cache[:, :, 1], before[:, :, 2])
    assert torch.equal(cache[:, :, 3], before[:, :, 1])
    assert torch.equal(cache[:, :, 2], before[:, :, 1])
    assert torch.equal(cache[:, :, 4:], before[:, :, 4:])


def one_token() -> dict:
    from nanovllm.plan import Chunk, NewRow, ResultKind, RowSampling

    new_row = NewRow(0, [0], RowSampling(0.0, seed=0))
    return dict(new_rows=[new_row], chunks=[Chunk(0, 0, [5], ResultKind.TOKEN)], num_tokens=1)


# ---- whole engines ----

PARAMS = [
    SamplingParams(
        temperature=0.7 * (i % 2), seed=i, max_tokens=20, ignore_eos=True, n=1 + (i % 4 == 3)
    )
    for i in range(10)
]
PROMPTS = [[(7 * i * (i % 3 > 0) + j) % 190 + 1 for j in range(20 + 9 * i)] for i in range(10)]


def tokens_of(llm: LLM, rounds: int = 2) -> list[list[int]]:
    """The tokens of two conversations of two turns each; the second begins as the first ended."""
    found, prompts = [], PROMPTS
    for _ in range(rounds):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        found += [list(sample.token_ids) for out in outputs for sample in out.outputs]
        answers = [list(out.outputs[0].token_ids) for out in outputs]
        prompts = [[*p, *a, 3] for p, a in zip(prompts, answers, strict=True)]
    return found


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("backend", [pytest.param("numba", marks=SLOW), "sdpa"])
def test_tokens_do_not_depend_on_the_pools(path: Path, backend: str, kv_cache_dtype: str) -> None:
    """In float32 and fp8, from ample pools to those that hardly hold the longest request."""
    if backend == "numba":
        pytest.importorskip("numba")
    options = dict(attention_backend=backend, block_size=4, max_num_seqs=4)
    options |= dict(kv_cache_dtype=kv_cache_dtype)
    wanted = tokens_of(random_llm(path, num_kv_cache_blocks=800, **options))
    block_bytes = 2 * 2 * 4 * 2 * 32 * (1 if kv_cache_dtype == "fp8" else 4)
    for blocks, host, overlap in ((40, 400, False), (60, 50, True), (38, 6, False)):
        llm = random_llm(
            path,
            num_kv_cache_blocks=blocks,
            swap_space=host * block_bytes / GIB,
            async_scheduling=overlap,
            **options,
        )
        assert llm.engine.runner.host_pool.num_blocks == host
        assert tokens_of(llm) == wanted, (blocks, host)
        stats = llm.stats()
        assert stats["host_saves"] > 0
        assert 0 < stats["host_blocks"] <= host
        if host == 400:
            assert stats["host_loads"] > 50
            assert stats["host_spared_tokens"] >= 4 * stats["host_loads"]


def small(path: Path, **options: object) -> LLM:
    settings = dict(block_size=4, num_kv_cache_blocks=30, attention_backend="sdpa")
    settings |= dict(swap_space=2**-8)
    return random_llm(path, **(settings | options))


def test_a_failed_step_empties_both_tiers(path: Path, monkeypatch) -> None:
    """What it saved cannot be relied on."""
    llm = small(path)
    wanted = tokens_of(llm, rounds=1)
    blocks = llm.engine.scheduler.block_manager
    assert blocks.hash_to_host_block
    pool, calls = llm.engine.runner.host_pool, [0]

    def broken(cache: torch.Tensor, moves: list[BlockCopy]) -> None:
        calls[0] += 1
        for _, host_block in moves:
            pool.block(host_block)[:] = float("nan")
        if calls[0] == 3:
            monkeypatch.undo()
            raise RuntimeError("a save failed on purpose")
        HostPool.save(pool, cache, moves)

    llm.reset_prefix_cache()
    assert not blocks.hash_to_host_block
    monkeypatch.setattr(pool, "save", broken)
    with pytest.raises(RuntimeError, match="on purpose"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert not blocks.hash_to_host_block
    assert len(blocks.host_free) == blocks.num_host_blocks
    assert blocks.num_available == blocks.num_blocks
    assert tokens_of(llm, rounds=1) == wanted


def test_memory_of_a_gpu(monkeypatch) -> None:
    config = EngineConfig(swap_space=4)
    monkeypatch.setattr(host_pool, "available_host_memory", lambda: 3 * GIB)
    with pytest.raises(ValueError, match="takes 4,294,967,296 bytes .* 3,221,225,472 are free;"):
        host_pool.num_host_blocks(config, 1000, None)
    monkeypatch.setattr(host_pool, "available_host_memory", lambda: 5 * GIB)
    assert host_pool.num_host_blocks(config, 1000, None) == 4 * GIB // 1000


def test_memory_of_a_cpu(path: Path, monkeypatch) -> None:
    """Weights and KV cache are in host memory too."""
    monkeypatch.setattr(memory, "available_host_memory", lambda: GIB)
    with pytest.raises(ValueError, match="next to weights and KV cache"):
        random_llm(path, swap_space=1)
    options = dict(num_kv_cache_blocks=None, kv_cache_memory_bytes=GIB // 2)
    with pytest.raises(ValueError, match="next to weights and KV cache"):
        random_llm(path, swap_space=0.6, **options)
    assert random_llm(path, swap_space=0.1, **options).engine.runner.host_pool is not None


def test_memory_of_ranks(monkeypatch) -> None:
    """Each of the ranks takes the swap space, before they divide half of what remains."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(memory, "available_host_memory", lambda: 5 * GIB)
    cpu = torch.device("cpu")
    free = memory.free_memory(cpu, ranks=2)
    for size, blocks in ((1, 2048 - 1), (2, 768 - 1)):
        config = EngineConfig(swap_space=1, tensor_parallel_size=size)
        budget = memory.MemoryBudget(config, cpu, free, 0, 2**20)
        assert budget.num_kv_blocks(10**6, memory.free_memory(cpu, size)) == blocks
