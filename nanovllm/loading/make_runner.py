"""Makes a ModelRunner, in stages: memory, model, rows, KV cache, then captured or fused steps.

The order matters. Free memory is measured before the weights are loaded. The KV cache comes after
everything else that a step needs, because it takes the remaining memory. Captured and fused steps
come last, because they read the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.loading import memory
from nanovllm.loading.memory import MemoryBudget
from nanovllm.loading.select_backend import pick_backend, pick_device, pick_dtype
from nanovllm.models.attention import PlainAttention
from nanovllm.models.backend import Backend, check_capability
from nanovllm.models.fp8 import Scales
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import load_weights
from nanovllm.runner.device_runner import DeviceRunner
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.one_rank import OneRank
from nanovllm.runner.rows import Rows
from nanovllm.utils.host import check_fork, explain_out_of_memory
from nanovllm.utils.log import logger

if TYPE_CHECKING:
    from nanovllm.features.sampling.logit_rules.row_rules import RulesState


def make_runner(
    config: EngineConfig,
    full_config: ModelConfig,
    files: Mapping[Path, Any],
    name: str,
    max_model_len: int,
    ranks: OneRank,
) -> ModelRunner:
    """Make a ModelRunner for this rank's part of the model `name`.

    `full_config` describes the model. `files` are its open safetensors files, or empty for random
    weights. Requests have at most `max_model_len` tokens, or fewer if memory limits them.
    """
    # This comes before the division among ranks, whose errors name only sizes that do not fit.
    full_config.check_options(config)
    check_fork()
    device = pick_device(config.device)
    on_device: AbstractContextManager[None] = nullcontext()
    if device.type == "cuda":
        from nanovllm.features.kernel_check.at_start import on_gpu

        on_device = on_gpu(device)
    remedy = (
        "out of memory; lower max_num_seqs, max_model_len or max_num_batched_tokens, or, if they "
        "are set, num_kv_cache_blocks, kv_cache_memory_bytes and swap_space"
    )
    with on_device, explain_out_of_memory(remedy):
        free = memory.free_memory(device, config.tensor_parallel_size)
        model_config = ranks.config_of_rank(full_config)
        backend = make_backend(config, model_config, device, full_config.vocab_size)
        budget = memory.plan_memory(config, model_config, backend, free, name)
        config = budget.config  # with fewer sequences, if the states of more do not fit
        # The longest request that can fit limits the size of rows and rotary tables.
        num_blocks = budget.num_kv_blocks(max_model_len, free - budget.weight_bytes)
        longest = budget.fitted_length(max_model_len, ranks.min(num_blocks))
        model = model_config.model_class()(model_config, longest, backend)
        with backend.thread_limit():
            load_model(config, model, full_config, files, ranks)
        runner = make_eager_runner(config, model, full_config.vocab_size, longest)
        runner.ranks = ranks
        scales = None
        if config.kv_cache_dtype != "auto":
            from nanovllm.features.formats.fp8_scales import read_fp8_scales

            scales = read_fp8_scales(files, model_config.kv_layers)
        make_cache(runner, budget, longest, scales)
        runner.max_model_len = budget.fitted_length(longest, runner.num_blocks)
        runner.make_fast_steps = partial(make_fast_steps, config)
        runner.make_fast_steps(runner)
    log_sizes(runner, budget, name, max_model_len)
    return runner


def make_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, vocab_size: int
) -> Backend:
    """Make and check the backend of a model. `vocab_size` is that of all ranks."""
    if config.batch_invariant and config.attention_backend == "auto":
        # The engine waits for the kernels, and plain torch replaces none of them.
        kernels = "triton" if device.type == "cuda" else "numba"
        config = replace(config, attention_backend=kernels)
    if config.kv_cache_dtype != "auto" and config.attention_backend != "sdpa":
        # Triton cannot convert float8_e4m3fn on older GPUs.
        needs = f"kv_cache_dtype={config.kv_cache_dtype!r} needs"
        instead = "use kv_cache_dtype='auto', or attention_backend='sdpa', which is slower"
        check_capability(device, (8, 9), needs, instead)
    dtype = pick_dtype(config.dtype, device, model_config.dtype)

    def num_weights() -> int:
        return memory.num_weights(model_config.model_class().on_meta(model_config))

    backend = pick_backend(config.attention_backend, device, dtype, num_weights)
    if config.batch_invariant:
        backend = backend.batch_invariant(config, model_config)
    plain = Backend(device, dtype)
    if config.quantization is not None:
        from nanovllm.backends import int4, int8

        quantized = (int8 if config.quantization == "int8" else int4).quantized
        backend, plain = quantized(backend), quantized(plain)
    if not backend.is_checked():
        from nanovllm.features.kernel_check.at_start import checked

        backend = checked(backend, plain, config, model_config, vocab_size)
    if device.type == "cpu":
        from nanovllm.backends.cpu.thread_limit import ThreadLimit

        backend.thread_limit = limit = ThreadLimit()
        backend.before_layer = limit.adjust
    return backend


def load_model(
    config: EngineConfig,
    model: Qwen3,
    full_config: ModelConfig,
    files: Mapping[Path, Any],
    ranks: OneRank,
) -> None:
    """Load the weights of `model`, which is this rank's part."""
    tensors = ranks.tensors_of_rank(model.checkpoint_tensors(), full_config)
    if files:
        load_weights(tensors, files, model.backend.before_layer)
    else:
        from nanovllm.features.weights.dummy_weights import random_weights

        random_weights(tensors, config.seed, model.norm.device)
    ranks.connect(model, full_config.vocab_size)


