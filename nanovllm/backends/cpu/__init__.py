"""The optional CPU backend: kernels that Numba compiles, paged attention, and packed weights.

Read the files in this order. Each needs only models/ and the files above it.

kernel_files.py      Where compiled kernels are kept, and whether they are compiled. No Numba.
jit.py               `compiled`, the decorator of all kernels.
llvm/calls.py        What Numba cannot say in Python is emitted as LLVM code: calls, pointers, fp8.
primitives.py        Numbers as they are stored, arrays at addresses, exp and maximum.
parallel.py          Runs a kernel on several threads, each for a range of its items.
pointwise.py         Three short kernels: norm, SwiGLU, rotary embedding. The rules for all kernels.
llvm/vectors.py      The two products of attention in vectors of 16 numbers, for any processor.
units/any.py         Unit; attention of groups of queries that read the same blocks of the cache.
llvm/dot.py          The inner loops of products in float32, bfloat16 and int8.
units/avx512.py      Attention and products of few rows with AVX512-BF16.
units/amx.py         The same with AMX.
units/unit.py        Which of the three units is used.
linear.py            Weights in oneDNN's blocked layout, which the units read too.
int8.py              Linear layers with weights in int8. Needs units/amx.py.
int4.py              The same in int4.
experts.py           Products of rows with the weights of their experts.
expert_mlp.py        All that follows the routing of a mixture of experts, in one call.
sampler.py           Filters, draws and log-probabilities of tokens.
fused_decode.py      All layers of a decode step in one call. Needs the units and linear.py.
delta_layers.py      The same for hybrid models, with delta_rule.py and delta_tokens.py.
compile.py           Compiles all kernels above once.
attention.py         NumbaAttention: who computes which tokens of a step. Needs compile.py.
backend.py           Joins all of it into a Backend.

threads.py stands alone. It limits the threads of a step to free cores. The first six files suffice
to read any other kernel. Only a Unit, int8.py, int4.py and linear.py depend on the processor. All
others run where Numba does.
"""
