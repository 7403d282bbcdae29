"""DeviceRunner: the ModelRunner of a device that works while the host plans, such as a GPU.

Decode steps are built from DeviceRows, the rows in the memory of the device, alone. The device
advances the positions and already has the last sampled tokens, so replaying a CUDA graph for the
same rows needs no data from the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.backend import Backend
from nanovllm.models.batch import ForwardBatch, SamplingBatch, longest_first
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.transfers import send, start_copy, to_device
from nanovllm.plan import StepPlan
from nanovllm.runner.model_runner import ModelRunner, PendingOutput
from nanovllm.runner.rows import Rows, sampling_batch

if TYPE_CHECKING:
    from nanovllm.backends.gpu.graphs import DecodeGraphs


class DeviceRows:
    """The arrays of Rows as tensors: N rows, and row N for padding."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        device = rows.device
        self.block_tables = torch.tensor(rows.block_tables, device=device)  # [N + 1, B] int32
        self.positions = torch.tensor(rows.positions, device=device)  # [N + 1] int64
        self.params = torch.tensor(rows.params, device=device)  # [1 + filters, N + 1] float32
        self.seeds = torch.tensor(rows.seeds, device=device)  # [N + 1] int64
        # [N + 2]: 0, 1, 2, ...
        self.arange = torch.arange(rows.num_rows + 2, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Send the changes of `Rows.apply`, except the positions that `decode_batch` advances."""
        host = self.rows
        device = host.device
        if plan.new_rows:
            new = [new_row.row for new_row in plan.new_rows]
            arrays = host.block_tables[new], host.params[:, new], host.seeds[new]
            rows, tables, params, seeds = send(device, np.array(new), *arrays)
            self.block_tables[rows] = tables
            self.params[:, rows] = params
            self.seeds[rows] = seeds
        if plan.new_blocks:
            new_rows, index, blocks = send(device, *np.array(plan.new_blocks).T)
            self.block_tables[new_rows, index] = blocks.int()
        if plan.chunks:
            moved = [*(chunk.row for chunk in plan.chunks), *plan.decode_rows]
            rows, positions = send(device, np.array(moved), host.positions[moved])
            self.positions[rows] = positions

    def decode_batch(self, rows: Tensor, order: Tensor) -> tuple[ForwardBatch, SamplingBatch]:
        """Build a decode step of `rows` [S] and advance their positions. This can be captured.

        All filters are present, because a graph is captured before the used filters are known.
        """
        num = rows.shape[0]
        size = self.rows.block_size
        self.positions[-1:].zero_()  # row N, which is padding, stays at position 0
        positions = self.positions[rows]
        self.positions[rows] = context_lens = positions + 1
        blocks = self.block_tables[rows, positions // size]
        forward = ForwardBatch(
            input_ids=self.rows.last_tokens[rows],
            positions=positions,
            slot_mapping=blocks * size + positions % size,
            query_start_loc=self.arange[: num + 1],
            context_lens=context_lens,
            block_tables=self.block_tables[rows],
            query_lens=np.ones(num, np.int64),
            order=order,
            num_decodes=num,
        )
        # A token is sampled for the position after the context.
        return forward, sampling_batch(self.params[:, rows], self.seeds[rows], context_lens)


class DeviceRunner(ModelRunner):
    graphs: DecodeGraphs | None = None  # captured decode steps, if any

    def __init__(self, model: Qwen3, backend: Backend, rows: Rows) -> None:
        super().__init__(model, backend, rows)
        self.device_rows = DeviceRows(rows)

    def run_step(self, plan: StepPlan) -> PendingOutput:
        self.device_rows.apply(plan)
        return super().run_step(plan) if plan.chunks else self.run_decodes(plan.decode_rows)

    def run_decodes(self, decode_rows: list[int]) -> PendingOutput:
        """Execute a step without chunks, built on the device."""
        if self.graphs is not None:
            hidden, tokens = self.graphs.replay(decode_rows)
        else:
            order = longest_first(self.rows.positions[decode_rows])
            hidden, tokens = self.decode(*send(self.device, np.array(decode_rows), order))
        rules = self.rows.rules_of(decode_rows)
        if rules is None:
            return PendingOutput(start_copy(tokens))
        rows = to_device(np.array(decode_rows), self.device)
        device = self.device_rows
        sampling = sampling_batch(
            device.params[:, rows], device.seeds[rows], device.positions[rows]
        )
        return self.sample(hidden, sampling, rows, rules)

    def decode(self, rows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Decode `rows` [S]. Returns hidden states [S, E] and tokens [S].

        `order` [S] is the result of `longest_first`.
        """
        batch, sampling = self.device_rows.decode_batch(rows, order)
        if self.states is not None:
            batch.states = self.states.of_decodes(rows)
        self.attention.prepare(batch)
        hidden = self.fused_model.forward(batch, self.attention)
        tokens = self.backend.sample(self.fused_model.logits(hidden), sampling)
        self.rows.record(rows, tokens)
        return hidden, tokens
