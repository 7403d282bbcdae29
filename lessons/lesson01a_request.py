"""Lesson 1a: one request, from text to text.

`LLM.generate` takes a text and returns a text. In between, the engine makes eight objects, each
from the one before it. If you know them, you can read any engine: vLLM has the same ones, under
other names (docs/vllm-map.md). This lesson runs one prompt and prints each object once.

    1 text --> 2 token ids --> 3 Sequence     encoded and queued, once
                                   |
        +--------------------> 4 StepPlan     which tokens, in which blocks
        |                          |
        |                   5 ForwardBatch    the same as tensors
        |                          |
        |                      6 logits       the model: a number for each token
        |                          |          of the vocabulary
        +------ commit ------ 7 StepOutput    the sampler: the next token
                                   |
                                8 text        when the request has ended

Objects 4 to 7 are made again in each step, until the request ends.
"""

from typing import Any

import torch

from lessons.lesson import Counters, ask, make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams

PROMPT = "What is 12 + 30?\n"


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64, enable_prefix_caching=False)
    engine, runner, decode = llm.engine, runner_of(llm), llm.get_tokenizer().decode
    engine.observer = counters = Counters(llm)
    [completion] = ask(llm, [PROMPT])[0].outputs  # all steps; below, the first one by hand
    say(f"""1. The text is {PROMPT!r}. 2. A model does not read characters. It reads tokens, which
        are words or parts of words, by their number in a vocabulary of
        {engine.input_processor.vocab_size:,}. The ids:""")
    ids = llm.get_tokenizer().encode(PROMPT)
    texts = [repr(decode([token])) for token in ids]
    show_table(("position", *map(str, range(len(ids)))), [("text", *texts), ("id", *ids)])
    say("""3. The Sequence has the tokens, and says how far the engine has got with them:
        num_computed tokens have their keys and values in the cache, in the blocks of block_table.
        It waits in a queue until a step has room for it:""")
    request = engine.submit(PROMPT, SamplingParams(temperature=0))
    seq, names = request.samples[0].seq, ("token_ids", "num_computed", "block_table", "status")
    show_table(("field", "value"), [(name, str(getattr(seq, name))) for name in names])
    say("""4. The StepPlan says what one step computes, in plain numbers. Row 0, a place in the
        batch, is new and has block 1. A chunk is a part of the known tokens. decode_rows are rows
        that compute the token that they sampled last. This is the plan of the first step:""")
    step: Any = engine.scheduler.schedule()
    plan, [new], [chunk] = step.plan, step.plan.new_rows, step.plan.chunks
    fields: dict[str, object] = {"new_rows": f"row {new.row} with blocks {new.block_table}"}
    fields["chunks"] = f"row {chunk.row}, {len(chunk.token_ids)} tokens from {chunk.start}"
    fields |= {"decode_rows": plan.decode_rows, "num_tokens": plan.num_tokens}
    show_table(("field", "value"), fields.items())
    QUESTIONS.show(1)
    say("""5. The ForwardBatch is the plan as tensors. Each token has a slot, the place of its key
        and value in the cache: slot = block * 16 + offset. Block 0 belongs to no sequence (lesson
        5), so the first one is block 1:""")
    output = runner.run(plan)()
    batch = runner.rows.build(plan).forward_batch  # as `run` has made it
    names = ("input_ids", "positions", "slot_mapping", "context_lens")
    show_table(("tensor", "value"), [(name, str(getattr(batch, name).tolist())) for name in names])
    with torch.inference_mode():
        runner.attention.prepare(batch)
        logits = runner.model.logits(runner.model.forward(batch, runner.attention)[-1:])
    say(f"""6. The logits are the result of the model: a number for each token of the vocabulary.
        The larger it is, the more likely this token comes next. They have the shape
        {list(logits.shape)}, which is one row. The three largest:""")
    best = [(repr(decode([i])), i, f"{logits[0, i]:.2f}") for i in logits[0].topk(3)[1].tolist()]
    show_table(("text", "id", "logit"), best)
    QUESTIONS.show(2)
    say(f"""7. The StepOutput has the tokens that the sampler took, one for each sequence:
        {output.token_ids}. With temperature=0 it is the token with the largest logit. The commit
        appends it to the Sequence. The next steps make objects 4 to 7 again:""")
    rows = []
    for i, computed in enumerate(counters.tokens, 1):
        tokens = completion.token_ids[:i]
        rows.append((i, computed, tokens[-1], repr(decode(tokens))))
    show_table(("step", "tokens computed", "token", "text so far"), rows)
    say(f"""8. The last token means "end of text", so the request has ended. Its text is
        {completion.text!r}, and finish_reason is {completion.finish_reason!r}. The lines that make
        the objects 2 to 8:""")
    show_source(
        link("engine.input_processor.InputProcessor.encode", "tokenizer.encode"),
        link("engine.input_processor.InputProcessor.check", "seq = Sequence("),
        link("engine.scheduler.Scheduler.schedule", "plan := StepPlan()"),
        link("runner.rows.Rows.build", "ForwardBatch("),
        link("models.qwen3.Qwen3.logits"),
        link("models.sampler.sample"),
        link("engine.sampling.Sampling.completion", "text ="),
    )
    say("""What to do: run `python example.py --trace`, open the page that it writes, and find
        objects 3, 4 and 7 of one step in it (docs/trace.md explains the page). The model was a
        black box here. Lesson 2 opens it.""")


QUESTIONS = Questions("""
    The prompt has 10 tokens, and the first step computes all of them. How many tokens does the
    second step compute?
    Answer: 1. The keys and values of the prompt are in the cache. Only the token that the first
    step sampled is new.
    Hint: Which tokens of the sequence have not been computed when the second step is planned?

    The model computes something for each of the 10 tokens of the prompt. Why do the logits have one
    row, and not 10? (a) Logits are large, so only some of the rows are kept. (b) Only the last
    token has a next token that is not known yet. (c) The other tokens are in the cache.
    Answer: b. What follows the other tokens is known: it is the prompt. So the last product, with
    the whole vocabulary, is computed for one token only.
    Hint: Which token of the prompt is followed by a token that the engine has to find?
""")
