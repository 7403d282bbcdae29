"""New weights in a running engine: `LLM.load_weights`, as training loops need it for rollouts.

The first load and later ones store the same CheckpointTensors. What differs is the source, which
may be tensors in memory, and what depends on the weights:

    packed weights   Products on a CPU read weights in another layout. A weight is unpacked when its
                     first rows are stored, and packed again after the last. No more than one is in
                     memory in both layouts.
    fused layers     They contain the addresses of packed weights, and are made anew.
    captured steps   On a GPU all weights keep their addresses, so captured steps remain valid.
    KV and states    The prefix cache, the host cache and the snapshots are emptied.
    KV on disk       It belongs to the files of a checkpoint. It can neither be saved nor loaded
                     while the engine has other weights.

When the first tensor is stored, a Refusal takes the place of the runner. If an error or Ctrl-C
follows, it stays there until a later call has loaded all weights.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
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
from nanovllm.models.weights import EMBEDDINGS, HEAD, PREFIX, CheckpointTensor, check_headers
from nanovllm.models.weights import load_weights as load_files

INCOMPLETE = (
    "the weights are incomplete, after sleep(level=2) or a load_weights that did not end; call "
    "load_weights with all weights, or make another LLM"
)
KINDS = "weights must be a directory, a state_dict, or pairs of a name and a torch.Tensor"
NAMES = DTYPES | {torch.float64: "F64"}  # of dtypes in safetensors
# Errors show the first part of this path in place of the directory of a checkpoint.
IN_MEMORY = Path("the argument of load_weights", "tensors")
# Fields of a ModelConfig that may differ, because they do not change the computation.
UNUSED = {"architecture", "dtype", "max_position_embeddings", "tie_word_embeddings"}


class Refusal:
    """Takes the place of the runner of an engine that cannot run: its use raises RuntimeError."""

    def __init__(self, engine: Any, why: str) -> None:
        self.engine, self.why = engine, why
        self.runner, self.factories = engine.runner, engine.input_processor.task_factories
        # For sleep.py: what makes the parts of the runner again, and weights in host memory.
        self.makers: Mapping[str, Callable[[], Any]] = {}
        self.saved: list[Tensor] = []
        engine.runner = self

    def __getattr__(self, _: str) -> NoReturn:
        raise RuntimeError(self.why)

    def refuse_requests(self) -> None:
        """Refuse requests before they are queued. Others fail in their first step."""

        def refuse(*_: object) -> NoReturn:
            raise RuntimeError(self.why)

        if self.engine.runner is self:
            self.engine.input_processor.task_factories = {object: refuse}

    def lift(self) -> None:
        self.engine.runner = self.runner
        self.engine.input_processor.task_factories = self.factories


def runner_of(engine: LLMEngine) -> tuple[Any, Any, Refusal | None]:
    """Return the ModelRunner of an engine, its ranks, and what refuses its requests, if any."""
    runner: Any = engine.runner
    refusal = runner if isinstance(runner, Refusal) else None
    runner = runner if refusal is None else refusal.runner
    return getattr(runner, "runner", runner), getattr(runner, "ranks", None), refusal


class MemoryFile(dict[str, Tensor]):
    """Tensors with the methods of an open safetensors file."""

    get_tensor = dict.__getitem__

    def get_slice(self, name: str) -> MemorySlice:
        return MemorySlice(self[name])


@dataclass(frozen=True)
class MemorySlice:
    """A tensor with the methods of a slice of an open safetensors file."""

    tensor: Tensor

    def get_shape(self) -> torch.Size:
        return self.tensor.shape

    def get_dtype(self) -> str:
        return NAMES.get(self.tensor.dtype, str(self.tensor.dtype))

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
        """Return consecutive rows, `sizes` outputs each, as objects that can only be stored."""
        parts = zip(sizes, itertools.accumulate(sizes), strict=True)
        return [
            SimpleNamespace(
                shape=(size, self.shape[1]), copy_=partial(self.store, slice(end - size, end))
            )
            for size, end in parts
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
            return_freed_memory()


def return_freed_memory() -> None:
    """Return to Linux what glibc's malloc keeps of freed blocks below 32 MiB.

    Without this, hand-overs of 456 MiB of float32 weights took up to 440 MiB more for the time
    being, instead of 240, and an engine that slept at level 2 kept 395 MiB, instead of 16.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # musl has none
        trim(0)


