"""Run one workload in vLLM, in an environment with vLLM and without nanovllm.

Reads JSON from stdin (options of vLLM's LLM, sampling settings, rounds) and writes JSON to the file
that argv[1] names. The measured time includes neither loading nor the warm-up.
"""

import json
import os
import sys
import time
from pathlib import Path

# Otherwise `import kernels` would find kernels.py beside this script and not the installed package.
sys.path.pop(0)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# GiB; the KV cache of nanovllm has at most the same size on a CPU.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")


def main() -> None:
    import vllm

    options, settings, rounds = json.load(sys.stdin)
    llm = vllm.LLM(**options)
    warm_up = vllm.SamplingParams(max_tokens=4, **settings)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], [warm_up], use_tqdm=False)
    lengths: list[int] = []
    start = time.perf_counter()
    for prompts, outputs in rounds:
        items = [{"prompt_token_ids": ids} for ids in prompts]
        params = [vllm.SamplingParams(max_tokens=n, **settings) for n in outputs]
        outs = llm.generate(items, params, use_tqdm=False)
        lengths += [len(out.outputs[0].token_ids) for out in outs]
    answer = {"seconds": time.perf_counter() - start, "lengths": lengths}
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
