"""Your engine: the parts that you have built, in one loop that answers questions.

The task. Write `step` and `attend`. This file imports eight of your solutions, which must be in its
directory. `step` computes one step of many requests:
  1. The first waiting requests, as many as there are free rows, take their cached prefix:
     attach_cached(seq, match(seq)) of self.blocks, which sets seq.num_computed. One that the budget
     does not reach keeps its blocks and waits: do not do it again in the next step if its
     seq.block_table is not empty. The others in `waiting` have no blocks.
  2. plan_step says which requests compute how many tokens. They get blocks: append_block(seq).
  3. self.model.logits(ids, positions, functools.partial(self.attend, plan)) computes the logits
     [T, V] of the T tokens of all requests, whose ids and positions are lists of int.
  4. Add the planned tokens to seq.num_computed, at the latest here. cache_full_blocks(seq) caches
     what is computed. A request whose tokens are all computed gets the most likely token that
     keep_typical_p leaves. At an end token, one of seq.stop_token_ids, or at seq.max_length it
     leaves `running`, and its blocks are released: release(seq).

The model calls `attend` in each layer. It stores the keys and values of the step in the slots of
their tokens. Then a request with several new tokens attends through a KVCache, to which all its
keys are given, and a request with one through `update`, tile by tile, for each query head. The
answers must be transformers'.

In the engine: run_step in nanovllm/engine/llm_engine.py. Hints: for a chunk after a prefix, give
KVCache zeros in place of the queries of earlier tokens, and leave out their results.
"""

import torch
from cache import KVCache  # noqa: F401
from eviction import FewestHits
from filter import keep_typical_p  # noqa: F401
from policy import longest_output_first
from prefix import Matching
from slots import blocks_to_append, slots  # noqa: F401
from softmax import update  # noqa: F401
from step import plan_step  # noqa: F401
from torch import Tensor

from lessons.lesson import GREEDY
from lessons.lesson02_model import Model
from nanovllm.engine.sequence import Sequence


class Blocks(Matching, FewestHits):
    """A block manager with your match and your eviction rule."""


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        """size: slots of a block. There must be blocks for `max_num_seqs` complete requests."""
        c = model.config
        self.model = model
        self.size = size
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.blocks = Blocks(num_blocks, size)
        total = (num_blocks + 1) * size  # slots; block 0 is the null block
        self.kv = torch.zeros(c.num_layers, 2, total, c.num_kv_heads, c.head_dim)

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int], typical_p: float = 1
    ) -> list[list[int]]:
        """Return the output tokens of each prompt, including the end token, one of `ends`."""
        every = [
            Sequence(str(i), i, list(ids), len(ids), len(ids) + n, frozenset(ends), GREEDY)
            for i, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        running: list[Sequence] = []
        waiting = sorted(every, key=lambda seq: longest_output_first(seq, self.blocks))
        while running or waiting:
            self.step(running, waiting, typical_p)
        return [seq.output_ids for seq in every]

    def step(self, running: list[Sequence], waiting: list[Sequence], typical_p: float) -> None:
        raise NotImplementedError("step is to be written; see the top of this file")

    def attend(
        self, plan: list[tuple[Sequence, int]], layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """q [T, H, D], k and v [T, K, D] of the tokens in the order of the plan -> [T, H, D]."""
        raise NotImplementedError("attend is to be written; see the top of this file")
