"""Run one workload in vLLM, in an environment with vLLM and without nanovllm.

Reads JSON from stdin (options of vLLM's LLM, sampling settings, rounds) and writes JSON to the file
that argv[1] names. The measured time does not include loading, or the warm-up: one whole run.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    import vllm

    job = json.load(sys.stdin)
    llm = vllm.LLM(**job["options"])
    answer = {}
    for _ in range(2):  # the first one is the warm-up
        llm.reset_prefix_cache()
        lengths: list[int] = []
        expected: list[int] = []
        start = time.perf_counter()
        for prompts, outputs in job["rounds"]:
            items = [{"prompt_token_ids": ids} for ids in prompts]
            params = [vllm.SamplingParams(max_tokens=n, **job["settings"]) for n in outputs]
            outs = llm.generate(items, params, use_tqdm=False)
            lengths += [len(out.outputs[0].token_ids) for out in outs]
            expected += outputs
        answer = {"seconds": time.perf_counter() - start}
        if lengths != expected:
            raise RuntimeError(f"vLLM generated {lengths} tokens instead of {expected}")
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    # Otherwise `import kernels` would find kernels.py beside this script and not the installed package.
    sys.path.pop(0)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # GiB; the KV cache of nanovllm has at most the same size on a CPU.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    main()
