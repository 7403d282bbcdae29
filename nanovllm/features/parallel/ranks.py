"""Tensor parallelism: each rank is a process with a part of every layer and of the KV cache.

torchrun starts the script once for each rank. All ranks make the same engine, add the same requests
and plan the same steps, because the scheduler has no clock and a random number is a function of
(seed, position). There is therefore no controller, and no plan is sent. The model is divided as in
Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053). With N ranks, T tokens and R sampling rows:

    embedding   V / N rows: each rank looks up the tokens in its rows         all-reduce of [T, E]
    layer       q, k, v: the rows of H / N and K / N heads
                attention of these heads, with their KV cache
                output: the columns of these heads                            all-reduce of [T, E]
                gate, up: F / N rows; down: F / N columns                     all-reduce of [T, E]
    head        V / N rows                                                    all-gather of [R, V]

The model of a rank is a Qwen3 with fewer heads, a smaller feed-forward and a smaller vocabulary.
shards.py selects its slices of the checkpoint, and this file combines the
results. All ranks have the same logits, and sample the same tokens from them.

Ranks that run different steps would wait for each other forever or mix their results. Before each
step they therefore compare a hash of the plan and of the tokens of the last step.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.features.parallel.shards import config_of_rank, tensors_of_rank
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import CheckpointTensor
from nanovllm.plan import StepOutput, StepPlan
from nanovllm.runner.one_rank import Launch, OneRank
from nanovllm.utils.log import logger

# If a rank is idle for this long, the others fail. If it fails or is killed, they fail at once.
TIMEOUT = timedelta(minutes=5)
DOWNLOAD_TIMEOUT = timedelta(days=1)  # for ranks that wait while rank 0 downloads


class Ranks(OneRank):
    """The connections of this rank to the others: `host` between CPUs, `device` between devices."""

    last_results = ""  # of the last step

    def __init__(self, config: EngineConfig) -> None:
        """Connect. Raises RuntimeError if options differ between ranks or a rank is missing."""
        check_options(config)
        self.rank, self.size = config.rank, config.tensor_parallel_size
        if self.rank > 0:
            logger.setLevel(logging.WARNING)
        if on_gpu := config.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", self.rank)))
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=TIMEOUT)
        # New groups, because another engine or the script may use the existing ones.
        self.host = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.device = dist.new_group(backend="nccl", timeout=TIMEOUT) if on_gpu else self.host
        self.is_connected = True
        self.agree("options", repr(config))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x [T, E] over all ranks, in place."""
        self._call(dist.all_reduce, x, group=self.device)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate x [T, O] of all ranks to [T, O * N], in the order of ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._call(dist.all_gather, parts, x, group=self.device)
        return torch.cat(parts, dim=-1)

    def min(self, number: int) -> int:
        return min(self._gather(number))

    def _gather(self, number: int) -> list[int]:
        """Return the numbers, of 64 bits, of all ranks."""
        # Not an all-reduce: with so few numbers a rank may only send at first. If the receiver has
        # just left, gloo (of torch 2.13) loses the error of a send, and waits for TIMEOUT.
        numbers = torch.empty((self.size, 1), dtype=torch.int64, device="cpu")
        own = torch.tensor([number], device="cpu")
        self._call(dist.all_gather, [*numbers], own, group=self.host)
        return numbers.flatten().tolist()

    def config_of_rank(self, full_config: ModelConfig) -> ModelConfig:
        return config_of_rank(full_config, self.size)

    def tensors_of_rank(
        self, tensors: Iterable[CheckpointTensor], full_config: ModelConfig
    ) -> Iterator[CheckpointTensor]:
        return tensors_of_rank(tensors, full_config, self.rank, self.size)

    def run(self, plan: StepPlan, launch: Launch) -> Callable[[], StepOutput]:
        last, self.last_results = self.last_results, ""  # a mismatch must not fail the next step
        self.agree("steps", f"{plan} after {last}")
        with self.leave_if_it_fails():
            wait = launch(plan)

        def wait_and_record() -> StepOutput:
            with self.leave_if_it_fails():
                output = wait()
            self.last_results = f"{output.token_ids} {sorted(output.errors)}"
            return output

        return wait_and_record

    def agree(self, what: str, text: str) -> None:
        """Raise RuntimeError on every rank if `text` differs between ranks."""
        # The address in the representation of an object differs between processes.
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
        digest = xxhash.xxh64_intdigest((what + text).encode()) >> 1
        if len(set(self._gather(digest))) > 1:
            texts: list[Any] = [None] * self.size
            self._call(dist.all_gather_object, texts, f"{what} {text}", group=self.host)
            start = max(0, len(os.path.commonprefix(texts)) - 60)  # noqa: RUF071 (no paths)
            shown = "; ".join(f"rank {i}: ...{t[start : start + 120]}" for i, t in enumerate(texts))
            raise RuntimeError(
                f"the ranks have different {what}: {shown}. Every rank must make the same calls "
                "with the same arguments in the same order, from one thread, including aborts"
            )

    def connect(self, model: Qwen3, vocab_size: int) -> None:
        def gather_logits(logits: Tensor) -> Tensor:
            return self.all_gather(logits)[:, :vocab_size].contiguous()

        for layer in model.layers:
            layer.self_attn.o_proj.reduce = self.all_reduce
            layer.mlp.down_proj.reduce = self.all_reduce
        model.lm_head.reduce = gather_logits
        model.embed_tokens = ShardedTable(model.embed_tokens, self)

    @contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """Run the block on rank 0, and then on the other ranks."""
        group = dist.new_group(backend="gloo", timeout=DOWNLOAD_TIMEOUT)
        if self.rank > 0:
            self._call(dist.barrier, group)
        try:
            yield
        finally:
            if self.rank == 0:
                self._call(dist.barrier, group)
            dist.destroy_process_group(group)

    @contextmanager
    def leave_if_it_fails(self) -> Iterator[None]:
        """Disconnect if the block fails, so that no other rank waits for this one."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Disconnect from the other ranks without waiting for them. A second call does nothing."""
        if self.is_connected:
            self.is_connected = False
            if dist.is_initialized():  # else the script has destroyed all groups
                dist.destroy_process_group(self.host)
            self.host = self.device = None

    def _call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        reason = None
        try:
            if self.is_connected:
                function(*args, **kwargs)
                return
        except BaseException as error:  # also Ctrl-C: the others must not wait
            self.leave()
            if not isinstance(error, RuntimeError):
                raise
            reason = error
        raise RuntimeError(
            f"rank {self.rank} is disconnected from the other ranks: a rank failed, was "
            f"stopped, ended its script, or made no step for {TIMEOUT.seconds} s; the error "
            "of that rank says why; start the script again"
        ) from reason


