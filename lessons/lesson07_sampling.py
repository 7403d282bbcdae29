"""Lesson 7: sampling: from logits to a token.

A step ends with logits, one for each token of the vocabulary. Until now the largest decided, which
is called greedy: a model always gives the same answer, and often repeats itself. To draw a token,
divide the logits by a temperature T, hide unlikely tokens with filters, and let the softmax make
probabilities of the rest:

    p_i = exp(logit_i / T) / sum of exp(logit_j / T) over all tokens j

Each token has a part of the interval from 0 to 1, in the order of the token ids. A random u in [0,
1) draws one. With probabilities 0.2, 0.4, 0.07, 0.3 and 0.03:

    probabilities   [ a a a a | b b b b b b b b | c | d d d d d d | e ]  0 to 1
    u = 0.55        -------------------------^     b: its part is 0.2 to 0.6
"""

import torch

from lessons.lesson import ask, make_llm, next_logprobs
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams
from nanovllm.models import sampler
from nanovllm.models.batch import SamplingBatch

PROMPT = "What is "


def probabilities(logits: torch.Tensor, temperature: float = 1.0, **values: float) -> torch.Tensor:
    """Return the probabilities that the sampler draws from [V], with these filters."""
    filters = {name: torch.tensor([value]) for name, value in values.items()}
    zero = torch.tensor([0])  # seed and position, which only a draw needs
    batch = SamplingBatch(torch.tensor([temperature]), zero, zero, filters)
    return sampler.filtered_logits(logits[None], batch)[0].softmax(-1)


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    tokenizer = llm.get_tokenizer()
    logits = next_logprobs(llm, PROMPT)
    say("""A temperature T below 1 makes likely tokens more likely, one above 1 less likely. T = 0
        cannot divide: there the engine is greedy. After the temperature, filters run in this
        order. top_k keeps the k most likely tokens. top_p keeps the most likely tokens until their
        sum reaches p. min_p keeps tokens that are at least p times as likely as the most likely
        token. After each filter the probabilities of the kept tokens are divided by their sum, and
        the next filter sees only these.""")
    QUESTIONS.show(1)
    columns = {f"T {t:g}": probabilities(logits, t) for t in (0.5, 1, 2)}
    for name, value in (("top_k", 3), ("top_p", 0.8), ("min_p", 0.1)):
        columns[f"{name} {value:g}"] = probabilities(logits, **{name: value})
    rows: list[tuple[object, ...]] = []
    for token in logits.topk(8).indices.tolist():
        cells = (f"{p[token]:.1%}" if p[token] else "hidden" for p in columns.values())
        rows.append((repr(tokenizer.decode([token])), *cells))
    rows.append(("tokens left", *(int((p > 0).sum()) for p in columns.values())))
    say("The 8 most likely of 1,042 tokens after 'What is '. Each filter is alone, at T = 1:")
    show_table(("token", *columns), rows)
    QUESTIONS.show(2)
    position = len(tokenizer.encode(PROMPT))
    say(f"""Draws at T = 1. u depends only on the request's seed and on the position of the token,
        {position} here. So with equal logits a request draws the same tokens in any batch. Here
        each request runs alone, and then all five in one batch:""")
    rows = []
    whole = columns["T 1"]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=1) for seed in range(1, 6)]
    batch = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for seed, output in enumerate(batch, 1):
        u = sampler.uniform(torch.tensor([seed]), torch.tensor([position]))
        [token] = ask(llm, [PROMPT], temperature=1, seed=seed, max_tokens=1)[0]["token_ids"]
        assert token == int(sampler.draw(logits[None], u))
        part = f"{whole[:token].sum():.4f} to {whole[: token + 1].sum():.4f}"
        words = (repr(tokenizer.decode(ids)) for ids in ([token], output["token_ids"]))
        rows.append((seed, f"{float(u):.4f}", part, *words))
    show_table(("seed", "u", "the token's part of [0, 1)", "token", "in the batch"), rows)
    show_source(
        link("models.sampler.filtered_logits", "batch.temperature"),
        *map(link, sampler.FILTER_FUNCTIONS.values()),
        link("models.sampler.uniform"),
        link("models.sampler.draw", "cumulative > u"),
    )
    say("Build it: `python -m lessons build filter`.")


QUESTIONS = Questions("""
    In one step the model is sure: a token has the probability 0.99. In another, fifty tokens are
    about equally likely. What is wrong with top_k=3 here, and not with min_p=0.1?
    (a) It may hide the most likely token.
    (b) It has to sort the whole vocabulary.
    (c) It keeps as many tokens in both steps.
    Answer: c. It keeps three tokens, although one or fifty make sense. The threshold of min_p is
    relative to the most likely token: it keeps one token in the first step and all fifty in the
    second. top_p adapts too.
    Hint: How many tokens does each filter keep in the first step, and how many in the second?

    Suppose that all requests of a batch draw from one random generator, in the order of their rows.
    What would change the tokens of a request with a seed?
    (a) Nothing, if the generator begins with this seed.
    (b) Only its own prompt and its own parameters.
    (c) The other requests of its batch, and their order.
    Answer: c. Each draw advances the generator, so the draws of others change what a request gets.
    So u must depend on the request alone.
    Hint: Who advances the generator between two draws of the request?
""")

IN_VLLM = """`Sampler.sample` in `v1/sample/sampler.py` applies min_p before top_k and top_p. Each
token of the vocabulary gets a random number: in the model runner V1 from a generator of each
request that has a seed (`random_sample` in `v1/sample/ops/topk_topp_sampler.py`), in V2 from seed
and position, as here (`gumbel_noised_argmax` in `v1/worker/gpu/sample/gumbel.py`)."""
