"""Elective drafts: draft and verify.

A decode of one row reads all weights to compute one token, and the processor waits for the memory
(lesson 4). A chunk of six tokens reads the weights once too. If the next tokens are guessed, one
step can check all of them, which is called speculative decoding. Where a text repeats itself,
guessing needs no other model: the last tokens, an n-gram, occurred before, and the tokens that
followed them there are the drafts:

    known    a b c d e a b      the last "a b" was followed by c d e
    chunk    [ b | c d e ]      the last token, and the drafts c, d, e
    drawn      c   d x y        the sampler draws a token at each of the four
    result     c   d x          x is not the draft e, so y follows a wrong token

The result is exactly what the engine gives without drafts. A draft counts only if it is the token
that was drawn in its place. The random number of a draw is a function of seed and position alone
(lesson 7), and the logits of a position depend on the tokens before it. Each token that is kept was
therefore drawn from the same logits and with the same number.
"""

from typing import Any

from lessons.lesson import ask, make_llm, shape_of
from lessons.lesson04_roofline import decode_costs
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, Trace
from nanovllm.features.sampling.ngram import FIRST_PAUSE, LONGEST_PAUSE

RIDGE = 20  # FLOPs that a processor computes while it reads a byte, for the calculation
DRAFTS = 5
CONTEXT = 100
QUESTION = "Count from 1 to 20\n"
REPEATING = f"{QUESTION}{', '.join(map(str, range(1, 21)))}\n\n{QUESTION}"
PROMPTS = {"a copy": REPEATING, "another answer": "What is prefix sharing?\n"}


def show_costs() -> None:
    """Show what steps with and without drafts cost, calculated for Qwen3-0.6B in bfloat16."""
    table = []
    config = shape_of("qwen3-0.6b")
    unit = decode_costs(config, 1, 1)["weight_bytes"]
    for rows, tokens in ((1, 1), (1, 1 + DRAFTS), (16, 1), (16, 1 + DRAFTS)):
        read = decode_costs(config, rows, CONTEXT)["decode_bytes"] / unit
        compute = decode_costs(config, rows * tokens, CONTEXT)["decode_flops"] / RIDGE / unit
        costs = (read, compute, max(read, compute))
        table.append((rows, tokens, *(f"{cost:.2f}" for cost in costs)))
    show_table(("rows", "tokens of each", "reading", "computing", "the step"), table)


def compare(llms: tuple[LLM, LLM], prompt: str) -> tuple[object, ...]:
    """Run a request without and with drafts -> tokens, steps of both, and counts of drafts."""
    steps, results = [], []
    for llm in llms:
        with Trace(llm) as trace:
            [output] = ask(llm, [prompt], max_tokens=60, temperature=0.8, seed=1)
        results.append(output["token_ids"])
        steps.append(trace.num_steps)
    entries = [entry for event in trace.events for entry in event.get("drafts", ())]
    counts = (sum(entry[i] for entry in entries) for i in (1, 2))
    return len(results[0]), *steps, *counts, "yes" if results[0] == results[1] else "no"


def run() -> None:
    QUESTIONS.show(1)
    say(f"""What a step takes at least, calculated for Qwen3-0.6B with {CONTEXT} tokens of context,
        on a processor that computes {RIDGE} FLOPs while it reads a byte. The unit is the time to
        read all weights. Reading and computing overlap, so the larger of the two counts:""")
    show_costs()
    say("""With one row, six tokens take as long as one. With 16 rows the step is limited by
        computing, and every draft takes time, also if it is wrong. The engine therefore makes
        drafts only in steps of few tokens.""")
    options: dict[str, Any] = {"attention_backend": "sdpa", "num_kv_cache_blocks": 64}
    with_drafts = options | {"speculative_config": {"num_speculative_tokens": DRAFTS}}
    llms = make_llm(**options), make_llm(**with_drafts)
    rows = [(name, *compare(llms, prompt)) for name, prompt in PROMPTS.items()]
    say("""The embedded model counts, at temperature 0.8, and its prompt contains the same question
        with its answer. The other output repeats nothing:""")
    head = ("tokens", "steps without", "steps with", "drafts", "accepted", "equal tokens")
    show_table(("output", *head), rows)
    say(f"""If drafts fail, the row gets fewer of them, and then none for {FIRST_PAUSE} to
        {LONGEST_PAUSE} tokens. The engine looks up n-grams of several sizes, the longest first, and
        where the known tokens end, it repeats the drafts. The task leaves these three out.""")
    QUESTIONS.show(2)
    say("""A wrong draft and those after it are taken back: they no longer count as computed, and
        the next step stores other keys and values in their slots. Their blocks are not cached, as
        only blocks of known tokens are.

        Drafts have another price. Only the tokens of a step say which of its drafts are right,
        and so what the next step computes. A step that has drafts, or after which a row may have
        some, is therefore read before the next one is planned. The overlap of lesson 11a is lost
        for it.""")
    QUESTIONS.show(3)
    show_source(
        link("features.sampling.ngram.Lookup.find", "self.text.rfind"),
        link("features.sampling.ngram.NgramSpeculation.accept", "index(False)"),
        link("features.sampling.ngram.NgramSpeculation.needs_results", "chunk.num_drafts"),
    )
    say("Build it: `python -m lessons build ngram`.")


QUESTIONS = Questions("""
    A row has 5 drafts, and all of them are right. How many tokens does the row get in this step?
    Answer: 6. A token is drawn after each of the six tokens of the chunk, also after the last
    draft. If the first draft is wrong, the row gets one token, as without drafts.
    Hint: How many tokens has the chunk, and after which of them is a token drawn?

    Why does the engine draw with the position as a part of the random number, and not with the next
    number of a generator?
    (a) A generator is too slow for several tokens in a step.
    (b) A generator would also advance for rejected tokens.
    (c) A generator would give all drafts the same number.
    Answer: b. Later tokens would then differ. With (seed, position) a token gets the same number,
    however often its position is drawn. For the same reason a request may be preempted and computed
    again.
    Hint: A position whose draft was wrong is drawn again in the next step. Which number must it
    get?

    On a GPU a step takes 5 milliseconds, and the host plans one in 3 milliseconds, in which the GPU
    computes the step before, if nothing has drafts. How many tokens must a step with drafts give a
    row on average, to be as fast as steps without drafts?
    Answer: 1.6. Without drafts a step gives a token every 5 milliseconds. With drafts host and GPU
    take turns, so a step takes 8, and 8 / 5 = 1.6. The step itself takes longer too, if it is not
    limited by reading.
    Hint: How long is a step with drafts, if the host waits for the GPU before it plans?
""")

IN_VLLM = """`NgramProposer.propose` in `v1/spec_decode/ngram_proposer.py`: draft and verify is
called speculative decoding, and this kind of it prompt lookup, or ngram. `RejectionSampler` in
`v1/sample/rejection_sampler.py` accepts a draft with the ratio of two probabilities (rejection
sampling), so a seed may give other tokens than without drafts. Async scheduling is off with it."""
