"""vLLM at the other end of a pipe. Runs in an interpreter of its own, which has vLLM and not nanovllm.

Given: its options as JSON in argv[1]; then, a line each on stdin, the rounds of a workload as JSON.
Answers each with a line of JSON on what was its stdout; everything that vLLM prints goes to stderr.
"""

import json
import os
import sys
import time

# Python looks in a script's own directory first, where `kernels` is not the package of that name.
sys.path.pop(0)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB, as our own cache takes on a CPU


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    def answer(**what: object) -> None:
        print(json.dumps(what), file=answers, flush=True)

    start = time.perf_counter()
    llm = LLM(**json.loads(sys.argv[1]))
    warm = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], warm, use_tqdm=False)
    ready, threads = time.perf_counter() - start, torch.get_num_threads()
    answer(version=vllm.__version__, ready=ready, threads=threads)
    for line in sys.stdin:
        work = json.loads(line)
        llm.reset_prefix_cache()
        lengths: list[int] = []
        start = time.perf_counter()
        for prompts, outputs in work["rounds"]:
            params = [
                SamplingParams(
                    temperature=work["temperature"], max_tokens=n, ignore_eos=True, detokenize=False
                )
                for n in outputs
            ]
            items = [{"prompt_token_ids": ids} for ids in prompts]
            outs = llm.generate(items, params, use_tqdm=False)
            lengths += [len(o.outputs[0].token_ids) for o in outs]
        answer(seconds=time.perf_counter() - start, lengths=lengths)


if __name__ == "__main__":
    main()
