"""Measures the scratch memory of the largest steps, so that the KV cache leaves room for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from nanovllm.config import MAX_DRAFT_STEP, EngineConfig
from nanovllm.plan import FILTERS, Chunk, LogitRules, NewRow, ResultKind, RowSampling, StepPlan

if TYPE_CHECKING:
    from nanovllm.models.attention import PlainAttention
    from nanovllm.runner.model_runner import ModelRunner


def scratch_bytes(
    runner: ModelRunner,
    make_attention: Callable[[int], PlainAttention],
    config: EngineConfig,
    max_model_len: int,
) -> int:
    """Return the bytes that the largest steps need besides weights and KV cache.

    The steps run with caches of `make_attention`, and compile their kernels. The result is the sum
    over the steps, because graphs use a separate memory pool.
    """
    size = 0
    # The first row with rules would make this state. It remains, so it is not scratch memory.
    runner.rows.rules = runner.rows.make_rules()
    for plan in largest_plans(config, max_model_len):
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        if runner.backend.captures:  # then these positions are for logit rules only
            runner.rows.positions[:-1] = max_model_len - 2
        runner.attention = make_attention(1)  # everything is written to the null block
        runner.attention.copy_blocks([(0, 0)])
        runner.run(plan)
        runner.rows.rules.reset()  # requests with rules allocate their memory again
        size += torch.cuda.max_memory_allocated() - allocated
    return size


def largest_plans(config: EngineConfig, max_model_len: int) -> Iterator[StepPlan]:
    """Yield the plans that need the most memory and together use every kernel variant.

    The first plan decodes all rows with rules, of which one has penalties, and the second decodes
    one row. The third computes as many tokens in as many rows as possible, and scores all of them.
    It is last, because a row may be full after it, and a decode needs a free position.
    """
    num_seqs = config.max_num_seqs
    budget = config.token_budget
    num_rows = min(num_seqs, budget)
    length = min(budget // num_rows, max_model_len)
    table = [0] * -(-length // config.block_size)

    def new_rows(rules: list[LogitRules | None]) -> list[NewRow]:
        filters = tuple(1 if isinstance(off, int) else 0.5 for off in FILTERS.values())
        sampling = [RowSampling(1.0, seed=0, filters=filters, rules=each) for each in rules]
        return [NewRow(row, table, each, prompt=[0]) for row, each in enumerate(sampling)]

    rules = LogitRules(logit_bias=((0, 1.0),), allowed_token_ids=(0,), logprobs=1)
    # Penalties of all rows at the largest length would need gigabytes, which requests rarely use.
    penalized = replace(rules, repetition_penalty=2.0)
    new = new_rows([penalized, *[rules] * (num_seqs - 1)])
    yield StepPlan(new, decode_rows=list(range(num_seqs)))
    yield StepPlan(new_rows([None] * num_seqs), decode_rows=[0])
    tokens = [0] * length
    drafts = min(config.max_drafts, length - 1, max(0, MAX_DRAFT_STEP["cuda"] // num_rows - 1))
    yield StepPlan(
        chunks=[
            Chunk(row, 0, tokens, ResultKind.TOKEN, tokens, num_drafts=drafts)
            for row in range(num_rows)
        ]
    )
