"""New weights in a running engine: `LLM.load_weights`, as training loops need it for rollouts.

The first load and later ones store the same CheckpointTensors. What differs:

    fast steps       All weights keep their addresses, so fused layers and captured steps remain
                     valid.
    KV and states    All caches are emptied. A prefix cache on disk belongs to a checkpoint's files,
                     and is refused while the engine has other weights.

From when the first tensor is stored, the engine refuses requests. If an error or Ctrl-C follows, it
does so until all weights have been stored.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.formats.tensor_view import DTYPES, TensorView, ViewedTensor
from nanovllm.models.weights import LM_HEAD, PREFIX, CheckpointTensor, check_headers
from nanovllm.models.weights import load_weights as load_files
from nanovllm.utils.checks import check_scalar

INCOMPLETE = (
    "the weights are incomplete, after sleep(level=2) or a load_weights that did not end; call "
    "load_weights until all weights are stored, or make another LLM"
)
KINDS = "weights must be a directory, model.state_dict(), or pairs of a name and a torch.Tensor"
# Errors show the first part of this path in place of the directory of a checkpoint.
IN_MEMORY = Path("the argument of load_weights", "tensors")
# Fields of a ModelConfig that may differ, because they do not change the computation.
UNUSED = ("architecture", "dtype", "max_position_embeddings", "tie_word_embeddings")


@dataclass
class MissingParts:
    """What an engine lacks: weights, and parts of its runner. `LLMEngine.blocked` says so."""

    weights: set[str] = field(default_factory=set)  # names of those that are not stored yet
    level: int = 0  # of the last `LLM.sleep`
    # What makes the parts of the runner again that this freed, by tag.
    makers: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)  # tags whose parts are freed
    saved: list[Tensor] = field(default_factory=list)  # weights in host memory

    @classmethod
    def of(cls, runner: Any) -> MissingParts:
        if runner.missing_parts is None:
            runner.missing_parts = cls()
        missing: MissingParts = runner.missing_parts
        return missing

    def reason(self) -> str:
        """Return why requests are refused, or "" if nothing is missing."""
        if not self.asleep:
            return INCOMPLETE if self.weights else ""
        if self.asleep == set(self.makers):
            return "the engine sleeps; call wake_up first"
        [tag] = self.asleep
        part = "KV cache sleeps" if tag == "kv_cache" else "weights sleep"
        return f"the engine's {part}; call wake_up(tags=['{tag}']) first"


def accept_requests(engine: LLMEngine) -> None:
    """Accept requests again if nothing is missing. Otherwise, set the reason that they are told."""
    runner: Any = engine.runner
    reason = MissingParts.of(runner).reason()
    if not reason and runner.fused_model is None:
        runner.make_fast_steps(runner)
    engine.blocked = reason  # last: after Ctrl-C before it, another call does this


def return_freed_memory() -> None:
    """Return to Linux what glibc's malloc keeps of freed blocks below 32 MiB.

    Without this, an engine that slept at level 2 kept 395 MiB, instead of 16.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # not musl
        libc.malloc_trim(0)


