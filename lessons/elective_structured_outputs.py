"""Elective structured_outputs: a grammar masks tokens while the device computes.

A program that reads an answer needs it in a format, such as JSON, and one wrong comma is an error.
A grammar says which texts are valid. After each output token it gives a mask with one bit for each
token of the vocabulary: 1 if some valid text continues with it (Willard and Louf 2023,
arXiv:2307.09702). The sampler gives masked tokens the logit -inf. The output is then always valid,
also of a weak model.

    output    {"answer":            so far
    mask      digits and - : 1      letters, { and } : 0
    logits    -inf where the mask is 0; then the draw of lesson 7

A mask depends on the token before it, which the device has just sampled, but the logits of the next
token do not depend on the mask. So the host computes the mask while the device computes the layers:

    host     launch step 2 | read token 1, compute mask 2 | launch mask, draw
    device   ... token 1   | layers of step 2 ............| mask, draw: token 2
"""

from lessons.lesson import ask, make_llm, optional, timed
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.features.sampling.structured import GrammarCompiler, Matcher
from nanovllm.sampling_params import StructuredOutputsParams

SHOWS_TIMES = True
PROMPT = "What is 12 + 30?\n"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
PARAMS = StructuredOutputsParams(json=SCHEMA | {"additionalProperties": False})


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    if optional("llguidance") is None:
        say("llguidance is not installed: pip install -e '.[structured]'")
        return
    QUESTIONS.show(1)
    inputs = llm.engine.input_processor
    say(f"""The embedded model was not trained to write JSON. It is asked {PROMPT!r} with a schema
        of an integer `answer`. "allowed" counts tokens, of {inputs.vocab_size:,}, and "most likely"
        is the model's own choice, before the mask:""")
    options = dict(max_tokens=40, logprobs=1, structured_outputs=PARAMS)
    output = ask(llm, [PROMPT], **options)[0].outputs[0]
    compiler = GrammarCompiler(llm.get_tokenizer(), inputs.vocab_size, inputs.eos_token_ids)
    matcher = Matcher(compiler.compile(PARAMS, sorted(inputs.eos_token_ids)))
    decode = llm.get_tokenizer().decode
    rows = []
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs or [], strict=True)):
        allowed = int.from_bytes(matcher.mask(output.token_ids[:i]) or b"").bit_count()
        best = min(entry, key=lambda candidate: entry[candidate].rank)
        rows.append((i, allowed, *(repr(decode([t])) for t in (best, token))))
    show_table(("position", "allowed", "most likely", "drawn"), rows)
    say(f"""The output is {output.text!r}: valid, which does not mean right. A mask cannot make a
        model better; it can make it worse, if the format keeps it from what it has learned to
        write.""")
    QUESTIONS.show(2)
    _, mask = timed(lambda: matcher.mask([]), repeats=21)
    _, step = timed(lambda: ask(llm, [PROMPT], max_tokens=1), repeats=9)
    say(f"""A mask takes the host {mask * 1e6:,.0f} us here, and a request for one token of the
        small model {step * 1e3:.1f} ms. On a GPU a mask costs nothing while it takes less time than
        the layers do. On a CPU both take turns.""")
    show_source(
        link(Matcher.mask, "compute_bitmask"),
        link("features.sampling.logit_rules.row_rules.RulesBatch.sample", "self.apply"),
    )


QUESTIONS = Questions("""
    At a position only one token is allowed. What does the temperature change there?
    (a) Nothing: the same token is drawn in any case.
    (b) A high one can draw a token that is masked.
    (c) A low one makes this token even more likely.
    Answer: a. All other logits are -inf at any temperature. An engine could even skip the model
    there, which is called jump-forward decoding; this engine does not.
    Hint: What is -inf divided by a temperature?

    The layers of a step take 10 milliseconds on a GPU, and the host needs 12 for the mask of the
    step. By how many milliseconds does the mask make the step longer?
    Answer: 2. The host begins with the mask when the device begins with the layers. The draw has to
    wait for both.
    Hint: What does the device do in the second picture while the host computes the mask?
""")

IN_VLLM = """`StructuredOutputManager.grammar_bitmask` in `v1/structured_output/__init__.py`
computes the masks while the model runs, and `apply_grammar_bitmask` in
`v1/structured_output/utils.py` applies them. One of four libraries makes them."""
