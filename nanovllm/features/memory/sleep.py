"""An engine that sleeps returns memory to other programs: `LLM.sleep` and `LLM.wake_up`.

    level   KV cache, states   weights
    1       freed              kept in host memory; a CPU's weights are there already
    2       freed              freed: all requests are refused until load_weights has loaded others

A Refusal takes the place of the runner meanwhile. It keeps functions that make the freed parts
again. The host memory of swap_space is not freed: on a GPU it is pinned, which takes long.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.memory.new_weights import INCOMPLETE, Refusal, return_freed_memory, runner_of
from nanovllm.models.backend import Backend
from nanovllm.models.fp8 import FP8
from nanovllm.utils.checks import check_scalar

ASLEEP = "the engine sleeps; call wake_up first"


def sleep(engine: LLMEngine, level: int) -> None:
    """See `LLM.sleep`."""
    check_scalar("level", level, int, (1, 2))
    with engine.idle(), torch.inference_mode():
        runner, _, refusal = runner_of(engine)
        if refusal is not None:
            refusal.refuse()
        engine.scheduler.block_manager.reset_prefix_cache()
        refusal = Refusal(engine, ASLEEP)
        refusal.makers = makers_of(runner, level)
        if level == 1 and "model" in refusal.makers:
            refusal.saved = [tensor.cpu() for tensor in tensors_of(runner.model)]
        for name in (*refusal.makers, "graphs", "fused_model", "fused_step"):
            setattr(runner, name, None)
    gc.collect()  # captured steps and their closures refer to one another
    return_freed_memory()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


def makers_of(runner: Any, level: int) -> dict[str, Callable[[], Any]]:
    """Return what makes the parts of the runner again that sleep frees, by the parts' names."""
    model, attention, states = runner.model, runner.attention, runner.states
    sizes = attention.cache.shape[2], attention.block_size, attention.dtype, runner.device
    scales = attention.scales if attention.cache.dtype == FP8 else None
    makers: dict[str, Callable[[], Any]] = {
        "attention": partial(attention.__class__, model.config, *sizes, scales)
    }
    if states is not None:
        makers["states"] = partial(states.__class__, model.config, states.num_states, model.backend)
    if level == 2 or runner.device.type != "cpu":
        longest = len(model.rotary.cos)
        makers["model"] = partial(model.__class__, model.config, longest, model.backend)
    return makers


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model, its layers and their weights, in the same order each time."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from tensors_of(each)
    elif type(part).__module__.startswith("nanovllm.") and not isinstance(part, Backend):
        for name in (*getattr(part, "__slots__", ()), *getattr(part, "__dict__", ())):
            yield from tensors_of(getattr(part, name))


def wake_up(engine: LLMEngine, tags: Any = None) -> None:
    """See `LLM.wake_up`."""
    if tags not in (None, ["weights", "kv_cache"], ["kv_cache", "weights"]):
        raise ValueError(f"tags={tags!r}: weights and KV cache wake up together; leave tags out")
    with engine.idle(), torch.inference_mode():
        runner, ranks, refusal = runner_of(engine)
        if refusal is None or not refusal.makers:
            return
        with runner.backend.step_context():
            parts = {name: make() for name, make in refusal.makers.items()}
            model = parts.get("model", runner.model)
            if "model" in parts and ranks is not None:
                ranks.connect(model, engine.input_processor.vocab_size)
            if refusal.saved:
                for tensor, saved in zip(tensors_of(model), refusal.saved, strict=True):
                    tensor.copy_(saved)
            for name, part in parts.items():
                setattr(runner, name, part)
            if "model" in parts and not refusal.saved:
                refusal.why, refusal.makers = INCOMPLETE, {}
                return
            runner.make_fast_steps(runner)
        refusal.lift()
