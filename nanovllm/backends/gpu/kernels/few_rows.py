"""A layer of Qwen3 for 1, 2 or 4 rows, in five launches that follow each other without a gap.

    launch        before the wait             after the wait
    linear        norm and W of q, k, v       x -> RMSNorm -> q, k, v
    attend        length, slot, cos, sin      q, k, v -> norm, rotary, store, one split of attention
    linear        W of o                      splits -> merged -> o + residual -> x
    linear        norm and W of gate, up      x -> RMSNorm -> gate, up -> silu(gate) * up
    linear        W of down                   silu(gate) * up -> down + residual -> x

For so few rows a step takes as long as reading the weights, if the next weights are read while a
launch still computes. Programmatic launches (CUDA C++ Programming Guide, from compute capability
9.0) allow this: a program may start before the launch before it has ended. It loads its weights
into registers, then waits for that end, and only then reads activations. These rules hold:

- Every program waits, even one without work: a launch could otherwise end before the one before it.
- A program lets the next launch start directly after its wait. What is read before a wait was
  therefore written two launches before or earlier.
- Each sum is computed by one program in a fixed order, so results do not depend on timing.

Without programmatic launches (PDL=False), the same kernels run one after another. Numbers are
rounded where the kernels of the other modules round them.
"""

# The tuples of tiles in the kernels grow in unrolled loops.
# mypy: disable-error-code="assignment, attr-defined, var-annotated"

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import KernelInterface

from nanovllm.backends.gpu.kernels.attention import LOG2E, _attend_range, _split_context
from nanovllm.backends.gpu.kernels.configs import Tile
from nanovllm.backends.gpu.kernels.launch import launch
from nanovllm.backends.gpu.kernels.store import _to_cache

