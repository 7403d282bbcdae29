"""Runs a workload in vLLM, in an environment with vLLM and without nanovllm.

It follows the protocol of turn.py: it reads JSON from stdin, a line with the job (options of vLLM's
LLM, sampling settings, rounds) and a line for each turn. It writes a line for each to stdout. The
measured time does not include loading, or the warm-up, which is one run.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of libraries is not an answer
    import vllm

    job = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    llm = vllm.LLM(**job["options"])
    load_seconds = time.perf_counter() - start

    def run() -> float:
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
        seconds = time.perf_counter() - start
        if lengths != expected:
            raise RuntimeError(f"vLLM generated {lengths} tokens instead of {expected}")
        return seconds

    print(json.dumps({"load_seconds": load_seconds, "first_seconds": run()}), file=answers)
    for _ in sys.stdin:
        print(json.dumps({"seconds": run()}), file=answers)


if __name__ == "__main__":
    sys.path.pop(0)  # modules next to this script are not for import
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # GiB; the KV cache of nanovllm has at most the same size on a CPU.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    main()
