"""A solution of `python -m lessons build m6`."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from cache import KVCache
from eviction import FewestHits
from prefix import Matching
from slots import blocks_to_append, slots
from step import plan_step
from stop import StopStream
from torch import Tensor

from lessons.lesson02_model import Model
from nanovllm.engine.sequence import Sequence


class Blocks(Matching, FewestHits):
    pass


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        c = model.config
        self.model, self.size, self.max_num_seqs, self.budget = model, size, max_num_seqs, budget
        self.blocks = Blocks(num_blocks, size)
        total = (num_blocks + 1) * size
        self.kv = torch.zeros(c.num_layers, 2, total, c.num_kv_heads, c.head_dim)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int]
    ) -> list[list[int]]:
        every = self.add(prompts, max_tokens, ends)
        while self.running or self.waiting:
            self.step()
        return [seq.output_ids for seq in every]

    def add(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int]
    ) -> list[Sequence]:
        self.waiting = [
            Sequence(str(i), i, list(ids), len(ids), len(ids) + n, frozenset(ends))
            for i, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        return list(self.waiting)

    def stream(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        ends: set[int],
        stops: list[str],
        as_bytes: Callable[[int], bytes],
    ) -> Iterator[tuple[int, str]]:
        texts = {seq: StopStream(stops) for seq in self.add(prompts, max_tokens, ends)}
        while self.running or self.waiting:
            for seq in self.step():
                token, text = seq.token_ids[-1], texts[seq]
                new = "" if token in ends else text.add(as_bytes(token))
                if text.ended and seq in self.running:
                    self.end(seq)
                if seq not in self.running:
                    new += text.finish()
                if new:
                    yield seq.arrival, new

    def step(self) -> list[Sequence]:
        for seq in self.waiting[: self.max_num_seqs - len(self.running)]:
            seq.num_computed = self.size * len(self.blocks.match(seq))
        admitted = len(self.running)
        planned = plan_step(self.running, self.waiting, self.budget, self.max_num_seqs)
        for seq in self.running[admitted:]:
            self.blocks.attach_cached(seq, self.blocks.match(seq))
        ids, positions, last = list[int](), list[int](), list[int]()
        plan = []
        for seq, count in planned:
            if not self.make_room(seq, count):
                continue
            plan.append((seq, count))
            start, end = seq.num_computed, seq.num_computed + count
            for _ in range(blocks_to_append(seq.block_table, self.size, start, count)):
                self.blocks.append_block(seq)
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            last.append(len(ids) - 1)
            seq.num_computed = end
        sampled = []
        logits = self.model.logits(ids, positions, partial(self.attend, plan))
        for (seq, _), token in zip(plan, logits[last].argmax(1).tolist(), strict=True):
            self.blocks.cache_full_blocks(seq)
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(token)
                sampled.append(seq)
                if token in seq.stop_token_ids or len(seq.token_ids) == seq.max_length:
                    self.end(seq)
        return sampled

    def end(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)

    def make_room(self, seq: Sequence, count: int) -> bool:
        needed = blocks_to_append(seq.block_table, self.size, seq.num_computed, count)
        while seq in self.running and self.blocks.num_available < needed:
            last = self.running.pop()
            self.blocks.release(last)
            self.waiting.insert(0, last)
        return seq in self.running

    def attend(
        self, plan: list[tuple[Sequence, int]], layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        results, counts = [], [count for _, count in plan]
        for (seq, _), *qkv in zip(plan, *(x.split(counts) for x in (q, k, v)), strict=True):
            results.append(self.attend_one(seq, layer, *qkv))
        return torch.cat(results)

    def attend_one(self, seq: Sequence, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = slots(seq.block_table, self.size, 0, seq.num_computed)
        old, new = where[: -len(q)], where[-len(q) :]
        self.kv[layer, 0, new], self.kv[layer, 1, new] = k, v
        cache = KVCache(*k.shape[1:])
        if old:
            cache.attend(q.new_zeros(len(old), *q.shape[1:]), *self.kv[layer][:, old])
        return cache.attend(q, *self.kv[layer][:, new])
