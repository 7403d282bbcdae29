"""The optional GPU backend: Triton kernels, paged attention with them, and CUDA graphs.

Read the files in this order. Each needs only models/ and the files above it.

kernels/launch.py      Launches with little work on the host, and without compiling again.
kernels/pointwise.py   Two short kernels: RMSNorm and SwiGLU. How a Triton kernel looks here.
kernels/configs.py     Tile sizes of attention for each GPU, in a table.
kernels/conversions.py Exact conversions of fp8 and int8 in registers.
kernels/store.py       Norms and rotates q and k, and writes k and v to the paged cache.
kernels/attention.py   Paged attention: prefill in tiles of queries, decode in splits of contexts.
attention.py           TritonAttention: the launches of a step and of each layer.
kernels/sampler.py     Filters and draws tokens without a sort and without a synchronization.
kernels/linear.py      Products with quantized weights, and with the weights of experts.
kernels/delta_rule.py  The gated delta rule of linear attention, for decodes and for chunks.
graphs.py              DecodeGraphs: a decode step is captured once and replayed. Needs no kernel.
chunk_graphs.py        ChunkGraphs: the same for steps with chunks, without their attention.
profile.py             Measures the memory of the largest steps, for the size of the KV cache.
backend.py             Joins all of it into a Backend, or says why the device cannot run it.

The first two suffice to read any other kernel. The plain torch reference of each kernel is in
models/ or tests/helpers/references.py. `.ci/compile_kernels.py` compiles all kernels for GPUs that
the machine does not have.
"""
