"""A solution of `python -m lessons build m2`."""

from functools import partial

import torch
from cache import KVCache
from slots import blocks_to_append, slots
from torch import Tensor

from lessons.lesson02_model import Model
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        c = model.config
        self.model, self.size, self.max_num_seqs, self.budget = model, size, max_num_seqs, budget
        self.blocks = BlockManager(num_blocks, size)
        total = (num_blocks + 1) * size
        self.kv = torch.zeros(c.num_layers, 2, total, c.num_kv_heads, c.head_dim)

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int]
    ) -> list[list[int]]:
        outputs = []
        for i, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True)):
            seq = Sequence(str(i), i, list(ids), len(ids), len(ids) + n, frozenset(ends))
            while not self.answer(seq):
                pass
            outputs.append(seq.output_ids)
        return outputs

    def answer(self, seq: Sequence) -> bool:
        start, end = seq.num_computed, len(seq.token_ids)
        self.take_blocks(seq, end - start)
        seq.num_computed = end
        attend = partial(self.attend, seq)
        logits = self.model.logits(seq.token_ids[start:], range(start, end), attend)
        seq.token_ids.append(int(logits[-1].argmax()))
        ended = seq.token_ids[-1] in seq.stop_token_ids or len(seq.token_ids) == seq.max_length
        if ended:
            self.blocks.release(seq)
        return ended

    def take_blocks(self, seq: Sequence, count: int) -> None:
        for _ in range(blocks_to_append(seq.block_table, self.size, seq.num_computed, count)):
            self.blocks.append_block(seq)

    def attend(self, seq: Sequence, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = slots(seq.block_table, self.size, 0, seq.num_computed)
        old, new = where[: -len(q)], where[-len(q) :]
        self.kv[layer, 0, new], self.kv[layer, 1, new] = k, v
        cache = KVCache(*k.shape[1:])
        if old:
            cache.attend(q.new_zeros(len(old), *q.shape[1:]), *self.kv[layer][:, old])
        return cache.attend(q, *self.kv[layer][:, new])
