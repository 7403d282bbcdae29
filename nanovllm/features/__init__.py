"""What a model, a device, a file or a request needs besides the core, one folder for each kind.

sampling       options of SamplingParams: logit rules, grammars, thinking, drafts, tool calls
tasks          other kinds of requests: beams, embeddings, log-likelihoods, reranking
models         linear attention (Qwen3.5) and mixtures of experts
formats        files of models: GGUF, quantized checkpoints, adapters, and the hub
kv             where the KV of evicted blocks goes: host memory and files
weights        weights that change: new ones, sleep, and random ones
parallel       several processes share one model
kernel_check   kernels are compared with plain torch
"""
