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

from collections.abc import Callable
from typing import Any

from lessons.lesson import make_llm, runner_of
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams

PROMPT = "What is 12 + 30?\n"


def watch(owner: Any, name: str, see: Callable[[Any], Any]) -> list[Any]:
    """Return a list that gets `see(result)` of each later call of the method `name`."""
    seen, method = list[Any](), getattr(owner, name)

    def watched(*args: Any) -> Any:
        result = method(*args)
        seen.append(see(result))
        return result

    setattr(owner, name, watched)
    return seen


def follow(llm: LLM, prompt: str) -> tuple[Any, ...]:
    """Run a prompt -> fields of its Sequence, the four objects of each step, and its output."""
    engine, runner = llm.engine, runner_of(llm)
    plans = watch(engine.scheduler, "schedule", lambda step: step.plan)
    batches = watch(runner.rows, "build", lambda step: step.forward_batch)
    logits = watch(runner.fused_model, "logits", lambda logits: logits)
    outputs = watch(runner, "run", lambda get_output: get_output())
    request = engine.submit(prompt, SamplingParams(temperature=0))
    names = ("token_ids", "num_computed", "block_table", "status")
    sequence = [(name, str(getattr(request.samples[0].seq, name))) for name in names]
    for _ in engine.run([request]):
        pass
    return sequence, plans, batches, logits, outputs, request.output


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    decode, vocab_size = llm.get_tokenizer().decode, llm.engine.input_processor.vocab_size
    sequence, plans, batches, all_logits, outputs, output = follow(llm, PROMPT)
    ids, [completion] = output.prompt_token_ids, output.outputs
    say(f"""1. The text is {PROMPT!r}. 2. A model does not read characters. It reads tokens, which
        are words or parts of words, by their number in a vocabulary of {vocab_size:,}. The ids:""")
    texts = [repr(decode([token])) for token in ids]
    show_table(("position", *map(str, range(len(ids)))), [("text", *texts), ("id", *ids)])
    say("""3. The Sequence has the tokens, and says how far the engine has got with them:
        num_computed tokens have their keys and values in the cache, in the blocks of block_table.
        It waits in a queue until a step has room for it:""")
    show_table(("field", "value"), sequence)
    say("""4. The StepPlan says what one step computes, in plain numbers. Row 0, a place in the
        batch, is new and has block 1. A chunk is a part of the known tokens. decode_rows are rows
        that compute the token that they sampled last. This is the plan of the first step:""")
    [new], [chunk] = plans[0].new_rows, plans[0].chunks
    fields = {"new_rows": f"row {new.row} with blocks {new.block_table}"}
    fields["chunks"] = f"row {chunk.row}, {len(chunk.token_ids)} tokens from {chunk.start}"
    fields |= {"decode_rows": plans[0].decode_rows, "num_tokens": plans[0].num_tokens}
    show_table(("field", "value"), fields.items())
    QUESTIONS.show(1)
    say("""5. The ForwardBatch is the plan as tensors. Each token has a slot, the place of its key
        and value in the cache: slot = block * 16 + offset. Block 0 belongs to no sequence, so the
        first one is block 1:""")
    names = ("input_ids", "positions", "slot_mapping", "context_lens")
    show_table(("tensor", "value"), [(n, str(getattr(batches[0], n).tolist())) for n in names])
    logits = all_logits[0]
    say(f"""6. The logits are the result of the model: a number for each token of the vocabulary.
        The larger it is, the more likely this token comes next. They have the shape
        {list(logits.shape)}, which is one row. The three largest:""")
    best = [(repr(decode([i])), i, f"{logits[0, i]:.2f}") for i in logits[0].topk(3).indices]
    show_table(("text", "id", "logit"), [(text, int(i), logit) for text, i, logit in best])
    QUESTIONS.show(2)
    say(f"""7. The StepOutput has the tokens that the sampler took, one for each sequence:
        {outputs[0].token_ids}. With temperature=0 it is the token with the largest logit. The
        commit appends it to the Sequence. The next steps make objects 4 to 7 again:""")
    rows = []
    for i, step in enumerate(plans):
        work = "decode of row 0" if step.decode_rows else f"{step.num_tokens} tokens"
        rows.append(
            (i + 1, work, *outputs[i].token_ids, repr(decode(completion.token_ids[: i + 1])))
        )
    show_table(("step", "plan", "token", "text so far"), rows)
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
