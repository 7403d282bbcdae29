"""Lesson 1a: one request, from text to text.

`LLM.generate` takes a text (1) and returns a text (8). In between the engine makes six objects,
each from the one before it. vLLM has the same ones, under other names (docs/vllm-map.md). This
lesson runs one prompt and prints each object once.

    1 text --> 2 token ids          encoded, once
    3 Sequence     <-- commit --+   the tokens, queued
    4 StepPlan                  |   which tokens a step computes
    5 ForwardBatch              |   the same as tensors
    6 logits                    |   from the model: likely tokens
    7 StepOutput     -----------+   from the sampler: the next token
    8 text                          when the request has ended
"""

from typing import Any

import torch

from lessons.lesson import Counters, ask, make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams

PROMPT = "What is 12 + 30?\n"


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64, enable_prefix_caching=False)
    engine = llm.engine
    runner = runner_of(llm)
    decode = llm.get_tokenizer().decode
    engine.observer = counters = Counters(llm)
    [completion] = ask(llm, [PROMPT])[0].outputs  # all steps; below, the first one by hand
    ids = llm.get_tokenizer().encode(PROMPT)
    say(f"""1. The text is {PROMPT!r}. 2. A model reads tokens, which are words or parts of words,
        by their number in a vocabulary of {engine.input_processor.vocab_size:,}. The ids:""")
    texts = [repr(decode([token])) for token in ids]
    show_table(("position", *map(str, range(len(ids)))), [("text", *texts), ("id", *ids)])
    say(f"""3. The Sequence has the tokens. num_computed counts those that are a part of a step,
        which has run or is only planned. (The cache keeps two vectors of each: lesson 3.) The cache
        is divided into blocks of {engine.scheduler.block_manager.block_size} places; block_table
        lists the blocks of the Sequence. It waits for its first step, so it has none:""")
    request = engine.submit(PROMPT, SamplingParams(temperature=0))
    seq = request.samples[0].seq
    names = ("token_ids", "num_computed", "block_table", "status")
    show_table(("field", "value"), [(name, str(getattr(seq, name))) for name in names])
    step: Any = engine.scheduler.schedule()
    plan = step.plan
    [new] = step.plan.new_rows
    [chunk] = step.plan.chunks
    say(f"""4. The StepPlan says what one step computes, in plain numbers. A row is a place in the
        batch. A chunk is a part of a prompt. decode_rows are rows that go on after their prompt.
        The plan of the first step:

            new_rows      row {new.row}, with the blocks {new.block_table}
            chunks        of row {chunk.row}, from position {chunk.start}: {chunk.token_ids}
            decode_rows   {plan.decode_rows}""")
    QUESTIONS.show(1)
    [block] = new.block_table
    say(f"""5. The ForwardBatch is the plan as tensors. slot_mapping has the slot of each token, the
        place of its key and value in the cache. Block {block} has the places from {block} * 16 on,
        so position 3 is at {block} * 16 + 3 = {block * 16 + 3}. (Block 0 belongs to no sequence.)
        context_lens counts the tokens that the sequence has in the cache after the step:""")
    output = runner.run(plan)()
    batch = runner.rows.build(plan).forward_batch  # as `run` has made it
    names = ("input_ids", "positions", "slot_mapping", "context_lens")
    show_table(("tensor", "value"), [(name, str(getattr(batch, name).tolist())) for name in names])
    with torch.inference_mode():
        runner.attention.prepare(batch)
        logits = runner.model.logits(runner.model.forward(batch, runner.attention)[-1:])
    say(f"""6. The logits are a number for each token of the vocabulary. The larger it is, the more
        likely this token comes next. Their shape is {list(logits.shape)}. The largest,
        {logits.max():.2f}, is of {decode(logits.argmax())!r}.""")
    QUESTIONS.show(2)
    say(f"""7. The StepOutput has the sampled token {output.token_ids}, here with the largest logit.
        The commit appends it to the Sequence. Each step makes objects 4 to 7 again:""")
    ids = completion.token_ids
    rows = [(i, n, ids[i - 1], repr(decode(ids[:i]))) for i, n in enumerate(counters.tokens, 1)]
    show_table(("step", "tokens computed", "token", "text so far"), rows)
    say(f"""8. The last token means "end of text", so the request has ended. Its text is
        {completion.text!r}. The lines that make the objects 2 to 8:""")
    show_source(
        link("engine.input_processor.InputProcessor.encode", "tokenizer.encode"),
        link("engine.input_processor.InputProcessor.check", "seq = Sequence("),
        link("engine.scheduler.Scheduler.plan_chunk", "step.plan.chunks.append"),
        link("runner.rows.Rows.build", "ForwardBatch("),
        link("models.qwen3.Qwen3.logits", "lm_head("),
        link("runner.model_runner.PendingOutput.wait", "StepOutput("),
        link("engine.sampling.Sampling.completion", ".add(self.text_ids(seq))"),
    )
    say("""What to do: run `python example.py --trace` and open the page that it writes
        (docs/trace.md explains it). Choose a step. Find the text of a request so far, the
        tokens that the step computes (4), and the token that it samples (7). Blocks have only 4
        places there. Lessons 6 and 8 explain the budget and prefix hits.""")


QUESTIONS = Questions("""
    The first step computes all 10 tokens of the prompt. How many does the second step compute?
    Answer: 1. The keys and values of the prompt are in the cache. Only the token that the first
    step sampled is new.
    Hint: Which tokens of the sequence have not been computed when the second step is planned?

    The model computes something for each of the 10 tokens of the prompt. Why do the logits have one
    row, and not 10?
    (a) Ten rows are too large, so nine are thrown away.
    (b) Only after the last token is the next one unknown.
    (c) The logits of the other tokens are in the cache.
    Answer: b. The prompt says what follows the other tokens.
    Hint: Which token of the prompt is followed by a token that the engine has to find?
""")

IN_VLLM = """`EngineCore.step` in `v1/engine/core.py` is the loop of objects 4 to 7. The plan is a
`SchedulerOutput`, which has the number of tokens of each request. A row is an index in the
persistent batch, which the runner owns: `Rows` here, `InputBatch` in
`v1/worker/gpu_input_batch.py` there, where
`GPUModelRunner._prepare_inputs` in `v1/worker/gpu_model_runner.py` makes the tensors. (This is the
model runner V1; docs/vllm-map.md has V2 too.) By default texts and the loop are in two
processes."""
