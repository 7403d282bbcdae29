"""One change of each Triton kernel or more, with which its results are wrong: a mask, a scale, a row.

(module of backends/gpu/kernels/ or weights of linear.py, kernel or part of one, text, replacement)
"""

SECOND_ROW = "tl.minimum(tl.program_id(0), 1)"  # the third row is not computed

WRONG = [
    ("pointwise", "_add_rms_norm", "mask = column < E", "mask = column < E - 1"),
    ("pointwise", "_add_rms_norm", "/ E + eps", "/ (E + 2) + eps"),
    ("pointwise", "_add_rms_norm", "tl.program_id(0)", SECOND_ROW),
    ("pointwise", "_add_rms_norm", "+ addend.to(tl.float32)", ""),
    ("pointwise", "_silu_and_mul", "mask = column < F", "mask = column < F - 1"),
    ("pointwise", "_silu_and_mul", "tl.exp(-y)", "tl.exp(-1.05 * y)"),
    ("pointwise", "_silu_and_mul", "tl.program_id(0)", SECOND_ROW),
    (
        "store",
        "_norm_rope_store",
        "mask = is_q[:, None] &",
        "mask = is_q[:, None] & (head > 0)[:, None] &",
    ),
    ("store", "_norm_rope_store", ") / D + eps)", ") / (D + 2) + eps)"),
    ("store", "_norm_rope_store", "tl.program_id(0)", "tl.minimum(tl.program_id(0), 41)"),
    ("store", "_norm_rope_store", "x * c - y * s", "x * c + y * s"),
    ("store", "_norm_rope_store", "slot % BLOCK)", "slot % BLOCK // 2)"),
    ("store", "_norm_rope_store", "head - H - K)", "H + 2 * K - 1 - head)"),
    ("attention", "_load_blocks", "position // BLOCK", "position // BLOCK // 2 * 2"),
    ("attention", "_attend_tile", "<= query_position", "< query_position"),
    ("attention", "_attend_tile", "<= query_position[:, None]", "<= query_position[:, None] + 1"),
    ("attention", "_attend_tile", "(position < end)", "(position <= end)"),
    ("attention", "_attend_tile", "* scale  #", "* scale * 1.1  #"),
    ("attention", "_attend_tile", "acc * correction[:, None]", "acc"),
    ("attention", "_attend", "(row < QUERIES * G)", "(row < QUERIES * G - 1)"),
    ("attention", "_attend", "row // G, num_queries - 1", "row // G, num_queries - 2"),
    ("attention", "_attend_decode", "(row < G)[:, None]", "(row < G - 1)[:, None]"),
    ("attention", "_attend_decode", "seq * table_stride", "0 * table_stride"),
    ("attention", "_split_context", "tl.cdiv(length, split_size)", "1"),
    ("attention", "_merge_splits", "(split < num_splits)", "(split < num_splits - 1)"),
    ("attention", "_merge_splits", "tl.exp2(lse -", "tl.exp2(2 * lse -"),
    ("sampler", "_weigh_chunks", "token < V", "token < V - 1"),
    ("sampler", "_weigh_chunks", "* _scale(", "* 1.5 * _scale("),
    ("sampler", "_weigh_chunks", "index = row *", "index = tl.minimum(row, 46) *"),
    ("sampler", "_threshold", "if top_k > 0", "if top_k > 9"),
    ("sampler", "_threshold", "if top_p < 1", "if top_p < 0"),
    ("sampler", "_threshold", "if min_p > 0", "if min_p > 1"),
    ("sampler", "_search", "measured >= target", "measured > target"),
    ("sampler", "_uniform", "z >> 11", "z >> 12"),
    ("sampler", "_draw", "target = u *", "target = u * 0.9 *"),
    ("sampler", "_draw", "tl.store(tokens + row", "tl.store(tokens + tl.minimum(row, 46)"),
    ("int8", "_linear", "tl.load(scale + weight_row,", "tl.load(scale + weight_row // 2,"),
    ("int8", "_linear", "columns - start // PER_BYTE)", "columns - start // PER_BYTE - 1)"),
    ("int8", "_linear", "(row < end)", "(row < end - 1)"),
    ("int4", "_linear", "- 8", "- 7"),
    ("int4", "_linear", "scale_ptrs + start // GROUP", "scale_ptrs"),
    ("int4", "_linear", "acc += high_acc", "acc += acc"),
    ("int4", "_linear", "(row < end)", "(row < end - 1)"),
    ("experts", "_expert_rows", "(tiles_end <= tile)", "(tiles_end < tile)"),
    ("experts", "_expert_rows", "+ tile * ROWS", ""),
    ("experts", "_linear", "tl.load(scale + weight_row,", "tl.load(scale + weight_row // 2,"),
    ("experts", "_linear", "< num_inputs - start", "< num_inputs - start - 1"),
    ("experts", "_linear", "expert.to(tl.int64) * num_outputs", "expert.to(tl.int64)"),
    ("delta_rule", "_gates", "1.0 / (1.0 + tl.exp(-b))", "1.1 / (1.0 + tl.exp(-b))"),
    ("delta_rule", "_norm_and_gate", "/ DV + eps", "/ (DV + 3) + eps"),
    ("delta_rule", "_convolve_decode", "conv_weight + tap * C", "conv_weight + tap // 2 * 2 * C"),
    ("delta_rule", "_convolve_decode", "if tap > 0", "if tap > 1"),
    ("delta_rule", "_decode_rule", "state *= tl.exp(g)", "state *= tl.exp(g * 0.9)"),
    (
        "delta_rule",
        "_decode_rule",
        "seq, head = tl.program_id(0)",
        "seq, head = tl.minimum(tl.program_id(0), 1)",
    ),
    ("delta_rule", "_input", "token < start)", "token < start - 1)"),
    ("delta_rule", "_convolve", "(tap - 3)", "(tap - 2)"),
    ("delta_rule", "_convolve", "(token < end)", "(token < end - 1)"),
    ("delta_rule", "_convolve", "end - 3 + i", "end - 4 + i"),
    ("delta_rule", "_solve", "row >= column", "row > column"),
    ("delta_rule", "_solve", "range(1, 6)", "range(1, 5)"),
    ("delta_rule", "_chunk_rule", "state *= tl.load(factor + 3 * CHUNK)", "state *= 1.0"),
    ("delta_rule", "_chunk_rule", "(token < end)", "(token < end - 1)"),
    ("delta_rule", "_chunk_rule", "DK * has_state", "DK"),
    ("delta_rule", "_gated_norm", "(token < tl.load(tile + 2))", "(token < tl.load(tile + 2) - 1)"),
]

