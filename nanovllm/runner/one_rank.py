"""OneRank: the only rank of an engine. `Ranks` in features/parallel/ extends it for several."""

from collections.abc import Callable, Iterable

from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import CheckpointTensor
from nanovllm.plan import StepOutput, StepPlan

Launch = Callable[[StepPlan], Callable[[], StepOutput]]  # ModelRunner.launch


class OneRank:
    rank = 0
    size = 1

    def min(self, number: int) -> int:
        """Return the minimum of `number` over all ranks."""
        return number

    def config_of_rank(self, full_config: ModelConfig) -> ModelConfig:
        """Return the config of this rank's part of the model."""
        return full_config

    def tensors_of_rank(
        self, tensors: Iterable[CheckpointTensor], full_config: ModelConfig
    ) -> Iterable[CheckpointTensor]:
        """Return the tensors of this rank's part, with the slices of the checkpoint to load."""
        return tensors

    def connect(self, model: Qwen3, vocab_size: int) -> None:
        """Set up a loaded `model` to combine its results with the results of other ranks.

        vocab_size: size of the whole vocabulary. The last rank's head may be padded.
        """

    def run(self, plan: StepPlan, launch: Launch) -> Callable[[], StepOutput]:
        """Launch a step if all ranks have planned the same step."""
        return launch(plan)