def unpacked(weight: Any) -> Tensor:
    """Return a weight as it was before `Backend.after_load`."""
    if isinstance(weight, Tensor):
        return weight.to_dense(weight.dtype) if weight.is_mkldnn else weight
    dense: Tensor = weight.unpack()  # PackedExperts of backends/cpu/kernels/experts.py
    return dense


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
        runner, ranks, refusal = runner_of(engine)
        if refusal is not None and refusal.makers:
            raise RuntimeError(refusal.why)
        ends_refusal = refusal is None or not is_partial
        checkpoint, is_directory = engine.checkpoint, isinstance(weights, str | os.PathLike)
        is_whole = (is_directory or isinstance(weights, Sized)) and not is_partial
        if is_directory:
            checkpoint = other_checkpoint(checkpoint, config, Path(weights).expanduser())
            batches: Iterable[Any] = [stack.enter_context(checkpoint.open_weights())]
        else:
            batches = in_memory(checkpoint, weights)
        stored = set[str]()

        def recorded(tensor: CheckpointTensor) -> CheckpointTensor:
            def store(weight: Any) -> None:
                nonlocal refusal
                if not stored:  # this is the first change
                    refusal = refusal or Refusal(engine, INCOMPLETE)
                    stack.callback(refusal.refuse_requests)
                    engine.scheduler.block_manager.reset_prefix_cache()
                    engine.checkpoint.is_replaced = True
                if tensor.name in stored:
                    raise ValueError(f"{IN_MEMORY.parent} has {tensor.name} twice")
                stored.add(tensor.name)
                tensor.store(weight)

            return replace(tensor, store=store)

        stack.enter_context(runner.thread_limit())
        stack.enter_context(runner.backend.step_context())
        with stored_again(runner.model, ranks) as tensors:
            if ranks is not None:
                tensors = ranks.tensors_of_rank(tensors, checkpoint.model_config)
            tensors = [recorded(tensor) for tensor in tensors]
            for files in batches:
                names = {name for file in files.values() for name in file.keys()}  # noqa: SIM118
                check_head(runner.model, checkpoint, names, files)
                names |= {PREFIX + name for name in names}
                load_files([t for t in tensors if is_whole or t.name in names], files)
            missing = {tensor.name: tensor for tensor in tensors if tensor.name not in stored}
            if missing and not is_partial:
                check_headers(missing, {IN_MEMORY: MemoryFile()})
        if runner.device.type == "cuda":  # the caller may change its tensors from now on
            torch.cuda.synchronize(runner.device)
        if ends_refusal and refusal is not None:
            if runner.device.type == "cpu" or runner.fused_model is None:
                runner.make_fast_steps(runner)
            refusal.lift()
        if is_directory and not is_partial:
            engine.checkpoint = checkpoint


def other_checkpoint(checkpoint: Any, config: EngineConfig, directory: Path) -> Any:
    """Return the checkpoint in a directory. Raises ValueError unless it is of the same model."""
    if not directory.is_dir():
        raise ValueError(f"there is no directory {str(directory)!r}; load_weights takes no hub id")
    other = type(checkpoint)(directory, config.hf_overrides)
    ours, theirs = checkpoint.model_config, other.model_config
    names = [field.name for field in fields(ours) if field.name not in UNUSED]
    different = [n for n in names if getattr(ours, n) != getattr(theirs, n, None)]
    if different:
        raise ValueError(
            f"{directory} is another model than {checkpoint.directory}: they differ in "
            f"{', '.join(different)}; make another LLM"
        )
    return other


def check_head(model: Any, checkpoint: Any, names: set[str], files: Mapping[Path, Any]) -> None:
    """Raise ValueError for a head that would be ignored although it is not the embeddings."""
    is_tied = model.config.tie_word_embeddings
    if HEAD in names and is_tied and not checkpoint.match_head(files)[0].tie_word_embeddings:
        raise ValueError(
            f"{HEAD} differs from the embeddings, and this engine has one tensor for both, because "
            "they were equal when it was made; make another LLM"
        )


def in_memory(checkpoint: Any, weights: Any) -> Iterator[Mapping[Path, Any]]:
    """Yield files with tensors in memory: one, or one for each tensor of a generator."""
    if not isinstance(weights, Iterable):
        raise TypeError(f"{KINDS}, not {weights!r:.80}")
    select, together = checkpoint.model_config.select_tensors, MemoryFile()
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        name, tensor = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (pair, None)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{KINDS}, not {type(tensor).__name__} for {name!s:.80}")
        if name in together:
            raise ValueError(f"{IN_MEMORY.parent} has {name} twice")
        # The head and the embeddings are compared.
        if isinstance(weights, Sized) or name.endswith(("embed_tokens.weight", HEAD)):
            together[name] = tensor.detach()
        else:
            yield select({IN_MEMORY: MemoryFile({name: tensor.detach()})})
    yield select({IN_MEMORY: together})
