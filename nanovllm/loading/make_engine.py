"""Builds an engine, with its checkpoint and tokenizer, from the options of `LLM()`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import FORMATS, MAX_DRAFT_STEP, EngineConfig, SpeculativeConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Task
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.thinking import check_markers
from nanovllm.loading.checkpoint import Checkpoint, find_checkpoint
from nanovllm.loading.make_runner import make_runner
from nanovllm.loading.select_backend import pick_device
from nanovllm.loading.tokenizer import adds_eos, load_tokenizer
from nanovllm.runner.one_rank import OneRank
from nanovllm.sampling_params import (
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    ScoringParams,
)
from nanovllm.utils.checks import located

if TYPE_CHECKING:
    from nanovllm.features.sampling.structured import GrammarCompiler
    from nanovllm.features.tasks.embeddings import PoolingSettings
# With a hidden size of 1024, the largest activations of these tokens take less than 32 MiB. glibc
# returns larger ones to Linux, which clears each page again: 6 to 10 % of the CPU time of a prompt.
CPU_TOKEN_BUDGET = 2048


def make_engine(config: EngineConfig) -> LLMEngine:
    """Find and load the checkpoint and its tokenizer, and build the engine."""
    if config.tensor_parallel_size == 1:
        return load_engine(config, *find_files(config), OneRank())
    from nanovllm.features.parallel.ranks import Ranks

    ranks = Ranks(config)
    with ranks.leave_if_it_fails():
        with ranks.rank_0_first():  # rank 0 downloads the files
            checkpoint, tokenizer_dir = find_files(config)
        engine = load_engine(config, checkpoint, tokenizer_dir, ranks)
    # This also runs at exit. Otherwise, a thread of Gloo may end the process with SIGABRT.
    weakref.finalize(engine, ranks.leave)
    return engine


def find_files(config: EngineConfig) -> tuple[Checkpoint, Path]:
    """Return the checkpoint and the directory of the tokenizer."""
    needs_weights = config.load_format != "dummy"
    directory = find_checkpoint(config.model, config.revision, weights=needs_weights)
    tokenizer_dir = directory
    if config.tokenizer is not None and not config.skip_tokenizer_init:
        with located("tokenizer: "):
            tokenizer_dir = find_checkpoint(config.tokenizer, weights=False)
    checkpoint = Checkpoint(directory, config.hf_overrides)
    if config.adapter is not None:
        from nanovllm.features.formats.adapter import Adapter

        checkpoint.adapter = Adapter(config.adapter, find_checkpoint)
        checkpoint.adapter.check_base(checkpoint.names)
    return checkpoint, tokenizer_dir


def load_engine(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer_dir: Path, ranks: OneRank
) -> LLMEngine:
    """Load the weights and the tokenizer in `tokenizer_dir`, and build the engine."""
    if config.quantization in FORMATS:
        check_format(config.quantization, checkpoint)
        config = replace(config, quantization=None)
    if config.max_num_batched_tokens is None and pick_device(config.device).type == "cpu":
        config = replace(config, max_num_batched_tokens=CPU_TOKEN_BUDGET)
    max_model_len = longest_request(config, checkpoint)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(tokenizer_dir)
    with checkpoint.open_weights(config.load_format != "dummy") as files:
        model_config, has_head = checkpoint.match_head(files)
        name = checkpoint.directory.name
        runner = make_runner(config, model_config, files, name, max_model_len, ranks)
    eos_token_ids, default_params = checkpoint.generation_defaults()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids |= {tokenizer.eos_token_id}
    # A tokenizer may have more tokens than the model.
    eos_token_ids = frozenset(t for t in eos_token_ids if t < model_config.vocab_size)
    input_processor = InputProcessor(
        tokenizer,
        model_config.vocab_size,
        runner.max_model_len,
        eos_token_ids,
        default_params,
        config.seed,
        max_logprobs=config.max_logprobs,
        separates_thinking=config.reasoning_parser is not None,
    )
    if config.reasoning_parser is not None:
        check_markers(input_processor, f"reasoning_parser={config.reasoning_parser!r}")
    block_manager: BlockManager | None = None
    if runner.host_pool is not None:
        from nanovllm.features.kv.host_cache.host_blocks import HostCacheBlockManager

        sizes = runner.num_blocks, config.block_size, runner.host_pool.num_blocks
        block_manager = HostCacheBlockManager(*sizes)
    if runner.states is not None:
        from nanovllm.features.models.hybrid.state_blocks import StateBlockManager

        num_rows = runner.rows.num_rows
        config = replace(config, max_num_seqs=num_rows)
        sizes = runner.num_blocks, config.block_size, config.enable_prefix_caching
        block_manager = StateBlockManager(*sizes, num_rows, runner.states.num_states)
    engine = LLMEngine(config, runner, input_processor, block_manager)
    engine.checkpoint = checkpoint
    if isinstance(config.speculative_config, SpeculativeConfig):
        from nanovllm.features.sampling.ngram import NgramSpeculation

        max_tokens = MAX_DRAFT_STEP[pick_device(config.device).type]
        engine.scheduler.speculation = NgramSpeculation(config.speculative_config, max_tokens)
    add_eos_token = tokenizer is not None and adds_eos(tokenizer_dir)
    input_processor.make_task = task_maker(engine, has_head, add_eos_token)

    @functools.cache
    def grammars() -> GrammarCompiler:
        from nanovllm.features.sampling.structured import GrammarCompiler

        return GrammarCompiler(tokenizer, model_config.vocab_size, eos_token_ids)

    input_processor.grammars = grammars
    return engine


def check_format(quantization: str, checkpoint: Checkpoint) -> None:
    """Raise ValueError if the weights of the checkpoint do not have the format `quantization`."""
    found = checkpoint.weight_format and checkpoint.weight_format.method
    if found != quantization.removesuffix("_marlin").replace("modelopt", "fp8"):
        raise ValueError(
            f"quantization={quantization!r} is a format of checkpoints, and {checkpoint.directory} "
            f"has {found!r}; leave it out, or use 'int8' or 'int4'"
        )


def task_maker(
    engine: LLMEngine, has_head: bool, add_eos_token: bool
) -> Callable[[InputProcessor, Any], Task]:
    """Return the function that checks the parameters of a request, and makes its task.

    has_head: whether the model has a head, which every task but an embedding needs.
    add_eos_token: whether the token ids of a text to embed end with the EOS token.
    """
    scheduler, checkpoint = engine.scheduler, engine.checkpoint  # not the engine, for its memory

    @functools.cache
    def pooling() -> PoolingSettings:
        from nanovllm.features.tasks import embeddings

        directory = checkpoint.directory
        model_config = checkpoint.model_config
        factor = getattr(model_config, "hidden_factor", 1.0)
        settings = embeddings.read_pooling_settings(directory, model_config.hidden_size)
        embeddings.check_embeddings(directory, settings)
        return replace(settings, add_eos_token=add_eos_token, factor=factor)

    def make_task(inputs: InputProcessor, params: Any) -> Task:
        if isinstance(params, PoolingParams):
            from nanovllm.features.tasks.embeddings import Embedding

            return Embedding(inputs, params, pooling())
        if not has_head:
            raise ValueError(
                "the checkpoint has no head (lm_head.weight), and tie_word_embeddings in its "
                "config.json is false; generation and log-likelihoods need a head: use embed, or "
                "load a checkpoint with a head"
            )
        if isinstance(params, BeamSearchParams):
            from nanovllm.features.tasks.beam_search import BeamSearch

            return BeamSearch(inputs, params, scheduler)
        if isinstance(params, ScoringParams):
            from nanovllm.features.tasks.loglikelihood import Scoring

            return Scoring(params)
        if isinstance(params, SamplingParams):
            return Sampling(inputs, params)
        kinds = "a SamplingParams, BeamSearchParams, ScoringParams or PoolingParams"
        raise TypeError(f"sampling_params must be {kinds}, not {params!r}")

    return make_task


def longest_request(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Return the length of the longest request that the model and max_model_len allow."""
    model_config = checkpoint.model_config
    longest = model_config.max_position_embeddings
    max_model_len = config.max_model_len or model_config.usual_length or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the {longest} positions of the model; use "
            f"at most {longest}"
        )
    return max_model_len
