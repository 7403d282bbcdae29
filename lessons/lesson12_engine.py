"""Lesson 12: your engine, the ladder, and the door to vLLM.

You have seen every part of an engine, and have written most of them. Here they work together. There
is no new idea: if you can explain each line of the trace below, you can read the source of any
engine, and you can write one.

    add -----> waiting --- admit: row, cached prefix, blocks ---> running
                  ^                                                  |
                  +--------------- preempt: no block ----------------+
                                                                     v
    text <--- end, or next token <--- sample <--- model <--- plan of a step
"""

from lessons.lesson import ask, make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import Trace

PROMPTS = ("What is 12 + 30?\n", "Sort 42, 7, 99, 3\n", "What is 12 + 7?\n")
OPTIONS = dict(block_size=4, num_kv_cache_blocks=10, max_num_seqs=3, max_num_batched_tokens=12)
# Part, lesson, task, where it is here, and the class or function of vLLM.
PARTS = (
    ("text and its end", 1, "stop", "engine/detokenizer.py, sampling.py", "OutputProcessor"),
    ("the model", 2, "", "models/qwen3.py", "Qwen3ForCausalLM"),
    ("keys and values", 3, "cache", "models/attention.py", "attention backends"),
    ("blocks, slots", 5, "slots", "engine/block_manager.py", "KVCacheManager"),
    ("the plan of a step", 6, "step", "engine/scheduler.py", "Scheduler.schedule"),
    ("sampling", 7, "filter", "models/sampler.py", "Sampler"),
    ("prefix cache", 8, "prefix, eviction", "engine/block_manager.py", "BlockPool"),
    ("the waiting queue", 9, "preempt, policy", "engine/scheduler.py, policies.py", "RequestQueue"),
    ("paged attention", 10, "softmax", "backends/gpu/kernels", "unified_attention"),
    ("graphs", 11, "replay", "backends/gpu/graphs.py", "CUDAGraphWrapper"),
)


def trace() -> Trace:
    """Run three requests in a small pool, where everything of the road happens."""
    with Trace(llm := make_llm(**OPTIONS)) as result:
        ask(llm, PROMPTS, max_tokens=9)
    return result


def run() -> None:
    say("""Three requests, ten blocks of 4 slots, and 12 tokens a step. Admission, chunks, a prefix
        hit, decodes, preemption, eviction and three ends are in 14 steps. Read it slowly:""")
    print(trace(), end="\n\n")
    QUESTIONS.show(1, 2)
    say("""The parts, where you have written them, where they are here, and who does this in vLLM
        (docs/vllm-map.md has all names, and the files):""")
    show_table(("part", "lesson", "build", "here, in nanovllm/", "in vLLM"), PARTS)
    show_source(link("engine.llm_engine.LLMEngine.run_step", "self.runner.run"))
    say("""Build it: `python -m lessons build engine`. It imports your files of the other tasks, and
        its loop has about 50 lines. The check compares its answers with transformers', and its
        speed with transformers and with nanovllm.

        The ladder: `python -m lessons ladder` runs the same requests with one idea after another,
        from lesson 3 to the defaults of LLM(). Say what each rung gains before you look. Then read
        the engine in the order of README, which is the order of a request's life, or open vLLM with
        docs/vllm-map.md: `EngineCore.step` is the loop that you have just written.""")


QUESTIONS = Questions("""
    In step 2 of the trace request 2 computes one token, position 4, although its prompt has nine
    tokens. Why? (a) Its first block was cached, and the token budget had room for one more token.
    (b) It decodes. (c) It has only one block.
    Answer: a. Positions 0 to 3 are in block 1, which request 0 has computed. The step computes 12
    tokens: one of request 0, ten of request 1 and one of request 2.
    Hint: Read the two lines below the step, and add up what the step computes.

    How many tokens has request 2 sampled when it is preempted?
    Answer: 4. Steps 3 to 6 have each sampled one. Step 2 has not, because it did not end the
    prompt.
    Hint: In which steps is there something in the column "token" of request 2?
""")
