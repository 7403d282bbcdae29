"""Elective drafts: draft and verify.

A decode of one row reads all weights to compute one token, and the processor waits for the memory
(lesson 4). A chunk of six tokens reads the weights once too. If the next tokens are guessed, one
step can check all of them. Where a text repeats itself, as in a list that is copied or in code that
is edited, guessing needs no other model: the last tokens, an n-gram, occurred before, and the
tokens that followed them there are the drafts:

    known    a b c d e a b      the last "a b" was followed by c d e
    chunk    [ b | c d e ]      the last token, and the drafts c, d, e
    drawn      c   d x y        the sampler draws a token at each of the four
    result     c   d x          x is not the draft e, so y follows a wrong token

The result is exactly what the engine gives without drafts. The random number of a draw is a
function of seed and position alone (lesson 7), and the logits of a position depend on the tokens
before it. A draft counts only if it is the token that was drawn in its place. Each token that is
kept was therefore drawn from the same logits and with the same number. Another way (Leviathan et
al. 2023, arXiv:2211.17192) accepts a draft with the ratio of two probabilities, which keeps the
distribution and not the tokens.
"""

from typing import Any

from lessons.lesson import ask, make_llm, shape_of
from lessons.lesson04_roofline import decode_costs
from lessons.pictures import show_lanes
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, Trace

RIDGE = 20  # FLOPs that a processor computes while it reads a byte, for the calculation
DRAFTS, CONTEXT = 5, 100
QUESTION = "Count from 1 to 20\n"
REPEATING = f"{QUESTION}{', '.join(map(str, range(1, 21)))}\n\n{QUESTION}"
OTHER = "What is prefix sharing?\n"


def show_costs() -> None:
    """Print what steps with and without drafts cost, calculated for Qwen3-0.6B in bfloat16."""
    table, lanes, config = [], list[Any](), shape_of("qwen3-0.6b")
    unit = decode_costs(config, 1, 1)["weight_bytes"]
    for rows in (1, 4, 16):
        for tokens in (1, 1 + DRAFTS):
            read = decode_costs(config, rows, CONTEXT)["decode_bytes"] / unit
            compute = decode_costs(config, rows * tokens, CONTEXT)["decode_flops"] / RIDGE / unit
            least = max(read, compute)
            values = (read, compute, least, least / rows / tokens)
            table.append((rows, tokens, *(f"{value:.2f}" for value in values)))
            if rows == 1:
                name = "1 token" if tokens == 1 else f"{tokens} tokens"
                kv = read - 1
                lanes.append((f"{name}: reads", [(0, 1, "weights", 1), (1, kv, "", 2)]))
                lanes.append((f"{name}: computes", [(0, compute, "", 3)]))
    head = ("reading", "computing", "the step", "each of its tokens")
    show_table(("rows", "tokens of each", *head), table)
    show_lanes("A step of one row reads the same for 1 and for 6 tokens", lanes, "weights", KV=2)


def follow(llm: LLM, prompt: str, **params: Any) -> tuple[Trace, list[int]]:
    """Run a request. Returns its trace and its tokens."""
    with Trace(llm) as trace:
        [output] = ask(llm, [prompt], max_tokens=60, **params)
    return trace, output.outputs[0].token_ids


def drafts(trace: Trace) -> list[tuple[int, int]]:
    """Return (drafts, accepted ones) of each step that has drafts."""
    entries = (entry for event in trace.events for entry in event.get("drafts", ()))
    return [(drafted, accepted) for _, drafted, accepted in entries]


def compare(plain: LLM, speculating: LLM) -> None:
    """Print the steps of requests with and without drafts, and whether the tokens are equal."""
    table = []
    sampled = {"temperature": 0.8, "seed": 1}
    for name, prompt, params in (
        ("a copy, greedy", REPEATING, {}),
        ("a copy, temperature 0.8", REPEATING, sampled),
        ("another answer, greedy", OTHER, {}),
    ):
        without, wanted = follow(plain, prompt, **params)
        trace, tokens = follow(speculating, prompt, **params)
        tried = drafts(trace)
        counts = sum(n for n, _ in tried), sum(n for _, n in tried)
        steps = without.num_steps, trace.num_steps
        table.append((name, len(tokens), *steps, *counts, "yes" if tokens == wanted else "no"))
    head = ("tokens", "steps without", "steps with", "drafts", "accepted", "equal tokens")
    show_table(("output", *head), table)


def run() -> None:
    QUESTIONS.show(1)
    say(f"""What a step takes at least, calculated for Qwen3-0.6B on a processor that computes
        {RIDGE} FLOPs while it reads a byte. The unit is the time to read all weights. Reading and
        computing overlap, so the larger of the two counts:""")
    show_costs()
    say("""With one row, six tokens take as long as one. With 16 rows the step is limited by
        computing, and every draft takes time, also if it is wrong. The engine therefore makes
        drafts only in steps of few tokens.""")
    options: dict[str, Any] = dict(attention_backend="sdpa", num_kv_cache_blocks=64)
    plain = make_llm(**options)
    speculating = make_llm(**options, speculative_config={"num_speculative_tokens": DRAFTS})
    say("""The embedded model counts, and its prompt contains the same question with its answer. The
        third output repeats nothing:""")
    compare(plain, speculating)
    say("""All outputs are equal, also those that are sampled. If all drafts are right, a step
        yields one token more, which was drawn after the last of them. If drafts fail, the next are
        shorter, and after several failures the row gets none for a while.""")
    say("""Wrong drafts leave KV in their slots. The next tokens of the row overwrite it, and until
        then no block that contains it may be found in the prefix cache. A state of linear attention
        (elective `states`) has consumed the wrong tokens and cannot be taken back without a
        snapshot, so the engine refuses drafts for such models.""")
    QUESTIONS.show(2)
    show_source(
        link("features.requests.ngram.Lookup.find", "followers.get"),
        link("features.requests.ngram.NgramSpeculation.accept", "index(False)"),
        link("features.requests.ngram.NgramSpeculation._take_back", "num_computed -="),
        link("runner.rows.Rows.build", "step.tokens_after"),
    )


QUESTIONS = Questions("""
    A row knows the tokens a b c a b, and its drafts are c and a. At the three positions of the
    chunk the sampler draws c, b, x. Which tokens does the row get? (a) c (b) c b (c) c b x
    Answer: b. The first draft is right. The other one is a, and b was drawn in its place, so b is
    the next token. x was drawn after the wrong token a.
    Hint: Which drafts are equal to the drawn tokens, and what was drawn in place of the first that
    is not?

    Why does the engine draw with the position as a part of the random number, and not with the next
    number of a generator? (a) The generator is too slow for several tokens in a step. (b) A
    generator would have advanced for rejected tokens too, so later tokens would differ. (c) Drafts
    have no position.
    Answer: b. With (seed, position) a token gets the same number, however often its position is
    drawn. For the same reason a request may be preempted and computed again.
    Hint: A position whose draft was wrong is drawn again in the next step. Which number must it
    get?
""")
