"""Elective errors: what survives when something fails in the middle of a step.

A step computes tokens of many requests, and a user's function, the device or Ctrl-C can end it at
any line. Blocks may then have no owner, and tokens may count as computed that are not. So an engine
needs a rule, which depends on what the error is about:

    one row        a logits processor or a grammar raises an error
    request 0      0.0  0.0  0.0    0.0    0.0   goes on
    request 1      1.0  1.0  error               ends: row and blocks are free

    the whole step the device fails, or Ctrl-C: slots may have any content
    request 0      0.0  0.0  error  again  0.0   waits, and is computed again
    request 1      1.0  1.0  error  again  1.0   waits, and is computed again

Tokens that are known are right in both cases, so nothing else has to be saved.
"""

from contextlib import suppress
from typing import Any

from lessons.lesson import make_llm
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm import SamplingParams
from nanovllm.engine.request import Request
from nanovllm.features.sampling.logit_rules.row_rules import RulesBatch

PROMPTS = ["What is 12 + 30?\n", "Sort 42, 7, 99\n"]
STEP = 3  # the step that fails, which samples the third token


def processor(output_ids: list[int], logits: Any) -> Any:
    if len(output_ids) == STEP - 1:
        raise ValueError("the logits processor fails")
    return logits


PLAIN = [SamplingParams(temperature=0, max_tokens=5)] * 2
PARAMS = [PLAIN[0], SamplingParams(temperature=0, max_tokens=5, logits_processors=[processor])]


def fail(plan: Any) -> Any:
    raise RuntimeError("the device fails")


def state_of(request: Request) -> str:
    seq = request.seqs[0]
    if request.ended:
        return f"{seq.finish_reason}, with {seq.num_output} tokens"
    where = f"row {seq.row}" if seq.row >= 0 else "waits"
    blocks = " ".join(map(str, seq.block_table))
    return f"{where}, {seq.num_output} tokens, {seq.num_computed} computed, in {blocks or 'none'}"


def steps(device_fails: bool) -> list[tuple[str, ...]]:
    """Run two requests -> what each of them has after each step."""
    engine = make_llm(attention_backend="sdpa", block_size=4, num_kv_cache_blocks=16).engine
    runner: Any = engine.runner
    right, rows = runner.run, list[tuple[str, ...]]()
    params = PLAIN if device_fails else PARAMS
    requests = [engine.submit(*pair) for pair in zip(PROMPTS, params, strict=True)]
    while not all(request.ended for request in requests):
        runner.run = fail if device_fails and len(rows) == STEP - 1 else right
        with suppress(RuntimeError):  # whoever calls `run_step` decides whether to go on
            engine.run_step()
        rows.append((str(len(rows) + 1), *map(state_of, requests)))
    return rows


def run() -> None:
    QUESTIONS.show(1)
    head = ("after step", "request 0", "request 1")
    say(f"""Two requests for 5 tokens: their rows, output tokens, computed tokens, and the blocks of
        4 slots that hold them. Request 1 has a logits processor that raises an error in step
        {STEP}. The runner catches it, and returns it in place of the token. The request ends at
        once, and the other one has lost nothing:""")
    show_table(head, steps(device_fails=False))
    QUESTIONS.show(2)
    say(f"""The same two requests, without the processor, on a device that fails in step {STEP}. The
        engine cannot know which slots were written. It frees all rows and all blocks, clears the
        prefix cache, and queues the requests with the tokens that they had. Then it raises the
        error. Whoever calls `run_step` again goes on, as after a preemption (lesson 9a):""")
    show_table(head, steps(device_fails=True))
    llm, texts = make_llm(attention_backend="sdpa", num_kv_cache_blocks=16), ["", ""]
    with suppress(ValueError):  # the processor's error, which the call raises
        for part in llm.stream(PROMPTS, PARAMS):
            texts[part.request_index] += part.text
    say(f"""A stream of both requests in one call first gives the text that is right, {texts[0]!r}
        and {texts[1]!r}, and then raises the processor's error. The call has ended, so request 0 is
        aborted too; in a call of its own it would go on. `step` raises nothing for one request: it
        returns the output with the finish reason "error", and logs the error.""")
    show_source(
        link(RulesBatch._apply_on_host, "except Exception"),
        link("engine.scheduler.Scheduler.commit", 'else "error"'),
        link("engine.recovery.revert_in_flight", "block_manager.revert"),
        link("llm.LLM._stream", "raise progress.error"),
    )
    say("What to do: read `engine/recovery.py`.")


QUESTIONS = Questions("""
    Request 1 fails when its third token is sampled, in a step that also computes request 0. How
    many tokens does the engine compute again for request 0?
    Answer: 0. Its keys and values are in its own blocks, and its token is drawn from its own row.
    Hint: Which slots and which logits does request 0 read?

    Now the device fails in step 3, and no row samples a token. Both prompts have 10 tokens. How
    many tokens does step 4 compute for each request?
    Answer: 12. The first two steps have sampled 2 tokens. All 12 are known, and none is in a block.
    Hint: Which tokens are known, and for which may the engine trust the keys and values?
""")


IN_VLLM = """The engine core stops if a step fails: `EngineDeadError` in `v1/engine/exceptions.py`.
No request is queued again."""
