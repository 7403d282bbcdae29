"""Five launches a layer for few rows, in Triton's interpreter: results, waits, what is served."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1"
    or tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7),
    reason="needs Triton's interpreter with loops up to the value of a tensor (3.7 or later)",
)

from triton.runtime.interpreter import interpreter_builder  # noqa: E402

from nanovllm.backends.gpu.attention import TritonAttention  # noqa: E402
from nanovllm.backends.gpu.backend import make_backend  # noqa: E402
from nanovllm.backends.gpu.few_rows import FusedLayers, fuse_layers  # noqa: E402
from nanovllm.backends.gpu.kernels import few_rows  # noqa: E402
from nanovllm.backends.gpu.kernels.few_rows import Target  # noqa: E402
from nanovllm.backends.int8 import Int8Weight  # noqa: E402
from nanovllm.models.attention import PlainAttention  # noqa: E402
from nanovllm.models.backend import Backend  # noqa: E402
from nanovllm.models.batch import ForwardBatch  # noqa: E402
from nanovllm.models.layers import rms_norm, silu_and_mul  # noqa: E402
from nanovllm.models.model_config import ModelConfig  # noqa: E402
from nanovllm.models.qwen3 import Qwen3  # noqa: E402

CPU = torch.device("cpu")
NAN = float("nan")
CONFIG = replace(
    attention_cases.config(4, 2, 16),
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    qk_norm=True,
)
IN_ORDER, PROGRAMMATIC = Target(asm=False, pdl=False), Target(asm=False, pdl=True)


class Waits:
    """Counts the waits of each launch, and hides activations from a program until it waits."""

    def __init__(self, patch: pytest.MonkeyPatch, readable: Callable[[Tensor], bool]) -> None:
        """`readable`: whether a tensor may be read before the wait."""
        self.counts: list[tuple[int, int]] = []  # programs and waits of each launch
        self.programs = self.waits = 0
        self.hidden: list[Tensor] = []  # activations
        self.contents: list[Tensor] = []  # while they are hidden
        launch, start = few_rows.launch, interpreter_builder.set_grid_idx

        def watched(kernel: Any, grid: Any, args: Any, constants: Any, **options: int) -> None:
            assert options.pop("launch_pdl")
            self.hidden = [x for x in args if isinstance(x, Tensor) and not readable(x)]
            self.programs = self.waits = 0
            launch(kernel, grid, args, constants, **options)
            self.counts.append((self.programs, self.waits))

        def start_program(x: int, y: int, z: int) -> None:
            start(x, y, z)
            self.programs += 1
            self.contents = [x.clone() for x in self.hidden]
            for x in self.hidden:
                x.fill_(NAN)

        def wait() -> None:
            self.waits += 1
            for x, content in zip(self.hidden, self.contents, strict=True):
                x.copy_(content)

        patch.setattr(few_rows, "launch", watched)
        patch.setattr(few_rows, "gdc_wait", wait)
        patch.setattr(few_rows, "gdc_launch_dependents", lambda: None)
        patch.setattr(interpreter_builder, "set_grid_idx", start_program)


def weights_of(layer: Any) -> list[Tensor]:
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *(layer.self_attn.norms or ())]
    return norms + [module.weight for module in layer.linears()]


def make_model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float16) -> Qwen3:
    torch.manual_seed(0)
    model = Qwen3(config, 256, Backend(CPU, dtype))
    model.embed_tokens.normal_()
    for weight in [model.norm, *(x for layer in model.layers for x in weights_of(layer))]:
        if weight.dim() == 1:
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(0, weight.shape[1] ** -0.5)
    return model


def make_batch(contexts: list[int]) -> ForwardBatch:
    """A decode step whose blocks are in random order."""
    rows, positions = len(contexts), torch.tensor(contexts) - 1
    tables = (torch.randperm(rows * 16) + 1).int().view(rows, 16)
    slots = tables[torch.arange(rows), positions // 16].long() * 16 + positions % 16
    ids, starts = torch.randint(64, (rows,)), torch.arange(rows + 1, dtype=torch.int32)
    lens = np.ones(rows, np.int64)
    return ForwardBatch(
        ids, positions, slots, starts, positions + 1, tables, ids, lens, num_decodes=rows
    )


def fill(attention: PlainAttention, batch: ForwardBatch) -> None:
    """Keys and values of all positions before the step's, and NaN elsewhere."""
    attention.cache.fill_(NAN)
    for context, table in zip(batch.context_lens.tolist(), batch.block_tables, strict=True):
        for position in range(context - 1):
            slot = attention.cache[:, :, table[position // 16], :, position % 16]
            slot.copy_(torch.randn(slot.shape))


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [[150], [17, 64, 1, 129]], ids=len)
def test_a_step_equals_the_plain_model(
    contexts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program waits, and reads activations after that only."""
    monkeypatch.setattr(few_rows, "MAX_SPLITS", 3)
    model, batch = make_model(), make_batch(contexts)
    sizes = CONFIG, len(contexts) * 16 + 1, 16, torch.float16, CPU
    plain, paged = PlainAttention(*sizes), TritonAttention(*sizes)
    fill(plain, batch)
    paged.cache.copy_(plain.cache)
    plain.prepare(batch)
    wanted = model.forward(batch, plain)
    readable = {x.data_ptr() for layer in model.layers for x in weights_of(layer)}
    rope = torch.Size((len(contexts), 1, 16))
    waits = Waits(
        monkeypatch,
        lambda x: x.data_ptr() in readable or x.shape == rope or not x.is_floating_point(),
    )
    found = FusedLayers(model, PROGRAMMATIC).forward(batch, paged)
    torch.testing.assert_close(found, wanted, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(paged.cache, plain.cache, atol=4e-3, rtol=4e-3, equal_nan=True)
    assert len(waits.counts) == 5
    assert all(programs == number > 0 for programs, number in waits.counts)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["norm", "silu", "add"])
def test_linear(int8: bool, kind: str) -> None:
    """The number of inputs is no multiple of a tile."""
    torch.manual_seed(0)
    x, norm = torch.randn(2, 528).half(), torch.rand(528).half() + 0.5
    plain = (torch.randn(64, 528) / 528**0.5).half()
    weight: Any = plain
    if int8:
        weight = Int8Weight.empty(partial(torch.empty, dtype=torch.half), 64, 528)
        weight.copy_(plain)
        plain = weight.dequantized()
    out = torch.randn(2, 32 if kind == "silu" else 64).half()
    normed = x if kind == "add" else rms_norm(x, norm, 1e-6)
    wanted = normed @ plain.T
    if kind == "silu":
        wanted = silu_and_mul(wanted)
    if kind == "add":
        wanted += out
    given = None if kind == "add" else norm
    few_rows.linear(x, weight, out, IN_ORDER, given, 1e-6, silu=kind == "silu", add=kind == "add")
    torch.testing.assert_close(out, wanted, atol=4e-3, rtol=4e-3)


def test_a_read_before_the_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait, a launch reads what is hidden."""
    x, weight = torch.ones(1, 64).half(), torch.ones(32, 64).half()
    Waits(monkeypatch, lambda tensor: tensor is weight)
    monkeypatch.setattr(few_rows, "gdc_wait", lambda: None)
    out = few_rows.linear(x, weight, torch.zeros(1, 32).half(), PROGRAMMATIC)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("change", "dtype"),
    [
        ({}, torch.float32),
        ({"qk_norm": False}, torch.float16),
        ({"attention_bias": True}, torch.float16),
        ({"head_dim": 48}, torch.float16),
        ({"intermediate_size": 40}, torch.float16),
        ({"intermediate_size": 4112}, torch.float16),
    ],
    ids=str,
)
def test_other_models_are_not_fused(change: dict[str, Any], dtype: torch.dtype) -> None:
    config = replace(CONFIG, **change)
    attention = TritonAttention(config, 2, 16, dtype, CPU)
    assert fuse_layers(make_model(config, dtype), attention) is None


def test_other_steps_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    attention = TritonAttention(CONFIG, 33, 16, torch.float16, CPU)
    fused = make_backend(CPU, torch.float16).fuse_layers(model, attention)
    assert fused is not None
    layers: list[Any] = []
    monkeypatch.setattr(FusedLayers, "decode_layer", lambda self, x, *args: layers.append(args[1]))
    monkeypatch.setattr(model, "forward", lambda batch, attention: "the model's", raising=False)
    assert isinstance(fused.forward(make_batch([5, 6]), attention), Tensor)
    assert layers == model.layers
    for rows, num_decodes in ((3, 3), (5, 5), (2, 1)):
        step = make_batch([1] * rows)
        step.num_decodes = num_decodes
        assert fused.forward(step, attention) == "the model's"
