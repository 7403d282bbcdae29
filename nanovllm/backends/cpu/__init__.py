"""The optional CPU backend: kernels that Numba compiles, paged attention, and packed weights.

Read the files in this order. Each needs only models/, utils/ and the files above it.

kernel_files.py           Where compiled kernels are kept, and whether they are compiled. No Numba.
jit.py                    `compiled`, the decorator of all kernels.
kernels/llvm/emit.py      Calls, pointers and fp8 in LLVM code, which Numba cannot express.
kernels/primitives.py     Numbers as they are stored, arrays at addresses, exp and maximum.
kernels/parallel.py       Runs a kernel on several threads, each for a range of its items.
kernels/product.py        Products with packed weights; quantized and padded rows.
kernels/words.py          The layout of the KV cache, and the operands of attention's products.
kernels/pointwise.py      Norm, SwiGLU, rotary embedding. The rules and shapes of all kernels.
kernels/llvm/vectors.py   The softmax of a segment, in vectors of 16 numbers.
kernels/llvm/dot.py       The inner loop of products in float32, bfloat16 and int8.
kernels/llvm/int4.py      The inner loop of products in int4.
kernels/amx.py            Products in bfloat16 with AMX.
kernels/simd.py           The same without AMX, and in float32 and int8, for any processor.
kernels/attention.py      Groups of queries that read the same blocks, and their attention.
linear.py                 Weights in float32 and bfloat16, packed in the order of the kernels.
kernels/int8.py           Linear layers with weights in int8.
kernels/int4.py           Linear layers with weights in int4.
kernels/experts.py        All that follows the routing of a mixture of experts, in one call.
kernels/sampler.py        Filters, draws and log-probabilities of tokens.
kernels/layer_tables.py   The arguments of the next: addresses of a layer, sizes of a step.
kernels/fused_layers.py   All layers of a step in one call.
kernels/decode_step.py    The kernels of a whole decode step, from rows to tokens.
compile.py                Compiles the kernels above once.
memory.py                 Huge pages, for the KV cache and for weights.
attention.py              NumbaAttention: which tokens of a step are a group.
fused_step.py             A whole decode step in one call.
kernels/delta_rule.py     Linear attention of hybrid models.
kernels/delta_layers.py   The layers of a hybrid model; which models fused_layers.py computes.
backend.py                Joins all of it into a Backend.
thread_limit.py           Limits the threads of a step to free cores. It stands alone.

The first five files suffice to read any other kernel. Only llvm/dot.py, llvm/int4.py,
simd.py, int8.py and amx.py depend on the processor. All others run where Numba does.
"""
