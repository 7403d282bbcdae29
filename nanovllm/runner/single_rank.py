"""SingleRank: the only rank of a model on one device.

memory/tensor_parallel/ranks.py extends it to one rank of a model that is split across devices.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import CheckpointTensor
from nanovllm.plan import Runner


class SingleRank:
    rank, size = 0, 1

    def config_of_rank(self, full_config: ModelConfig) -> ModelConfig:
        """Return the config of this rank's part of the model."""
        return full_config

    def tensors_of_rank(
        self, tensors: Iterable[CheckpointTensor], full_config: ModelConfig
    ) -> Iterable[CheckpointTensor]:
        """Return the tensors of this rank's part, with the slices of the checkpoint to load."""
        return tensors

    def connect(self, model: Qwen3, vocab_size: int) -> None:
        """Connect this rank's model to the other ranks, after its weights are loaded."""

    def smallest(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        return number

    def agreeing(self, runner: Runner) -> Runner:
        """Return a runner that launches a step only if all ranks have planned the same step."""
        return runner

    def rank_0_first(self) -> AbstractContextManager[None]:
        """Return a context manager: rank 0 leaves the `with` block before other ranks enter it."""
        return nullcontext()

    def leave_if_it_fails(self) -> AbstractContextManager[None]:
        """Disconnect if the `with` block fails: the other ranks would wait for this one."""
        return nullcontext()

    def leave(self) -> None:
        """Disconnect from the other ranks."""
