"""Makes a ModelRunner: device, model, rows, KV cache, then captured graphs or fused layers.

The KV cache comes after everything else, because it takes the memory that is left.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from nanovllm.api.config import EngineConfig
from nanovllm.backends.cpu.openmp import check_openmp
from nanovllm.backends.cpu.threads import ThreadLimit
from nanovllm.features.host_tier.pool import HostPool, PinnedPool, make_host_tier
from nanovllm.features.tensor_parallel.shards import config_of_rank, tensors_of_rank
from nanovllm.loading import memory
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.loading.select_backend import pick_backend, pick_device, pick_dtype
from nanovllm.models.backend import Attention
from nanovllm.models.config import ModelConfig
from nanovllm.models.fp8 import FP8, Scales
from nanovllm.models.qwen3 import Qwen3
from nanovllm.models.weights import random_weights
from nanovllm.plan import StepPlan
from nanovllm.runner.mirror import Mirror
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.rows import Rows

if TYPE_CHECKING:
    from nanovllm.features.tensor_parallel.ranks import Ranks


def make_runner(
    config: EngineConfig,
    whole: ModelConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    ranks: Ranks | None = None,
) -> ModelRunner:
    """`whole` is the model in `checkpoint`, of which each of the ranks has a part."""
    check_openmp()
    model_config = whole if ranks is None else config_of_rank(whole, ranks.size)
    device, block_size = pick_device(config.device), config.kvcache_block_size
    dtype = pick_dtype(config.dtype, device, model_config.dtype)
    remedy = "out of memory; lower max_num_seqs, max_model_len or max_num_batched_tokens"
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard, memory.explain_out_of_memory(remedy):
        before = memory.Snapshot.of(device, config.tensor_parallel_size)
        num_weights = Qwen3.on_meta(model_config).num_weights
        backend = pick_backend(config.attention_backend, device, dtype, num_weights)
        if config.quantization is not None:
            backend = backend.quantized()
        weight_bytes = Qwen3.on_meta(model_config, backend).weight_bytes
        memory.check_weights(checkpoint.directory.name, weight_bytes, dtype, before)
        cache_dtype = dtype if config.kv_cache_dtype == "auto" else FP8
        block_bytes = model_config.block_bytes(block_size, cache_dtype.itemsize)
        memory.check_cache(config, block_bytes, before)
        host_blocks = memory.num_host_blocks(config, block_bytes, weight_bytes, before)
        # Rows and rotary tables are not larger than for the longest request that can fit.
        most = memory.most_blocks(config, block_bytes, weight_bytes, before)
        most = most if ranks is None else ranks.smallest(most)
        max_model_len = memory.fitted_length(config, max_model_len, most)
        model = Qwen3(model_config, max_model_len, backend)
        load_model(config, model, whole, checkpoint, ranks)
        max_blocks = -(-max_model_len // block_size)
        rows = Rows(config.max_num_seqs, max_blocks, block_size, whole.vocab_size, device)
        # What can be captured is built from the mirror, so that eager steps compute the same.
        mirror = Mirror(rows) if backend.captures else None
        thread_limit = ThreadLimit() if device.type == "cpu" else nullcontext
        runner = ModelRunner(model, backend, rows, mirror, thread_limit)
        runner.weight_bytes = weight_bytes
        scales = checkpoint.fp8_scales(model_config.num_layers) if cache_dtype == FP8 else None
        make_cache(runner, config, max_model_len, block_bytes, scales, before, host_blocks, ranks)
        runner.max_model_len = memory.fitted_length(config, max_model_len, runner.num_blocks)
        if ranks is None:  # fused layers have no all-reduce
            runner.fused_model = backend.fuse_layers(model, runner.attention) or model
        if backend.captures and not config.enforce_eager:
            shape = config.max_num_seqs, model_config.hidden_size
            hidden = torch.empty(shape, dtype=dtype, device=device)
            with (
                torch.inference_mode(),
                memory.explain_out_of_memory(
                    "the remaining memory does not hold the CUDA graphs; lower max_num_seqs, "
                    "gpu_memory_utilization or kv_cache_memory_bytes, or set enforce_eager=True"
                ),
            ):
                runner.graphs = backend.capture_decode(runner.decode, hidden)
        if (pool := runner.host_pool) is not None:
            runner.host_tier = make_host_tier(runner, pool, config, max_model_len, ranks)
            if runner.host_tier is None:
                runner.host_pool = None
    return runner


def load_model(
    config: EngineConfig,
    model: Qwen3,
    whole: ModelConfig,
    checkpoint: Checkpoint,
    ranks: Ranks | None,
) -> None:
    """Load the weights of `model`, which is the part of a rank if there are ranks."""
    tensors = model.checkpoint_tensors()
    if ranks is not None:
        tensors = tensors_of_rank(tensors, whole, ranks.rank, ranks.size)
    if checkpoint.has_weights:
        checkpoint.load_weights(tensors)
    else:
        random_weights(tensors, config.seed, model.norm.device)
    for module in model.linears():  # one after the other, to save memory
        model.backend.after_load(module)
    if ranks is not None:
        ranks.connect(model, whole.vocab_size)


def make_cache(
    runner: ModelRunner,
    config: EngineConfig,
    max_model_len: int,
    block_bytes: int,
    scales: list[Scales] | None,
    before: memory.Snapshot,
    host_blocks: int,
    ranks: Ranks | None,
) -> None:
    """Set the runner's KV cache, as large as `config` says or as fits beside the largest steps."""
    block_size, model_config = config.kvcache_block_size, runner.model.config

    def make_attention(num_blocks: int) -> Attention:
        attention: Attention = runner.backend.attention(
            model_config, num_blocks, block_size, scales
        )
        return attention

    def profile(plan: StepPlan) -> None:
        if runner.mirror is not None:  # it has the positions of decodes; rules take the host's
            runner.rows.positions[:-1] = max_model_len - 2
        runner.attention = make_attention(1)  # everything is written to the null block
        runner.attention.copy_blocks([(0, 0)])
        runner.run(plan)

    if host_blocks:  # its buffers on a GPU come first, because the cache takes what remains
        block = make_attention(1).cache[:, :, 0]
        make_pool = PinnedPool if block.device.type == "cuda" else HostPool
        with memory.explain_out_of_memory(
            f"swap_space={config.swap_space} takes more host memory than there is; lower it"
        ):
            runner.host_pool = make_pool(host_blocks, block)
    num = memory.num_kv_blocks(config, max_model_len, block_bytes, before, profile)
    if ranks is not None:
        num = ranks.smallest(num)
    with memory.explain_out_of_memory(
        f"a KV cache of {num} blocks takes {(num + 1) * block_bytes:,} bytes, more than the memory "
        "holds; lower num_kvcache_blocks or kv_cache_memory_bytes"
    ):
        runner.attention, runner.num_blocks = make_attention(num + 1), num
