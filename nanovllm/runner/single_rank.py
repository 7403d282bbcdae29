"""SingleRank: what one device has of a model, which is all of it.

features/tensor_parallel/ranks.py extends it for a model that several devices share.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from nanovllm.models.config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import CheckpointTensor
from nanovllm.plan import Runner


class SingleRank:
    rank, size = 0, 1

    def config_of_rank(self, full_config: ModelConfig) -> ModelConfig:
        """Return the sizes of this rank's model."""
        return full_config

    def tensors_of_rank(
        self, tensors: Iterable[CheckpointTensor], full_config: ModelConfig
    ) -> Iterable[CheckpointTensor]:
        """Return the tensors of this rank's model, with the slices of the checkpoint in them."""
        return tensors

    def connect(self, model: Qwen3, vocab_size: int) -> None:
        """Combine the results of the ranks' models, once their weights are loaded."""

    def smallest(self, number: int) -> int:
        """Return the smallest number that a rank calls this with."""
        return number

    def agreeing(self, runner: Runner) -> Runner:
        """Return a runner that begins a step when all ranks have planned the same one."""
        return runner

    def rank_0_first(self) -> AbstractContextManager[None]:
        """Let rank 0 leave the block before the others enter it."""
        return nullcontext()

    def leave_if_it_fails(self) -> AbstractContextManager[None]:
        """Disconnect if the block fails, so that no other rank waits for this one."""
        return nullcontext()

    def leave(self) -> None:
        """Disconnect from the other ranks."""
