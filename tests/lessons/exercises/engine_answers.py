"""The right tokens and logits of the embedded model, which the milestones of `Engine` are to have.

They do not depend on the solution: a process that checks several computes them once.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from lessons.lesson import make_llm
from lessons.lesson02_model import Model, attention
from nanovllm.config import EMBEDDED
from nanovllm.loading.checkpoint import find_checkpoint

LONG = 12  # the most output tokens
disable_progress_bar()


@cache
def tokenizer_and_ends() -> tuple[Any, set[int]]:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    return llm.get_tokenizer(), set(llm.engine.input_processor.eos_token_ids)


@cache
def transformers_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(find_checkpoint(EMBEDDED), dtype=torch.float32)


@cache
@torch.inference_mode()
def by_transformers(text: str, number: int = LONG) -> list[int]:
    tokenizer, ends = tokenizer_and_ends()
    ids: list[int] = tokenizer.encode(text)
    output: list[int] = []
    while len(output) < number and not (output and output[-1] in ends):
        logits = transformers_model()(torch.tensor([ids + output])).logits
        output.append(int(logits[0, -1].argmax()))
    return output


@cache
def reference(ids: tuple[int, ...]) -> Tensor:
    """The logits [T, V] after each of T tokens, by the model of lesson 2."""
    return Model.logits(Model(), ids, range(len(ids)), attention)
