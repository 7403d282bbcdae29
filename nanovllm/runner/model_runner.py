"""ModelRunner: executes plans on a device, without access to a Sequence.

A step builds a batch and computes hidden states (`run_step`), samples tokens from logits and
records them as the inputs of the next step (`sample`). It owns the model, the KV cache (in
`attention`) and the rows. The subclass in device_runner.py builds decode steps on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend, FusedModel
from nanovllm.models.batch import SamplingBatch
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.transfers import start_copy
from nanovllm.plan import ResultKind, StepOutput, StepPlan
from nanovllm.runner.chunk_results import add_chunk_results
from nanovllm.runner.rows import Rows

if TYPE_CHECKING:
    from nanovllm.features.kv.host_cache.pool import HostPool
    from nanovllm.features.models.hybrid.states import States
    from nanovllm.features.sampling.logit_rules.row_rules import RulesBatch
    from nanovllm.features.weights.new_weights import MissingParts
    from nanovllm.runner.one_rank import OneRank


@dataclass(slots=True)
class PendingOutput:
    """The output of a step that the device may still be computing."""

    token_ids: Callable[[], list[int]] = list  # waits for the tokens; `list` returns none
    # Functions that wait for the results of optional features, and add them to the output.
    results: list[Callable[[StepOutput], None]] = field(default_factory=list)

    def wait(self) -> StepOutput:
        output = StepOutput(self.token_ids())
        for add_to in self.results:
            add_to(output)
        return output


class ModelRunner:
    attention: PlainAttention  # set by loading/make_runner.py, when the size of its cache is known
    num_blocks: int  # for requests; the null block is not counted
    max_model_len: int  # tokens of the longest request
    ranks: OneRank  # the processes that share the model

    # ---- optional features, set by loading/make_runner.py ----

    host_pool: HostPool | None = None
    states: States | None = None
    missing_parts: MissingParts | None = None
    make_fast_steps: Callable[[ModelRunner], None]  # for new_weights.py, sleep.py

    def __init__(self, model: Qwen3, backend: Backend, rows: Rows) -> None:
        self.model = model
        self.backend = backend
        self.rows = rows
        self.device = rows.device
        self.dtype = model.embed_tokens.dtype
        self.async_scheduling = self.device.type == "cuda"  # the device works while the host plans
        self.fused_model: FusedModel = model  # or an object that computes the same in fewer calls
        self.fused_step: Callable[[StepPlan], np.ndarray | None] = lambda plan: None

    def run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch a step. Returns a function that waits for the device and returns the output."""
        return self.ranks.run(plan, self.launch)

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Launch a step, as `run` does, on this rank alone."""
        with torch.inference_mode(), self.backend.thread_limit(), self.backend.step_context():
            self.rows.apply(plan)
            self._copy(plan)
            output = self.run_step(plan)
            if self.states is not None:
                self.states.after(plan)
            return output.wait

    def run_step(self, plan: StepPlan) -> PendingOutput:
        """Execute a step, built from the host's rows."""
        if (tokens := self.fused_step(plan)) is not None:
            return PendingOutput(tokens.tolist)
        step = self.rows.build(plan)
        if self.states is not None:
            step.forward_batch.states = self.states.of_plan(plan)
        self.attention.prepare(step.forward_batch)
        hidden = self.fused_model.forward(step.forward_batch, self.attention)
        output = PendingOutput()
        if len(step.sampling_rows):
            last = hidden[step.logits_indices]
            output = self.sample(last, step.sampling_batch, step.sampling_rows, step.rules)
        kinds = {None, ResultKind.TOKEN}  # the results of chunks without optional features
        if any(c.logprob_targets or c.result_kind not in kinds for c in plan.chunks):
            add_chunk_results(output, plan.chunks, hidden, self)
        return output

    def sample(
        self, hidden: Tensor, sampling: SamplingBatch, rows: Tensor, rules: RulesBatch | None
    ) -> PendingOutput:
        """Sample a token for each of `rows` [R], with their `rules`, from hidden states [R, E]."""
        logits = self.fused_model.logits(hidden)
        if rules is not None:
            return rules.sample(logits, sampling, self.backend, partial(self.rows.record, rows))
        tokens = self.backend.sample(logits, sampling)
        self.rows.record(rows, tokens)
        return PendingOutput(start_copy(tokens))

    # ---- optional features ----

    def _copy(self, plan: StepPlan) -> None:
        """Copy blocks and states before anything is computed.

        The saves are first, because a copy or a load may overwrite a block that is saved. The loads
        are last, because a load may overwrite a block that is copied.
        """
        if plan.saves and self.host_pool is not None:
            self.host_pool.save(self.attention.cache, plan.saves)
        if plan.block_copies:
            self.attention.copy_blocks(plan.block_copies)
        if plan.loads and self.host_pool is not None:
            self.host_pool.load(self.attention.cache, plan.loads)
        if self.states is not None:
            self.states.before(plan)
