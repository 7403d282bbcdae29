"""DeviceRows: the rows in the memory of a device that works while the host plans, such as a GPU.

Decode steps are built from these tensors alone. The device advances the positions and already has
the last sampled tokens, so replaying a CUDA graph for the same rows needs no data from the host.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.batch import ForwardBatch, SamplingBatch
from nanovllm.models.transfers import send
from nanovllm.plan import StepPlan
from nanovllm.runner.rows import Rows, sampling_batch


class DeviceRows:
    """The arrays of Rows as tensors: N rows, and row N for padding."""

    def __init__(self, rows: Rows) -> None:
        self.rows, device = rows, rows.device
        self.block_tables = torch.tensor(rows.block_tables, device=device)  # [N + 1, B] int32
        self.positions = torch.tensor(rows.positions, device=device)  # [N + 1] int64
        self.params = torch.tensor(rows.params, device=device)  # [1 + filters, N + 1] float32
        self.seeds = torch.tensor(rows.seeds, device=device)  # [N + 1] int64
        # [N + 2]: 0, 1, 2, ...
        self.arange = torch.arange(rows.num_rows + 2, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Send the changes of `Rows.apply`, except the positions that `decode_batch` advances."""
        host, device = self.rows, self.rows.device
        if plan.new_rows:
            new = [new_row.row for new_row in plan.new_rows]
            arrays = host.block_tables[new], host.params[:, new], host.seeds[new]
            rows, tables, params, seeds = send(device, np.array(new), *arrays)
            self.block_tables[rows], self.params[:, rows], self.seeds[rows] = tables, params, seeds
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
        num, size = rows.shape[0], self.rows.block_size
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

    def sampling_batch(self, rows: Tensor) -> SamplingBatch:
        """Return the sampling parameters of `rows` [R] for their next position."""
        return sampling_batch(self.params[:, rows], self.seeds[rows], self.positions[rows])
