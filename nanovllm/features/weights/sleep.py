"""An engine that sleeps returns memory to other programs: `LLM.sleep` and `LLM.wake_up`.

    level   KV cache, states   weights
    1       freed              kept in host memory; a CPU's weights are there already
    2       freed              freed: all requests are refused until load_weights has loaded others

Requests are refused meanwhile (`LLMEngine.blocked`). The runner's `missing_parts` keep functions
that make the freed parts again, together or one after the other. The host memory of swap_space is
not freed: on a GPU it is pinned, which takes long.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.threads import hold_interrupt
from nanovllm.features.weights.new_weights import (
    MissingParts,
    accept_requests,
    return_freed_memory,
)
from nanovllm.models.fp8 import FP8
from nanovllm.utils.checks import check_scalar

TAGS = ("weights", "kv_cache")


def sleep(engine: LLMEngine, level: int) -> None:
    """See `LLM.sleep`."""
    check_scalar("level", level, int, (1, 2))
    with engine.idle(), torch.inference_mode():
        runner: Any = engine.runner
        missing = MissingParts.of(runner)
        if engine.blocked and missing.level != level:
            if not missing.asleep:
                raise RuntimeError(engine.blocked)
            raise RuntimeError(
                f"the engine sleeps at level {missing.level}; call wake_up before sleep({level})"
            )
        makers = missing.makers if engine.blocked else makers_of(engine, level)
        frees_weights = runner.model is not None and (level == 2 or runner.device.type != "cpu")
        if frees_weights and level == 1:
            missing.saved = [tensor.cpu() for tensor in runner.model.tensors()]
        with hold_interrupt():
            engine.scheduler.block_manager.reset_prefix_cache()
            missing.level = level
            missing.makers = makers
            missing.asleep = set(TAGS)
            engine.blocked = missing.reason()
            if frees_weights:
                if level == 2:
                    missing.weights = {x.name for x in runner.model.checkpoint_tensors()}
                runner.model = None
            runner.attention = runner.states = None
            runner.graphs = runner.fused_model = runner.fused_step = None
    gc.collect()  # captured steps and their closures refer to one another
    return_freed_memory()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


def makers_of(engine: LLMEngine, level: int) -> dict[str, Callable[[Any], None]]:
    """Return functions that make the parts of a runner again which sleep frees, by tag.

    They contain no part that is freed.
    """
    runner: Any = engine.runner
    model, attention, states = runner.model, runner.attention, runner.states
    sizes = attention.cache.shape[2], attention.block_size, attention.dtype, runner.device
    scales = attention.scales if attention.cache.dtype == FP8 else None
    new_attention = partial(attention.__class__, model.config, *sizes, scales)
    new_states = None
    if states is not None:
        new_states = partial(states.__class__, model.config, states.num_states, model.backend)
    new_model = partial(model.__class__, model.config, model.rotary.max_len, model.backend)
    vocab_size = engine.input_processor.vocab_size

    def make_cache(runner: Any) -> None:
        runner.attention = new_attention()
        runner.states = None if new_states is None else new_states()

    def make_model(runner: Any) -> None:
        if level == 1 and runner.device.type == "cpu":  # the weights are in host memory already
            return
        model = new_model()
        runner.ranks.connect(model, vocab_size)
        if level == 1:
            saved = runner.missing_parts.saved
            for tensor, values in zip(model.tensors(), saved, strict=True):
                tensor.copy_(values)
        runner.model = model

    return {"weights": make_model, "kv_cache": make_cache}


def wake_up(engine: LLMEngine, tags: Any = None) -> None:
    """See `LLM.wake_up`."""
    tags = TAGS if tags is None else tags
    if not isinstance(tags, list | tuple) or any(tag not in TAGS for tag in tags):
        raise ValueError(f"tags must be None or a list of {' and '.join(TAGS)}, not {tags!r}")
    with engine.idle(), torch.inference_mode():
        runner: Any = engine.runner
        missing = MissingParts.of(runner)
        if not engine.blocked:
            return
        with runner.backend.step_context():
            for tag in TAGS:  # in the same order on each rank
                if tag in tags and tag in missing.asleep:
                    missing.makers[tag](runner)
                    missing.asleep.remove(tag)
                    if tag == "weights":
                        missing.saved = []
            accept_requests(engine)
