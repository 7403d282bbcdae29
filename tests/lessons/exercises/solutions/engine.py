"""A solution of `python -m lessons build engine`, which completes the stub."""

from functools import partial

import torch
from cache import KVCache
from filter import keep_typical_p
from slots import blocks_to_append, slots
from softmax import update
from step import plan_step
from torch import Tensor
from torch.nn import functional as F

from lessons.tasks import engine as stub
from nanovllm.engine.sequence import Sequence


class Engine(stub.Engine):
    def step(self, running: list[Sequence], waiting: list[Sequence], typical_p: float) -> None:
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
        self, plan: list[tuple[Sequence, int]], layer: int, q: Tensor, k: Tensor, v: Tensor
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