# Kernels of a CPU that are right, up to rounding, but whose bits depend on what else is computed.
# name: (module of backends/cpu/, function, text, replacement, model, setting)
HALVES = """half = stride // 8 if {} else 0
            words, first_half = stride // 4 - half, weight_ptr + o * stride
            last_half = first_half + 4 * WIDTH * half
"""
BLOCK = "add_block(example, sums_ptr, x, stride, weight_ptr + o * stride, stride // 4, count)"
IN_ANOTHER_ORDER = {
    "two chains of sums for one row": (
        "kernels.simd",
        "linear_blocks",
        BLOCK,
        HALVES.format("count == 1")
        + """
            add_block(example, sums_ptr, x, stride, first_half, half, count)
            other = np.zeros((height, WIDTH), np.float32)
            other_ptr = np.int64(other.ctypes.data)
            add_block(example, other_ptr, x + 4 * half, stride, last_half, words, count)
            sums += other""",
        *("qwen3", "float32"),
    ),
    "the last half of a sum first, for many rows": (
        "kernels.simd",
        "linear_blocks",
        BLOCK,
        HALVES.format("count > 8")
        + """
            add_block(example, sums_ptr, x + 4 * half, stride, last_half, words, count)
            add_block(example, sums_ptr, x, stride, first_half, half, count)""",
        *("qwen3", "float32"),
    ),
    "a prefix whose sums are rounded": (
        "kernels.attention",
        "attend_groups",
        "partial[token, h, d] = sums[r, d]",
        "partial[token, h, d] = to_float32(from_float32(sums[r, d], q_example))",
        *("qwen3", "bfloat16"),
    ),
    "a prefix that ends within a segment": (
        "attention",
        "NumbaAttention.shared_prefixes",
        "* self.block_size // KEYS * KEYS",
        "* self.block_size",
        *("qwen3", "float32"),
    ),
    "one maximum of all rows of a group": (
        "kernels.attention",
        "attend_groups",
        "weigh_rows(height, scores_ptr",
        """if first == 0:
                row_max[:height] = log2_scale * np.max(scores[:height, :tokens])
            weigh_rows(height, scores_ptr""",
        *("qwen3", "float32"),
    ),
    "the last segment first, for many rows": (
        "kernels.attention",
        "attend_groups",
        "for first in range(begin, context_len, KEYS):",
        """for step in range(begin, context_len, KEYS):
            last = begin + (context_len - 1 - begin) // KEYS * KEYS
            first = step if is_few else begin + last - step""",
        *("qwen3", "float32"),
    ),
    "a sum of experts that begins with another one for each token of a step": (
        "kernels.experts",
        "sum_rows",
        "weight, row = to_float32(weights[t, k]), rows[places[t, k]]",
        """j = (k + t) % places.shape[1]
            weight, row = to_float32(weights[t, j]), rows[places[t, j]]""",
        *("moe", "float32"),
    ),
    "a router that adds from the end, for many rows": (
        "kernels.pointwise",
        "small_linear_rows",
        "total += to_float32(x[i, c]) * to_float32(weight[o, c])",
        """d = inputs - 1 - c if rows > 8 else c
                total += to_float32(x[i, d]) * to_float32(weight[o, d])""",
        *("moe", "float32"),
    ),
    "a norm that adds from the end, for many rows": (
        "kernels.pointwise",
        "add_rms_norm_rows",
        "scale = f32(1)",
        """if rows > 8:
                squares = f32(0)
                for c in range(size - 1, -1, -1):
                    squares += to_float32(residual[i, c]) * to_float32(residual[i, c])
            scale = f32(1)""".replace("\n    ", "\n"),
        *("qwen3", "float32"),
    ),
    "another exponential function for many rows": (
        "kernels.pointwise",
        "silu_and_mul_rows",
        "exp(-gate)",
        "(exp(-gate) if rows < 9 else np.exp(-gate))",
        *("qwen3", "float32"),
    ),
    "one scale of all quantized rows": (
        "kernels.product",
        "quantize_rows",
        "largest_magnitude(row)",
        "largest_magnitude(x.ravel())",
        *("qwen3", "int8"),
    ),
    "a random number of a row": (
        "kernels.sampler",
        "draw_rows",
        "positions[row])",
        "positions[row] + row)",
        *("qwen3", "float32"),
    ),
    "a state that is rounded between chunks": (
        "kernels.delta_rule",
        "advance_heads",
        "difference[:] = f32(0)",
        """for r in range(key_dim if t == first else 0):
                    for c in range(value_dim):
                        state[r, c] = to_float32(from_float32(state[r, c], example))
                difference[:] = f32(0)""",
        *("hybrid", "bfloat16"),
    ),
}
