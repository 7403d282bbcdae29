"""Random layers of linear attention, and comparisons of kernels with the plain delta rule."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.models.hybrid import delta_rule
from nanovllm.features.models.hybrid.delta_rule import Segments

NUM_STATES = 6
# (tokens, whether the sequence begins) of each segment.
Lengths = Sequence[tuple[int, bool]]


def make_layer(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> SimpleNamespace:
    """Return what the functions read of a LinearAttention. `sizes` are (Hk, Hv, Dk, Dv)."""
    key_heads, value_heads, key_dim, value_dim = sizes
    channels, size = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    projections = {"qkv": channels, "z": size, "b": value_heads, "a": value_heads}
    return SimpleNamespace(
        sizes=sizes,
        eps=1e-6,
        in_proj=SimpleNamespace(projections=projections),
        conv1d=(torch.randn(4, channels) * 0.7).to(device),
        dtype=dtype,
        a_log=torch.randn(value_heads).to(device),
        dt_bias=(torch.randn(value_heads) * 0.5).to(device),
        norm=(1 + 0.3 * torch.randn(value_dim)).to(device),
    )


def make_states(layer: Any) -> tuple[Tensor, Tensor]:
    _, *rest = layer.sizes
    conv = torch.randn(NUM_STATES, 3, layer.conv1d.shape[1]).to(layer.conv1d.device, layer.dtype)
    rule = torch.randn(NUM_STATES, *rest) / layer.sizes[2] ** 0.5
    return conv, rule.to(layer.norm.device)


def make_inputs(layer: Any, num: int) -> Tensor:
    """Return projections of `num` tokens."""
    width = sum(layer.in_proj.projections.values())
    return torch.randn(num, width).to(layer.conv1d.device, layer.dtype)


def repeat_keys(layer: Any, x: Tensor) -> None:
    """Give all tokens the same key, beta close to 1 and hardly any decay."""
    key_heads, value_heads, key_dim, _ = layer.sizes
    size = key_heads * key_dim
    x[:, size : 2 * size] = x[:1, size : 2 * size]
    x[:, -2 * value_heads : -value_heads] = 8
    x[:, -value_heads:] = -8


def check_decode(
    kernels: Any, layer: Any, rows: list[int], compare: Callable[[Tensor, Tensor], None]
) -> None:
    x, states = make_inputs(layer, len(rows)), make_states(layer)
    wanted = [state.clone() for state in states]
    index = torch.tensor(rows, device=x.device)
    compare(kernels.decode(layer, x, *states, index), delta_rule.decode(layer, x, *wanted, index))
    check_states(states, wanted, rows, compare)


def check_chunk(
    kernels: Any,
    layer: Any,
    lengths: Lengths,
    compare: Callable[[Tensor, Tensor], None],
    same_key: bool = False,
) -> None:
    """Compare segments that are not next to each other, in rows that are not in order.

    States of rows that begin are NaN before. No other state and no other output may change. The
    reference needs a token, so that it is not called for segments without tokens.
    """
    places, end = [], 0
    for number, (length, is_first) in enumerate(lengths):
        places.append(((5 * number + 3) % NUM_STATES, end + 2, end + 2 + length, is_first))
        end += 2 + length
    x, states = make_inputs(layer, end + 3), make_states(layer)
    for state in states:
        state[[row for row, _, _, is_first in places if is_first]] = float("nan")
    if same_key:
        repeat_keys(layer, x)
    out = torch.full((len(x), layer.sizes[1] * layer.sizes[3]), 7.0).to(x)
    wanted = [tensor.clone() for tensor in (*states, out)]
    segments = segments_of(places)
    for _ in range(2):  # the second one with the tables of the first, as in the next layer
        kernels.chunk(layer, x, *states, segments, out)
        for state in wanted[:2]:
            state[[row for row, start, end, is_first in places if is_first and start == end]] = 0
        with_tokens = segments_of([place for place in places if place[1] < place[2]])
        delta_rule.chunk(layer, x, *wanted[:2], with_tokens, wanted[2])
        compare(out, wanted[2])
        assert torch.equal(out == 7, wanted[2] == 7)
        check_states(states, wanted[:2], [place[0] for place in places], compare)


def check_states(
    states: Sequence[Tensor],
    wanted: Sequence[Tensor],
    rows: list[int],
    compare: Callable[[Tensor, Tensor], None],
) -> None:
    """The inputs of the convolution are copies. States of other rows than `rows` are unchanged."""
    assert torch.equal(states[0], wanted[0])
    compare(states[1], wanted[1])
    others = [row for row in range(NUM_STATES) if row not in rows]
    assert torch.equal(states[1][others], wanted[1][others])


def segments_of(places: list[tuple[int, int, int, bool]]) -> Segments:
    rows, starts, ends, is_first = ([place[i] for place in places] for i in range(4))
    return Segments(rows, starts, ends, is_first)
