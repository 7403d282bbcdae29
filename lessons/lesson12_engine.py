"""Lesson 12: your engine, the ladder, and the map to vLLM.

You have seen every part of an engine, and have written most of them. Here they work together. There
is no new idea: if you can explain each line of the trace below, you can join your parts to an
engine.

    add -----> waiting --- admit: row, cached prefix, blocks ---> running
                  ^                                                  |
                  +--------------- preempt: no block ----------------+
                                                                     v
    text <--- end, or next token <--- sample <--- model <--- plan of a step
"""

import re

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import Trace

PROMPTS = ("What is 12 + 30?\n", "Sort 42, 7, 99, 3\n", "What is 12 + 7?\n")
OPTIONS = dict(block_size=4, num_kv_cache_blocks=10, max_num_seqs=3, max_num_batched_tokens=12)
# Lesson and part, task, where it is here, and the class or function of vLLM.
PARTS = (
    ("1 text and its end", "stop", "engine/detokenizer.py", "OutputProcessor"),
    ("2 the model", "attention", "models/qwen3.py", "Qwen3ForCausalLM"),
    ("3 keys and values", "cache", "models/attention.py", "attention backends"),
    ("5 blocks, slots", "slots", "engine/block_manager.py", "KVCacheManager"),
    ("6 the plan of a step", "step", "engine/scheduler.py", "Scheduler.schedule"),
    ("7 sampling", "filter", "models/sampler.py", "Sampler"),
    ("8 prefix cache", "prefix", "engine/block_manager.py", "BlockPool"),
    ("8 eviction", "eviction", "engine/block_manager.py", "BlockPool"),
    ("9 preemption", "preempt", "engine/scheduler.py", "Scheduler.schedule"),
    ("9 the waiting queue", "policy", "engine/policies.py", "RequestQueue"),
    ("10 paged attention", "softmax", "backends/gpu/kernels", "unified_attention"),
    ("11 graphs", "replay", "backends/gpu/graphs.py", "CUDAGraphWrapper"),
)


def trace() -> Trace:
    """Run three requests in a small pool, where everything of the road happens."""
    with Trace(llm := make_llm(**OPTIONS)) as result:
        ask(llm, PROMPTS, max_tokens=9)
    return result


def run() -> None:
    say("""Three requests, ten blocks of 4 slots, and 12 tokens a step. Admission, chunks, a prefix
        hit, decodes, preemption, eviction and three ends are in 14 steps. Read it slowly. The
        columns free, cached and shared count blocks while a step runs, so a request that ends in it
        still has its blocks: without content, in the prefix cache but in no block table, and in
        several block tables. Forks are a part of the elective samples. The trace is 100 columns
        wide, and stops before steps 7 and 10:""")
    parts = re.split(r"\n(?=   7 |  10 )", str(trace()))
    for part, questions in zip(parts, ((1,), (2, 3), ()), strict=True):
        print(part, end="\n\n")
        QUESTIONS.show(*questions)
    say("""The parts, where you have written them, where they are here, and who does this in vLLM
        (docs/vllm-map.md has all names, and the files):""")
    show_table(("lesson and part", "build", "here, in nanovllm/", "in vLLM"), PARTS)
    show_source(link("engine.llm_engine.LLMEngine._run_step", "self.runner.run"))
    say("""Build it: `python -m lessons build stop`, and then m6, the last milestone of your engine:
        it streams text. If you want more, sort its waiting list by your policy, sample through your
        filter, attend through your softmax, or draft with your ngram: no check of m1 to m6 may
        break.

        The ladder: `python -m lessons ladder` runs the same requests with one idea after another,
        from lesson 3 to the defaults of LLM(). It names the rungs first: say what each gains while
        it runs. Then read the engine in the order of README, which is the order of a request's
        life, or open vLLM with docs/vllm-map.md: `EngineCore.step` does what your `step` does.""")


QUESTIONS = Questions("""
    Who computes what in step 7? Requests 1 and 2 need a block for the positions 16 and 12. None is
    free, and none is cached without an owner. How many tokens does the step compute?
    Answer: 2. Request 2 was admitted last, so it is preempted, and request 1 takes a block that it
    had. Request 0 has room in its last block for position 15.
    Hint: Which request gives up its blocks, and which of the others need one?

    How many tokens has request 2 sampled when it is preempted?
    Answer: 4. Steps 3 to 6 have each sampled one. Step 2 has not, because it did not end the
    prompt.
    Hint: In which steps is there something in the column "token" of request 2?

    Who computes what in step 10? Request 0 has left 5 blocks. Request 2 has 13 tokens, and the
    first 4 of them are still cached. How many tokens does the step compute?
    Answer: 10. One of request 1, and of request 2 those at positions 4 to 12, which fit into the
    budget. 8 of them had been computed before. The one at position 12 had only been sampled.
    Hint: Which requests run in step 10, and which tokens of each are not in the cache?
""")

IN_VLLM = """`EngineCore.step` in `v1/engine/core.py` calls `Scheduler.schedule`, `execute_model`
and `Scheduler.update_from_output`. The texts are in another process, and with several GPUs each has
a worker process."""