def make_eager_runner(
    config: EngineConfig, model: Qwen3, vocab_size: int, max_model_len: int
) -> ModelRunner:
    """Return a runner without a KV cache, and without captured or fused steps."""
    block_size = config.block_size
    device = model.backend.device
    max_blocks = -(-max_model_len // block_size)
    rows = Rows(config.max_num_seqs, max_blocks, block_size, device)

    def make_rules() -> RulesState:
        from nanovllm.features.sampling.logit_rules.row_rules import RulesState

        state = RulesState(config.max_num_seqs, max_blocks * block_size, vocab_size, device)
        state.processed_logprobs = config.logprobs_mode == "processed_logprobs"
        return state

    rows.make_rules = make_rules
    captures = model.backend.captures  # eager decodes then compute the same as captured decodes
    return (DeviceRunner if captures else ModelRunner)(model, model.backend, rows)


def make_cache(
    runner: ModelRunner,
    budget: MemoryBudget,
    max_model_len: int,
    scales: list[Scales] | None,
) -> None:
    """Allocate a KV cache as large as options set or memory allows, and the host cache."""
    backend, model_config = runner.backend, runner.model.config
    if budget.state_bytes:
        from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
        from nanovllm.features.models.hybrid.states import States

        assert isinstance(model_config, HybridConfig)
        num_states = budget.config.max_num_seqs + 1 + budget.num_state_slots
        runner.states = States(model_config, num_states, backend)

    def make_attention(num_blocks: int) -> PlainAttention:
        sizes = num_blocks, budget.config.block_size
        return backend.attention_class(model_config, *sizes, backend.dtype, backend.device, scales)

    if budget.num_host_blocks:
        from nanovllm.features.kv.host_cache.pool import HostPool

        runner.host_pool = HostPool(budget.num_host_blocks, make_attention(1).cache)
    scratch = 0
    if backend.device.type == "cuda":
        from nanovllm.backends.gpu.profile import scratch_bytes

        scratch = scratch_bytes(runner, make_attention, budget.config, max_model_len)
    free = memory.free_memory(backend.device, budget.config.tensor_parallel_size)
    if runner.states is not None and backend.device.type == "cuda":
        # A CPU counts memory as free until it is written. `num_kv_blocks` subtracts the states.
        free += runner.states.nbytes
    runner.num_blocks = runner.ranks.min(budget.num_kv_blocks(max_model_len, free, scratch))
    runner.attention = make_attention(runner.num_blocks + 1)


def make_fast_steps(config: EngineConfig, runner: ModelRunner) -> None:
    """Reduce the overhead of decodes: fuse the layers on a CPU, or capture on a GPU."""
    backend, model, ranks = runner.backend, runner.model, runner.ranks
    # Fused layers have no all-reduce.
    fused = backend.fuse_layers(model, runner.attention) if ranks.size == 1 else None
    runner.fused_model = fused or model
    runner.fused_step = backend.fuse_step(runner.fused_model, runner.attention, runner.rows)
    # A capture runs steps, in which ranks wait for each other: all of them capture, or none does.
    if config.enforce_eager or not ranks.min(int(isinstance(runner, DeviceRunner))):
        return
    assert isinstance(runner, DeviceRunner)
    with torch.inference_mode():
        graphs = backend.capture_decode(runner.decode, runner.rows.positions, ranks.min)
        if not graphs.replays:
            return
        chunks = None
        if runner.states is None:
            sizes = graphs, config.token_budget
            chunks = backend.capture_chunks(model, runner.attention, *sizes)
        if config.check_kernels:
            from nanovllm.features.kernel_check.at_start import replay_is_right

            if not replay_is_right(runner, graphs, chunks, config.token_budget):
                return
        runner.graphs = graphs
        runner.fused_model = chunks or runner.fused_model


def log_sizes(runner: ModelRunner, budget: MemoryBudget, name: str, max_model_len: int) -> None:
    cache = runner.attention.cache
    num_tokens = runner.num_blocks * budget.config.block_size
    length = f"{runner.max_model_len:,} of the model's {max_model_len:,}"
    fitted = f", which limits max_model_len to {length}" * (runner.max_model_len < max_model_len)
    states = f", states of {budget.state_bytes / 2**20:,.0f} MiB" * (budget.state_bytes > 0)
    logger.info(
        f"{name} on {runner.device} in {str(runner.dtype).removeprefix('torch.')}: weights of "
        f"{budget.weight_bytes / 2**20:,.0f} MiB{states}, KV cache of {num_tokens:,} tokens in "
        f"{str(cache.dtype).removeprefix('torch.')} ({cache.nbytes / 2**20:,.0f} MiB){fitted}"
    )
