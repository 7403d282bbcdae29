"""An engine that sleeps returns memory to other programs: `LLM.sleep` and `LLM.wake_up`.

    level   KV cache, states   weights
    1       freed              kept in host memory; a CPU's weights are there already
    2       freed              freed: all requests are refused until load_weights has loaded others

A Refusal takes the place of the runner meanwhile. It keeps functions that make the freed parts
again, together or one after the other. The host memory of swap_space is not freed: on a GPU it is
pinned, which takes long.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.threads import hold_interrupt
from nanovllm.features.weights.new_weights import Refusal, return_freed_memory, runner_of
from nanovllm.models.backend import Backend
from nanovllm.models.fp8 import FP8
from nanovllm.utils.checks import check_scalar

TAGS = ("weights", "kv_cache")


def sleep(engine: LLMEngine, level: int) -> None:
    """See `LLM.sleep`."""
    check_scalar("level", level, int, (1, 2))
    with engine.idle(), torch.inference_mode():
        runner, _, refusal = runner_of(engine)
        if refusal is not None and refusal.level != level:
            if not refusal.asleep:
                refusal.refuse()
            raise RuntimeError(
                f"the engine sleeps at level {refusal.level}; call wake_up before sleep({level})"
            )
        makers = makers_of(runner, level) if refusal is None else refusal.makers
        saved = [] if refusal is None else refusal.saved
        if level == 1 and makers["weights"] and runner.model is not None:
            saved = [tensor.cpu() for tensor in tensors_of(runner.model)]
        with hold_interrupt():
            engine.scheduler.block_manager.reset_prefix_cache()
            refusal = refusal or Refusal(engine)
            refusal.level, refusal.makers, refusal.saved = level, makers, saved
            refusal.asleep = set(makers)
            if level == 2:
                refusal.is_incomplete, refusal.stored = True, set()
            parts = (name for each in makers.values() for name in each)
            for name in (*parts, "graphs", "fused_model", "fused_step"):
                setattr(runner, name, None)
    gc.collect()  # captured steps and their closures refer to one another
    return_freed_memory()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


def makers_of(runner: Any, level: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what makes the parts of the runner again that sleep frees, by tag and name."""
    model, attention, states = runner.model, runner.attention, runner.states
    sizes = attention.cache.shape[2], attention.block_size, attention.dtype, runner.device
    scales = attention.scales if attention.cache.dtype == FP8 else None
    makers: dict[str, dict[str, Callable[[], Any]]] = {
        "weights": {},
        "kv_cache": {"attention": partial(attention.__class__, model.config, *sizes, scales)},
    }
    if states is not None:
        of_states = model.config, states.num_states, model.backend
        makers["kv_cache"]["states"] = partial(states.__class__, *of_states)
    if level == 2 or runner.device.type != "cpu":
        longest = len(model.rotary.cos)
        makers["weights"]["model"] = partial(model.__class__, model.config, longest, model.backend)
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
    tags = TAGS if tags is None else tags
    if not isinstance(tags, list | tuple) or any(tag not in TAGS for tag in tags):
        raise ValueError(f"tags must be None or a list of {' and '.join(TAGS)}, not {tags!r}")
    with engine.idle(), torch.inference_mode():
        runner, ranks, refusal = runner_of(engine)
        if refusal is None:
            return
        with runner.backend.step_context():
            for tag in TAGS:  # in the same order on each rank
                if tag in tags and tag in refusal.asleep:
                    wake(runner, ranks, refusal, tag, engine.input_processor.vocab_size)
            refusal.end(runner)


def wake(runner: Any, ranks: Any, refusal: Refusal, tag: str, vocab_size: int) -> None:
    """Make the parts of the runner with a tag."""
    parts = {name: make() for name, make in refusal.makers[tag].items()}
    if "model" in parts:
        if ranks is not None:
            ranks.connect(parts["model"], vocab_size)
        if refusal.level == 1:
            for tensor, saved in zip(tensors_of(parts["model"]), refusal.saved, strict=True):
                tensor.copy_(saved)
    for name, part in parts.items():
        setattr(runner, name, part)
    refusal.asleep.remove(tag)
    if tag == "weights":
        refusal.saved = []
