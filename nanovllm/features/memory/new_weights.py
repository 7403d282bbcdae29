"""New weights in a running engine: `LLM.load_weights`, as training loops need it for rollouts.

The first load and later ones store the same CheckpointTensors. What differs is the source, which
may be tensors in memory, and what depends on the weights:

    packed weights   A CPU's products read weights in another layout. A weight is unpacked when its
                     first rows are stored, and packed again after the last: one at a time, if the
                     tensors come layer by layer. In any order, no weight is in memory twice.
    fused layers     They contain the addresses of packed weights, and are made anew.
    captured steps   On a GPU all weights keep their addresses, so captured steps remain valid.
    KV and states    The prefix cache, the host cache and the snapshots are emptied.
    KV on disk       It belongs to the files of the checkpoint that was loaded last. With weights
                     from memory it can be neither saved nor loaded.

Before the first tensor is stored, a Refusal takes the place of the runner. If an error or Ctrl-C
follows, it stays there until a later call has loaded all weights.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.threads import hold_interrupt
from nanovllm.features.formats.quantized_checkpoint import DTYPES
from nanovllm.models.layers import Linear
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import EMBEDDINGS, HEAD, PREFIX, CheckpointTensor, check_headers
from nanovllm.models.weights import load_weights as load_files

INCOMPLETE = (
    "the weights are incomplete, because load_weights did not end; call load_weights with all "
    "weights, or make another LLM"
)
KINDS = "weights must be a directory, a state_dict, or pairs of a name and a torch.Tensor"
# Errors show the first part of this path in place of the directory of a checkpoint.
IN_MEMORY = Path("the argument of load_weights", "tensors")
# Fields of a ModelConfig that may differ, because they do not change the computation.
UNUSED = {"dtype", "max_position_embeddings", "tie_word_embeddings", "architecture"}


class Refusal:
    """Takes the place of the runner of an engine that cannot run: its use raises RuntimeError.

    It also takes the place of the functions that make tasks, so that no request is queued.
    """

    def __init__(self, engine: LLMEngine, why: str) -> None:
        self.engine, self.why, self.runner = engine, why, engine.runner
        self.factories = engine.input_processor.task_factories
        refusing: Any = self
        engine.runner, engine.input_processor.task_factories = refusing, {object: refusing}

    def __call__(self, *_: object) -> NoReturn:
        raise RuntimeError(self.why)

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self.why)

    def lift(self) -> None:
        self.engine.runner = self.runner
        self.engine.input_processor.task_factories = self.factories


@dataclass(frozen=True)
class MemoryFile:
    """Tensors with the methods of an open safetensors file."""

    tensors: dict[str, Tensor]

    def keys(self) -> list[str]:
        return [*self.tensors]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> MemorySlice:
        return MemorySlice(self.tensors[name])


@dataclass(frozen=True)
class MemorySlice:
    """A tensor with the methods of a slice of an open safetensors file."""

    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        dtype = self.tensor.dtype
        return "F64" if dtype is torch.float64 else DTYPES.get(dtype, str(dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


class Unpacked:
    """Takes the place of the weight of a Linear while it is stored in the layout of a checkpoint.

    The first rows that are stored unpack the weight, and the last ones pack it.
    """

    def __init__(self, linear: Linear) -> None:
        self.linear, self.weight, self.shape = linear, linear.weight, linear.weight.shape
        self.rows_left = self.shape[0]
        linear.weight = self

    def split(self, sizes: list[int]) -> list[Any]:
        """Return views of consecutive rows, which have the attributes that storing needs."""
        ends = itertools.accumulate(sizes)
        return [
            SimpleNamespace(
                shape=(size, *self.shape[1:]), copy_=partial(self.store, slice(end - size, end))
            )
            for size, end in zip(sizes, ends, strict=True)
        ]

    def store(self, rows: slice, source: Tensor) -> None:
        self.weight = unpacked(self.weight)
        self.weight[rows].copy_(source)
        self.rows_left -= rows.stop - rows.start
        if self.rows_left == 0:
            self.close()

    def close(self) -> None:
        """Give the Linear its weight, and pack it if it is unpacked."""
        if self.linear.weight is self:
            self.linear.weight = self.weight
            if isinstance(self.weight, Tensor) and not self.weight.is_mkldnn:
                self.linear.backend.after_load(self.linear)
            self.weight = None


def unpacked(weight: Any) -> Tensor:
    """Return a weight as it was before `Backend.after_load`."""
    if isinstance(weight, Tensor):
        return weight.to_dense(weight.dtype) if weight.is_mkldnn else weight
    return weight.unpack()  # PackedExperts of backends/cpu/kernels/experts.py


@contextmanager
def stored_again(model: Any, ranks: Any) -> Iterator[Iterable[CheckpointTensor]]:
    """Yield the tensors of a loaded model. At the end, no weight is left unpacked."""
    head, is_tied, table = model.lm_head, model.config.tie_word_embeddings, model.embed_tokens
    weights = [
        Unpacked(linear)
        for linear in model.linears()
        if isinstance(linear.weight, Tensor) or hasattr(linear.weight, "unpack")
        if not (is_tied and linear is head)
    ]

    def with_head(tensor: CheckpointTensor) -> CheckpointTensor:
        def store(weight: Any) -> None:
            tensor.store(weight)
            # The packed copy of the table, if there is one, is made again.
            head.weight = table if ranks is None else table.rows
            model.backend.after_load(head)

        return replace(tensor, store=store)

    try:
        yield [
            with_head(tensor) if is_tied and tensor.name in EMBEDDINGS else tensor
            for tensor in model.checkpoint_tensors()
        ]
    finally:
        with hold_interrupt():
            for weight in weights:
                weight.close()


def load_weights(engine: LLMEngine, config: EngineConfig, weights: Any, is_partial: bool) -> None:
    """See `LLM.load_weights`."""
    with engine.idle(), torch.no_grad(), ExitStack() as stack:
        runner: Any = engine.runner
        before = refusal = runner if isinstance(runner, Refusal) else None
        runner = runner if refusal is None else refusal.runner
        ranks, runner = getattr(runner, "ranks", None), getattr(runner, "runner", runner)
        checkpoint, has_length = engine.checkpoint, isinstance(weights, Sized)
        batches: Iterable[dict[Path, Any]]
        if is_directory := isinstance(weights, str | os.PathLike):
            checkpoint = other_checkpoint(checkpoint, config, Path(weights).expanduser())
            batches, has_length = [stack.enter_context(checkpoint.open_weights())], True
        else:
            batches = in_memory(checkpoint, weights)
        stored = set[str]()

        def recorded(tensor: CheckpointTensor) -> CheckpointTensor:
            def store(weight: Any) -> None:
                nonlocal refusal
                if not stored:  # this is the first change
                    refusal = refusal or Refusal(engine, INCOMPLETE)
                    engine.scheduler.block_manager.reset_prefix_cache()
                    engine.checkpoint.is_replaced = True
                if tensor.name in stored:
                    raise ValueError(f"{IN_MEMORY.parent} has {tensor.name} twice")
                stored.add(tensor.name)
                tensor.store(weight)

            return replace(tensor, store=store)

        with runner.thread_limit(), runner.backend.step_context():
            with stored_again(runner.model, ranks) as tensors:
                if ranks is not None:
                    tensors = ranks.tensors_of_rank(tensors, checkpoint.model_config)
                tensors = [recorded(tensor) for tensor in tensors]
                for files in batches:
                    check_head(runner.model, checkpoint, files)
                    names = {name for file in files.values() for name in file.keys()}  # noqa: SIM118
                    is_whole = has_length and not is_partial
                    load_files([t for t in tensors if is_whole or is_among(t, names)], files)
                missing = {tensor.name: tensor for tensor in tensors if tensor.name not in stored}
                if missing and not is_partial:
                    check_headers(missing, {IN_MEMORY: MemoryFile({})})
            if stored and runner.device.type == "cpu":  # the addresses of weights have changed
                runner.make_fast_steps(runner)
        if refusal is not None and not (is_partial and before):
            refusal.lift()
        if is_directory and not is_partial:
            engine.checkpoint = checkpoint


def is_among(tensor: CheckpointTensor, names: Container[str]) -> bool:
    """Return whether a tensor is one of `names`, which may lack the prefix "model."."""
    return tensor.name in names or tensor.name.removeprefix(PREFIX) in names


def other_checkpoint(checkpoint: Any, config: EngineConfig, directory: Path) -> Any:
    """Return the checkpoint in a directory. Raises ValueError unless it has the same sizes."""
    if not directory.is_dir():
        raise ValueError(f"there is no directory {str(directory)!r}; load_weights reads no hub")
    other = type(checkpoint)(directory, config.hf_overrides)
    ours, theirs = (
        {each.name: getattr(x.model_config, each.name) for each in fields(x.model_config)}
        for x in (checkpoint, other)
    )
    different = [
        f"{name} is {theirs.get(name)!s:.80}, and the engine has {value!s:.80}"
        for name, value in ours.items()
        if name not in UNUSED and theirs.get(name) != value
    ]
    if different:
        raise ValueError(f"{directory} is another model: {'; '.join(different)}; make another LLM")
    return other


def check_head(model: Qwen3, checkpoint: Any, files: Mapping[Path, Any]) -> None:
    """Raise ValueError for a head that would be ignored, because it is not the embeddings."""
    has_head = any(HEAD in file.keys() for file in files.values())  # noqa: SIM118
    is_tied = model.config.tie_word_embeddings
    if has_head and is_tied and not checkpoint.match_head(files)[0].tie_word_embeddings:
        raise ValueError(
            f"{HEAD} differs from the embeddings, and this engine has one tensor for both, because "
            "they were equal when it was made; make another LLM"
        )


def in_memory(checkpoint: Any, weights: Any) -> Iterator[dict[Path, Any]]:
    """Yield files with tensors in memory: one, or one for each tensor of a generator."""

    def file_of(tensors: dict[str, Tensor]) -> dict[Path, Any]:
        files: dict[Path, Any] = checkpoint.model_config.select_tensors(
            {IN_MEMORY: MemoryFile(tensors)}
        )
        return files

    if not isinstance(weights, Iterable):
        raise TypeError(f"{KINDS}, not {weights!r:.80}")
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    together: dict[str, Tensor] = {}
    for pair in pairs:
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            name, tensor = pair, None
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{KINDS}, not {type(tensor).__name__} for {name!s:.80}")
        # The head and the embeddings are compared.
        if isinstance(weights, Sized) or name.endswith(("embed_tokens.weight", HEAD)):
            if name in together:
                raise ValueError(f"{IN_MEMORY.parent} has {name} twice")
            together[name] = tensor.detach()
        else:
            yield file_of({name: tensor.detach()})
    yield file_of(together)