# Weights that the registers of one program hold: 64 of the 255 registers of 256 threads in half
# precision. With twice as many in int8, products of 4 rows would spill.
HELD = 32 << 10
NUM_WARPS = 8
# Outputs of a tile of W, one for each warp.
OUTPUTS = tl.constexpr(8)
# Splits of a context, and programs of an attention with splits: 64 programs with 64 KiB in flight
# are enough to read at 3 TB/s.
MAX_SPLITS, MAX_PROGRAMS = 8, 64
# Four numbers of int8 to float16: 0x6400 + n is the float16 number 1024 + n, for n in [0, 256).
INT8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 biased, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 $0, biased, 0x64646464, 0x4140;
    prmt.b32 $1, biased, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
}""")


@triton.jit
def _wide(w, ASM: tl.constexpr):
    """w in float32. The compiler converts int8 by an instruction of low throughput."""
    if ASM & (w.dtype == tl.int8):
        w = tl.inline_asm_elementwise(
            INT8_TO_FLOAT16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4
        )
    return w.to(tl.float32)


@triton.jit
def _merged(split_out, split_lse, head, context_len, SPLITS: tl.constexpr, D: tl.constexpr,
            TILE: tl.constexpr):
    """Merge the splits of attention of heads [N] -> [N * D] float32."""
    _, num_splits = _split_context(context_len, SPLITS, TILE)
    index = head[:, None] * SPLITS
    dim = tl.arange(0, D)[None, :]
    lse = ()
    most = tl.full(index.shape, float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        mask = index * 0 + split < num_splits
        lse += (tl.load(split_lse + index + split, mask=mask, other=float("-inf")),)
        most = tl.maximum(most, lse[split])
    total = tl.zeros(index.shape, tl.float32)
    result = tl.zeros([index.shape[0], D], tl.float32)
    for split in tl.static_range(SPLITS):
        weight = tl.exp2(lse[split] - most)
        mask = (index * 0 + split < num_splits) & (dim < D)
        value = tl.load(split_out + (index + split) * D + dim, mask=mask, other=0.0)
        total += weight
        result += weight * value
    return tl.reshape(result / total, [index.shape[0] * D])


@triton.jit(do_not_specialize_on_alignment=["context_lens"])
def _few_rows_linear(
    x, split_lse, context_lens, norm, weight, scale, out, eps,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr,
    ADD: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):
    """One program computes GROUPS x OUTPUTS of the products of x [ROWS, K] with W [N, K].

    NORM: RMSNorm of x comes first. SILU: W is (gate, up), and half of the groups are of each. ADD:
    `out` is the residual, which changes in place. SPLITS: x is the result of attention in so many
    splits, or 0.

    Each warp has one output of a group and reads x itself, so that it waits for no other warp.
    """
    dtype = out.dtype.element_ty
    INT8: tl.constexpr = weight.dtype.element_ty == tl.int8
    COLUMNS: tl.constexpr = N // 2 if SILU else N  # of `out`
    SUMS: tl.constexpr = GROUPS // 2 if SILU else GROUPS  # groups that are stored
    column = tl.program_id(0) * (SUMS * OUTPUTS) + tl.arange(0, OUTPUTS)
    i = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], [OUTPUTS, WIDTH])
    held, norms, scales, lens = (), (), (), ()
    for start in tl.static_range(0, K, WIDTH):
        for group in tl.static_range(GROUPS):
            output = column + group % SUMS * OUTPUTS + group // SUMS * COLUMNS
            w_ptrs = weight + output[:, None] * K + start + i
            held += (tl.load(w_ptrs, mask=i < K - start, other=0),)
    for start in tl.static_range(0, K if NORM else 0, WIDTH):
        norms += (tl.load(norm + start + i, mask=i < K - start, other=0.0),)
    for group in tl.static_range(GROUPS if INT8 else 0):
        scales += (tl.load(scale + column + group % SUMS * OUTPUTS + group // SUMS * COLUMNS),)
    for row in tl.static_range(ROWS if SPLITS else 0):
        lens += (tl.load(context_lens + row).to(tl.int32),)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    inverse_rms, sums = (), ()
    for row in tl.static_range(ROWS if NORM else 0):
        squares = tl.zeros([OUTPUTS, WIDTH], tl.float32)
        for start in tl.static_range(0, K, WIDTH):
            value = tl.load(x + row * K + start + i, mask=i < K - start, other=0.0).to(tl.float32)
            squares += value * value
        inverse_rms += (tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None],)
    for _ in tl.static_range(ROWS * GROUPS):
        sums += (tl.zeros([OUTPUTS, WIDTH], tl.float32),)
    for start in tl.static_range(0, K, WIDTH):
        tiles, added = (), ()
        for group in tl.static_range(GROUPS):
            tiles += (_wide(held[start // WIDTH * GROUPS + group], ASM),)
        for row in tl.static_range(ROWS):
            if SPLITS:
                head = tl.minimum(start // D + tl.arange(0, WIDTH // D), K // D - 1)
                merged = _merged(x, split_lse, row * (K // D) + head, lens[row], SPLITS, D, TILE)
                value = merged.to(dtype)[None, :]
            else:
                value = tl.load(x + row * K + start + i, mask=i < K - start, other=0.0)
            value = value.to(tl.float32)
            if NORM:
                scaled = (value * inverse_rms[row]).to(norm.dtype.element_ty).to(tl.float32)
                value = (scaled * norms[start // WIDTH].to(tl.float32)).to(dtype).to(tl.float32)
            for group in tl.static_range(GROUPS):
                added += (sums[row * GROUPS + group] + tiles[group] * value,)
        sums = added
    for row in tl.static_range(ROWS):
        for group in tl.static_range(SUMS):
            y = tl.sum(sums[row * GROUPS + group], 1)
            if INT8:
                y *= scales[group]
            y = y.to(dtype)
            out_ptrs = out + row * COLUMNS + column + group * OUTPUTS
            if SILU:
                up = tl.sum(sums[row * GROUPS + SUMS + group], 1)
                if INT8:
                    up *= scales[SUMS + group]
                gate = y.to(tl.float32)
                activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
                y = (activated * up.to(dtype).to(tl.float32)).to(dtype)
            if ADD:
                y = (tl.load(out_ptrs).to(tl.float32) + y.to(tl.float32)).to(dtype)
            tl.store(out_ptrs, y)


@triton.jit
def _rope_and_norm(cos, sin, weight, row, N: tl.constexpr, D: tl.constexpr):
    """(dimensions, their partners in the rotation, cos, sin, norm weights of both), each [N, D]."""
    dim = tl.broadcast_to(tl.arange(0, D)[None, :], [N, D])
    partner = tl.max_contiguous((dim + D // 2) % D, [1, D // 2])
    c, s = tl.load(cos + row * D + dim), tl.load(sin + row * D + dim)  # sin is signed
    return dim, partner, c, s, tl.load(weight + dim), tl.load(weight + partner)


@triton.jit
def _norm_rope(heads, rope_and_norm, eps, D: tl.constexpr):
    """RMSNorm and rotary embedding of `heads`, pointers [N, 1] -> [N, D]."""
    dim, partner, c, s, w, w_partner = rope_and_norm
    dtype = heads.dtype.element_ty
    x, y = tl.load(heads + dim).to(tl.float32), tl.load(heads + partner).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = ((x * inverse_rms).to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(dtype)
    y = ((y * inverse_rms).to(w.dtype).to(tl.float32) * w_partner.to(tl.float32)).to(dtype)
    return (x.to(tl.float32) * c.to(tl.float32) + y.to(tl.float32) * s.to(tl.float32)).to(dtype)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slot_mapping", "context_lens", "block_tables"],
)
def _few_rows_attend(
    qkv, q_norm, k_norm, cos, sin, slot_mapping, context_lens, block_tables, k_cache, v_cache,
    split_out, split_lse, table_stride, eps, scale, k_scale, v_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    """One program computes one split of a row's context for the G heads of one group.

    The program of the last split, which has the position of this step, stores k and v before.
    """
    G: tl.constexpr = H // K
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    of_q = _rope_and_norm(cos, sin, q_norm, row, M, D)
    of_k = _rope_and_norm(cos, sin, k_norm, row, 1, D)
    context_len = tl.load(context_lens + row).to(tl.int32)
    slot = tl.load(slot_mapping + row)
    split_size, num_splits = _split_context(context_len, SPLITS, TILE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if split < num_splits:
        heads = qkv + row * ((H + 2 * K) * D)
        if split == num_splits - 1:
            k_head = heads + (H + kv_head) * D + tl.zeros([1, 1], tl.int32)
            k = _norm_rope(k_head, of_k, eps, D)
            dim = tl.arange(0, D)[None, :]
            v = tl.load(k_head + K * D + dim)
            offset = ((slot // BLOCK * K + kv_head) * BLOCK + slot % BLOCK) * D + dim
            cache_dtype: tl.constexpr = k_cache.dtype.element_ty
            tl.store(k_cache + offset, _to_cache(k, k_scale, cache_dtype))
            tl.store(v_cache + offset, _to_cache(v, v_scale, cache_dtype))
            tl.debug_barrier()  # other threads of the program load them
        m = tl.arange(0, M)
        head = kv_head * G + tl.minimum(m, G - 1)
        q = _norm_rope(heads + head[:, None] * D, of_q, eps, D)
        start = split * split_size
        end = tl.minimum(start + split_size, context_len)
        query_position = tl.zeros([M], tl.int32) + context_len - 1
        result, lse = _attend_range(
            q, k_cache, v_cache, block_tables + row * table_stride, kv_head, start, start, end,
            query_position, scale, v_scale, K, BLOCK, D, TILE, 1,
        )
        index = (row * H + head) * SPLITS + split
        dim = tl.arange(0, D)[None, :]
        tl.store(split_out + index[:, None] * D + dim, result, mask=(m < G)[:, None])
        tl.store(split_lse + index, lse, mask=m < G)


class Target(NamedTuple):
    """What a GPU allows: NVIDIA's inline assembly, and programmatic launches."""

    asm: bool
    pdl: bool

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        if device.type != "cuda" or torch.version.hip:
            return cls(False, False)
        return cls(True, torch.cuda.get_device_capability(device) >= (9, 0))

    def launch(
        self, kernel: KernelInterface[Any], grid: tuple[int, int, int], args: tuple[Any, ...],
        constants: dict[str, int], num_warps: int, num_stages: int,
    ) -> None:
        """Launch `kernel`, whose last constexpr parameter is PDL."""
        options = dict(launch_pdl=True) if self.pdl else {}
        constants |= dict(PDL=self.pdl)
        launch(kernel, grid, args, constants, num_warps=num_warps, num_stages=num_stages, **options)


