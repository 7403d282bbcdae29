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
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sampling import Sampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.models import sampler
from nanovllm.models.qwen3 import Qwen3
from nanovllm.outputs import RequestOutput
from nanovllm.plan import StepPlan
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.rows import Rows

PROMPT = "What is 12 + 30?\n"


def watch(owner: Any, name: str, see: Callable[[Any], None]) -> None:
    """Let the method `name` of an object also pass its results to `see`."""
    method = getattr(owner, name)

    def watched(*args: Any) -> Any:
        result = method(*args)
        see(result)
        return result

    setattr(owner, name, watched)


def follow(llm: LLM, prompt: str) -> tuple[dict[str, list[Any]], RequestOutput]:
    """Run a prompt -> the objects of its steps by kind, in order, and its output."""
    engine, runner = llm.engine, runner_of(llm)
    seen: dict[str, list[Any]] = {name: [] for name in ("plan", "batch", "logits", "output")}
    watch(engine.scheduler, "schedule", lambda step: seen["plan"].append(step.plan))
    watch(runner.rows, "build", lambda step: seen["batch"].append(step.forward_batch))
    watch(runner.fused_model, "logits", seen["logits"].append)
    watch(runner, "run", lambda get_output: seen["output"].append(get_output()))
    request = engine.submit(prompt, SamplingParams(temperature=0))
    sequence = request.samples[0].seq
    seen["sequence"] = [
        ("token_ids: the prompt, later also the output", f"{len(sequence.token_ids)} ids"),
        ("num_computed: how many of them the cache has", sequence.num_computed),
        ("block_table: its blocks of the cache", sequence.block_table),
        ("status: in the queue of the scheduler", sequence.status.name),
    ]
    for _ in engine.run([request]):
        pass
    return seen, request.output


def plan_fields(plan: StepPlan) -> list[tuple[str, object]]:
    rows = [f"row {new.row} with blocks {new.block_table}" for new in plan.new_rows]
    chunks = [f"row {c.row}, {len(c.token_ids)} tokens from {c.start}" for c in plan.chunks]
    return [
        ("new_rows: sequences that get a row, a place in the batch", ", ".join(rows)),
        ("chunks: known tokens to compute", ", ".join(chunks)),
        ("decode_rows: rows that compute the token they sampled last", plan.decode_rows or "none"),
        ("num_tokens: computed by this step", plan.num_tokens),
    ]


def run() -> None:
    llm = make_llm(attention_backend="sdpa", num_kv_cache_blocks=64)
    vocab_size = llm.engine.input_processor.vocab_size
    seen, output = follow(llm, PROMPT)
    ids = output.prompt_token_ids

    def text_of(*tokens: int) -> str:
        return str(llm.get_tokenizer().decode(list(tokens)))

    say(f"""1. The text is {PROMPT!r}. A model does not read characters. It reads tokens, which are
        words or parts of words, by their number in a vocabulary of {vocab_size:,}.""")
    say("2. The token ids:")
    texts = [repr(text_of(token)) for token in ids]
    show_table(("position", *map(str, range(len(ids)))), [("text", *texts), ("id", *ids)])
    show_source(link(InputProcessor.encode, "tokenizer.encode"))
    say("""3. The Sequence has the tokens, and says how far the engine has got with them. It waits
        in a queue until a step has room for it:""")
    show_table(("field", "value"), seen["sequence"])
    show_source(
        link(InputProcessor.check, "seq = Sequence("), link(LLMEngine._add, "scheduler.add")
    )
    say("""4. The StepPlan says what one step computes, in plain numbers. This is the plan of the
        first step:""")
    show_table(("field", "value"), plan_fields(seen["plan"][0]))
    show_source(link(Scheduler.schedule, "plan := StepPlan()"))
    QUESTIONS.show(1)
    say("""5. The ForwardBatch is the plan as tensors. Each token has a slot, the place of its key
        and value in the cache: slot = block * 16 + offset. Block 0 belongs to no sequence, so the
        first one is block 1:""")
    batch = seen["batch"][0]
    for name in ("input_ids", "positions", "slot_mapping", "context_lens"):
        print(f"  {name:12}  {getattr(batch, name).tolist()}")
    print()
    show_source(link(Rows.build, "ForwardBatch("))
    logits = seen["logits"][0]
    say(f"""6. The logits are the result of the model: a number for each token of the vocabulary.
        The larger it is, the more likely this token comes next. They have the shape
        {list(logits.shape)}, which is one row. The three largest:""")
    best = logits[0].topk(3).indices.tolist()
    rows = [(repr(text_of(token)), token, f"{float(logits[0, token]):.2f}") for token in best]
    show_table(("text", "id", "logit"), rows)
    show_source(link(ModelRunner._run_step, "fused_model.forward"), link(Qwen3.logits))
    QUESTIONS.show(2)
    say(f"""7. The StepOutput has the tokens that the sampler took, one for each sequence:
        {seen["output"][0].token_ids}. With temperature=0 it is the token with the largest logit.
        The commit appends it to the Sequence.""")
    show_source(link(sampler.sample), link(Scheduler.commit, "token_ids.append"))
    say("The next steps make objects 4 to 7 again. Each computes the token before it:")
    table, text = list[tuple[object, ...]](), ""
    for plan, result in zip(seen["plan"], seen["output"], strict=True):
        work = "decode of row 0" if plan.decode_rows == [0] else f"{plan.num_tokens} tokens"
        text += text_of(*result.token_ids)
        table.append((len(table) + 1, work, result.token_ids[0], repr(text)))
    show_table(("step", "plan", "token", "text so far"), table)
    completion = output.outputs[0]
    say(f"""8. The last token means "end of text", so the request has ended. Its text is
        {completion.text!r}, and finish_reason is {completion.finish_reason!r}.""")
    show_source(link(Scheduler.finish_if_complete), link(Sampling.completion, "text ="))
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
    row, and not 10?
    (a) Logits are large, so only some of the rows are kept.
    (b) Only the last token has a next token that is not known yet.
    (c) The other tokens are in the cache.
    Answer: b. What follows the other tokens is known: it is the prompt. So the last product, with
    the whole vocabulary, is computed for one token only.
    Hint: Which token of the prompt is followed by a token that the engine has to find?
""")
