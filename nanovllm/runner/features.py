"""The interfaces of optional parts of the runner, which the folder features/ implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from nanovllm.models.backend import Backend
from nanovllm.models.batch import SamplingBatch
from nanovllm.plan import BlockCopy, NewRow, StepPlan

if TYPE_CHECKING:
    from nanovllm.runner.pending import PendingOutput


class HostPool(Protocol):
    """KV blocks in host memory: features/memory/host_cache/pool.py."""

    num_blocks: int

    def save(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy blocks of the cache to host blocks."""

    def load(self, cache: Tensor, copies: list[BlockCopy]) -> None:
        """Copy host blocks to blocks of the cache."""


class States(Protocol):
    """The states of linear attention: features/models/hybrid/states.py."""

    num_states: int

    @property
    def nbytes(self) -> int: ...

    def before(self, plan: StepPlan) -> None:
        """Copy states before a step."""

    def after(self, plan: StepPlan) -> None:
        """Copy the states that a step leaves in its rows."""

    def of_plan(self, plan: StepPlan) -> Any:
        """Return ForwardBatch.states for a plan with chunks, or for decodes built on the host."""

    def of_decodes(self, rows: Tensor) -> Any:
        """Return ForwardBatch.states for decodes of `rows` [S], built on the device."""


class RulesBatch(Protocol):
    """The logit rules of the rows of a step: features/requests/logit_rules/rows.py."""

    changes_logits: bool
    errors: dict[int, Exception]  # of the last `apply`, by row

    def apply(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return logits [R, V] with the rules applied, for tokens at `positions` [R]."""

    def sample(
        self,
        logits: Tensor,
        sampling: SamplingBatch,
        backend: Backend,
        record: Callable[[Tensor], Tensor],
    ) -> PendingOutput:
        """Sample from logits [R, V] with the rules applied."""


class RulesState(Protocol):
    """The logit rules of all rows: features/requests/logit_rules/rows.py."""

    def replace_row(self, new_row: NewRow) -> None:
        """Replace the rules of a row. The new sequence may have none."""

    def reset(self) -> None:
        """Forget all rules, and free the memory that they took."""

    def batch(self, rows: list[int] | np.ndarray, positions: np.ndarray) -> RulesBatch | None:
        """Return the rules of `rows` [R], or None. `positions` [N] are those of all rows."""
