"""A solution of `python -m lessons build m3`: what it adds to m2."""

from functools import partial

import m2
import torch
from step import plan_step
from torch import Tensor

from nanovllm.engine.sequence import Sequence

Plan = list[tuple[Sequence, int]]


class Engine(m2.Engine):
    running: list[Sequence]
    waiting: list[Sequence]

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
        every = [
            Sequence(str(i), i, list(ids), len(ids), len(ids) + n, frozenset(ends))
            for i, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        self.running, self.waiting = [], list(every)
        return every

    def admit(self) -> Plan:
        return plan_step(self.running, self.waiting, self.budget, self.max_num_seqs)

    def plan(self) -> Plan:
        plan = self.admit()
        for seq, count in plan:
            self.take_blocks(seq, count)
        return plan

    def step(self) -> list[Sequence]:
        """Returns the sequences that have sampled a token."""
        ids, positions, last, sampled = list[int](), list[int](), list[int](), []
        for seq, count in (plan := self.plan()):
            start, end = seq.num_computed, seq.num_computed + count
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            last.append(len(ids) - 1)
            self.advance(seq, end)
        logits = self.model.logits(ids, positions, partial(self.attend_all, plan))
        for (seq, _), token in zip(plan, logits[last].argmax(1).tolist(), strict=True):
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(token)
                sampled.append(seq)
                if token in seq.stop_token_ids or len(seq.token_ids) == seq.max_length:
                    self.end(seq)
        return sampled

    def advance(self, seq: Sequence, end: int) -> None:
        seq.num_computed = end

    def end(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)

    def attend_all(self, plan: Plan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        results, counts = [], [count for _, count in plan]
        for (seq, _), *qkv in zip(plan, *(x.split(counts) for x in (q, k, v)), strict=True):
            results.append(self.attend(seq, layer, *qkv))
        return torch.cat(results)