def load_weights(engine: LLMEngine, config: EngineConfig, weights: Any, is_partial: bool) -> None:
    """See `LLM.load_weights`."""
    check_scalar("partial", is_partial, bool)
    with engine.idle(), torch.no_grad(), ExitStack() as stack:
        runner: Any = engine.runner
        missing = MissingParts.of(runner)
        if "weights" in missing.asleep:
            raise RuntimeError(engine.blocked)
        was_complete = not missing.weights
        checkpoint = engine.checkpoint
        is_directory = isinstance(weights, str | os.PathLike)
        is_whole = (is_directory or isinstance(weights, Sized)) and not is_partial
        if is_directory:
            checkpoint = other_checkpoint(checkpoint, config, weights)
            batches: Iterable[Any] = [stack.enter_context(checkpoint.open_weights())]
        else:
            batches = in_memory(checkpoint, weights)
        is_tied = runner.model.config.tie_word_embeddings
        stored = set[str]()  # names of tensors

        def recorded(tensor: CheckpointTensor) -> CheckpointTensor:
            def store(weight: Any) -> None:
                if not stored:  # this is the first change
                    if not engine.blocked:
                        missing.level = 0
                        engine.blocked = INCOMPLETE
                    if was_complete:
                        missing.weights = {tensor.name for tensor in tensors}
                    engine.scheduler.block_manager.reset_prefix_cache()
                    engine.checkpoint.is_replaced = True
                # Else, a model that was made in inference mode is read-only. The iterable of the
                # caller runs outside.
                with torch.inference_mode():
                    tensor.store(weight)
                stored.add(tensor.name)
                missing.weights.discard(tensor.name)

            return replace(tensor, store=store)

        stack.enter_context(runner.backend.thread_limit())
        stack.enter_context(runner.backend.step_context())
        own = runner.model.checkpoint_tensors()
        own = runner.ranks.tensors_of_rank(own, checkpoint.model_config)
        tensors = [recorded(tensor) for tensor in own]
        try:
            for files in batches:
                names = {name for file in files.values() for name in file.keys()}  # noqa: SIM118
                head_is_used = is_tied and LM_HEAD in names
                if head_is_used and not checkpoint.head_equals_embeddings(files):
                    raise ValueError(
                        f"{LM_HEAD} differs from the embeddings, and this engine has one tensor "
                        "for both, because they were equal when it was made; make another LLM"
                    )
                names |= {PREFIX + name for name in names}
                load_files([t for t in tensors if is_whole or t.name in names], files)
            absent = {tensor.name: tensor for tensor in tensors if tensor.name not in stored}
            if absent and not is_partial:
                check_headers(absent, {IN_MEMORY: TensorView()})
        except (TypeError, ValueError) as error:
            if stored:
                error.args = (f"{error}; {INCOMPLETE}",)
            raise
        if runner.device.type == "cuda":  # the caller may change its tensors from now on
            torch.cuda.synchronize(runner.device)
        if was_complete:
            missing.weights = set()
        if engine.blocked:
            accept_requests(engine)
        if is_directory and not is_partial:
            engine.checkpoint = checkpoint


def other_checkpoint(checkpoint: Any, config: EngineConfig, path: str | os.PathLike[str]) -> Any:
    """Return the checkpoint in a directory. Raises ValueError unless it is of the same model."""
    directory = Path(os.path.expanduser(path))
    if not directory.is_dir():
        raise ValueError(f"there is no directory {str(directory)!r}; load_weights takes no hub id")
    other = type(checkpoint)(directory, config.hf_overrides)
    ours, theirs = checkpoint.model_config, other.model_config
    names = [field.name for field in fields(ours) if field.name not in UNUSED]
    if different := [n for n in names if getattr(ours, n) != getattr(theirs, n, None)]:
        raise ValueError(
            f"{directory} is another model than {checkpoint.directory}: they differ in "
            f"{', '.join(different)}; make another LLM"
        )
    return other


def in_memory(checkpoint: Any, weights: Any) -> Iterator[Mapping[Path, Any]]:
    """Yield files with tensors in memory: one, or one for each tensor of a generator."""
    if not isinstance(weights, Iterable):
        raise TypeError(f"{KINDS}, not {type(weights).__name__}")
    select = checkpoint.model_config.select_tensors
    together = TensorView()
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        name, tensor = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, pair)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{KINDS}, not {type(tensor).__name__} with the name {name!s:.80}")
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
        viewed = ViewedTensor([*tensor.shape], dtype, tensor.detach)
        # The head and the embeddings are compared.
        if isinstance(weights, Sized) or name.endswith(("embed_tokens.weight", LM_HEAD)):
            together[name] = viewed
        else:
            yield select({IN_MEMORY: TensorView({name: viewed})})
    yield select({IN_MEMORY: together})