def check_options(config: EngineConfig) -> None:
    """Raise ValueError if this process cannot be one of the ranks that the options describe."""
    size = config.tensor_parallel_size
    if ":" in config.device:
        raise ValueError(
            f"device={config.device!r} would be the GPU of all {size} ranks; use 'cuda', and each "
            "takes the GPU of its LOCAL_RANK"
        )
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != str(size) or "RANK" not in os.environ:
        problem = "RANK is not set" if world_size == str(size) else f"WORLD_SIZE is {world_size}"
        script = os.path.basename(sys.argv[0]) or "script.py"
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} processes, and {problem}; start them with: "
            f"torchrun --nproc-per-node {size} {script}"
        )


class ShardedTable:
    """An embedding table whose rows are divided among the ranks."""

    def __init__(self, rows: Any, ranks: Ranks) -> None:
        """rows: the rows of this rank, a tensor or another weight [V / N, E]."""
        self.rows, self.shape, self.dtype, self.copy_ = rows, rows.shape, rows.dtype, rows.copy_
        self.ranks = ranks
        self.start = ranks.rank * rows.shape[0]

    def cpu(self) -> Tensor:
        """Copy the rows of this rank, a tensor, to the CPU."""
        rows: Tensor = self.rows
        return rows.cpu()

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [T] as [T, E]. Each row is on one rank; the others add 0."""
        rows = ids - self.start
        elsewhere = (rows < 0) | (rows >= self.rows.shape[0])
        x: Tensor = self.rows[rows.masked_fill(elsewhere, 0)]
        return self.ranks.all_reduce(x.masked_fill_(elsewhere[:, None], 0))
