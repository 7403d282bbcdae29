"""A solution of `python -m lessons build engine`. It imports the others."""

from functools import partial

import torch
from cache import KVCache
from eviction import FewestHits
from filter import keep_typical_p
from policy import longest_output_first
from prefix import Matching
from slots import blocks_to_append, slots
from softmax import update
from step import plan_step
from torch import Tensor
from torch.nn import functional as F

from lessons.lesson import GREEDY
from lessons.lesson02_model import Model
from nanovllm.engine.sequence import Sequence


class Blocks(Matching, FewestHits):
    """A block manager with your match and your eviction rule."""


class Request(Sequence):
    """A sequence of the engine, with the names of step.py."""

    known = property(lambda self: len(self.token_ids))
    computed = property(lambda self: self.num_computed)


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        """size: slots of a block. There must be blocks for `max_num_seqs` complete requests."""
        c = model.config
        self.model, self.size, self.max_num_seqs, self.budget = model, size, max_num_seqs, budget
        self.blocks = Blocks(num_blocks, size)
        total = (num_blocks + 1) * size  # slots; block 0 is the null block
        self.kv = torch.zeros(c.num_layers, 2, total, c.num_kv_heads, c.head_dim)

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int], typical_p: float = 1
    ) -> list[list[int]]:
        """Return the output tokens of each prompt, including the end token, one of `ends`."""
        every = [
            Request(str(i), i, list(ids), len(ids), len(ids) + n, frozenset(ends), GREEDY)
            for i, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        running: list[Request] = []
        waiting = sorted(every, key=lambda seq: longest_output_first(seq, self.blocks))
        while running or waiting:
            self.step(running, waiting, typical_p)
        return [seq.output_ids for seq in every]

    def step(self, running: list[Request], waiting: list[Request], typical_p: float) -> None:
        for seq in waiting[: self.max_num_seqs - len(running)]:
            if not seq.block_table:
                self.blocks.attach_cached(seq, self.blocks.match(seq))
        plan = plan_step(running, waiting, self.budget, self.max_num_seqs)
        ids, positions, last = [], [], []
        for seq, count in plan:
            start, end = seq.num_computed, seq.num_computed + count
            for _ in range(blocks_to_append(seq.block_table, self.size, start, count)):
                self.blocks.append_block(seq)
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            last.append(len(ids) - 1)
            seq.num_computed = end
        logits = self.model.logits(ids, positions, partial(self.attend, plan))[last]
        tokens = keep_typical_p(logits, torch.full((len(plan),), typical_p)).argmax(1).tolist()
        for (seq, _), token in zip(plan, tokens, strict=True):
            self.blocks.cache_full_blocks(seq)
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(token)
                if token in seq.stop_token_ids or len(seq.token_ids) == seq.max_length:
                    running.remove(seq)
                    self.blocks.release(seq)

    def attend(
        self, plan: list[tuple[Request, int]], layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        results, counts = [], [count for _, count in plan]
        for (seq, count), *new in zip(plan, *(x.split(counts) for x in (q, k, v)), strict=True):
            where = slots(seq.block_table, self.size, 0, seq.num_computed)
            cache = self.kv[layer]
            cache[0, where[-count:]], cache[1, where[-count:]] = new[1:]
            keys, values = cache[:, where]
            if count == 1:
                results.append(self.attend_tiles(new[0][0], keys, values)[None])
            else:
                queries = F.pad(new[0], (0, 0, 0, 0, len(where) - count, 0))
                attended = KVCache(*k.shape[1:]).attend(queries, keys, values)
                results.append(attended[-count:])
        return torch.cat(results)

    def attend_tiles(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [H, D], keys and values [L, K, D] -> [H, D]."""
        results, group = [], len(q) // keys.shape[1]
        for head, query in enumerate(q):
            scores = keys[:, head // group] @ query / len(query) ** 0.5
            state = (torch.tensor(-torch.inf), torch.tensor(0.0), torch.zeros(len(query)))
            for tile in range(0, len(scores), 64):
                part = slice(tile, tile + 64)
                state = update(state, scores[part], values[part, head // group])
            results.append(state[2] / state[1])
        return torch.stack(results)