class Splits(NamedTuple):
    """The result of `attend`, not merged."""

    out: Tensor  # [T, H, splits, D] float32
    lse: Tensor  # [T, H, splits] float32: log2 of the sum of 2^score
    context_lens: Tensor  # [T] int64
    tile_keys: int


def attend(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor,
    slot_mapping: Tensor, context_lens: Tensor, block_tables: Tensor, k_cache: Tensor,
    v_cache: Tensor, tile: Tile, target: Target, k_scale: float = 1.0, v_scale: float = 1.0,
) -> Splits:
    """Compute `norm_rope_store` of store.py, and then `attend_decode` of attention.py.

    The shapes are the same: qkv [T, (H + 2K) D] of T sequences with one query each. D is a power
    of 2. There are fewer splits, because each program of the next launch reads all of them.
    """
    T, width = qkv.shape
    _, K, BLOCK, D = k_cache.shape
    H = width // D - 2 * K
    splits = max(1, min(MAX_SPLITS, MAX_PROGRAMS // (T * K)))
    out = torch.empty((T, H, splits, D), dtype=torch.float32, device=qkv.device)
    lse = torch.empty((T, H, splits), dtype=torch.float32, device=qkv.device)
    args = (
        qkv, q_norm, k_norm, cos, sin, slot_mapping, context_lens, block_tables, k_cache, v_cache,
        out, lse, block_tables.stride(0), eps, LOG2E / D**0.5 * k_scale, k_scale, v_scale,
    )
    constants = dict(
        H=H, K=K, D=D, BLOCK=BLOCK, M=tile.num_rows, TILE=tile.num_keys, SPLITS=splits
    )
    target.launch(
        _few_rows_attend, (K, splits, T), args, constants, tile.num_warps, tile.num_stages
    )
    return Splits(out, lse, context_lens, tile.num_keys)


def linear(
    x: Tensor | Splits, weight: Any, out: Tensor, target: Target, norm: Tensor | None = None,
    eps: float = 0.0, silu: bool = False, add: bool = False,
) -> Tensor:
    """Multiply x [T, I] by a weight [O, I], a tensor or an Int8Weight. Returns `out` [T, O].

    With `norm` [I], x is normalized first. With `silu`, the weight is (gate, up) and `out`
    [T, O / 2] is silu(gate) * up. With `add`, the product is added to `out`. Of Splits, x is the
    merged result. I is a multiple of 16, O of 32, and `fits` is true.
    """
    outputs, inputs = weight.shape
    values, scale = (weight, out) if isinstance(weight, Tensor) else (weight.values, weight.scale)
    splits, head_dim, tile_keys = 0, 0, 0
    args: tuple[Any, ...] = (x, out, out)
    if isinstance(x, Splits):
        args, tile_keys = x[:3], x.tile_keys
        splits, head_dim = x.out.shape[2:]
    groups = num_groups(len(out), norm is not None, silu)
    width = tile_width(inputs, values.element_size(), merges=splits > 0)
    constants = dict(
        K=inputs, N=outputs, ROWS=len(out), GROUPS=groups, WIDTH=width,
        NORM=norm is not None, SILU=silu, ADD=add,
        SPLITS=splits, D=head_dim, TILE=tile_keys, ASM=target.asm,
    )
    args += (out if norm is None else norm, values, scale, out, eps)
    grid = (outputs // (groups * OUTPUTS.value), 1, 1)
    target.launch(_few_rows_linear, grid, args, constants, NUM_WARPS, num_stages=1)
    return out


def num_groups(rows: int, has_norm: bool, silu: bool) -> int:
    """Return how many outputs a warp computes: more share the norm, and take more registers.

    For one row, all programs of a launch of Qwen3-0.6B fit an H100 at a time.
    """
    if silu:
        return 4 if rows == 1 else 2
    return 2 if has_norm else 1


def fits(weight: Any, has_norm: bool = False, silu: bool = False) -> bool:
    """Return whether the registers of a program hold its part of a weight, for any rows."""
    return weight.shape[1] * num_groups(1, has_norm, silu) * OUTPUTS.value <= HELD


def tile_width(inputs: int, itemsize: int, merges: bool) -> int:
    """Return the inputs of a tile of W: 16 bytes for each thread of a warp.

    To merge splits is the work of all warps, which then share a tile of up to 1,024 inputs.
    """
    width = 32 * 16 // itemsize
    return max(width, math.gcd(inputs, 1024)) if merges else width
