"""Lesson 6a: continuous batching.

Lesson 4 says that a step of 16 rows takes hardly longer than a step of one, and lesson 5 has the
memory for them. So an engine computes the next tokens of several requests, a batch, in one step.
Each request of the batch has a row, and max_num_seqs is the number of rows. But requests do not
end together. A static batch runs until its last request has ended, and the rows of the others are
idle. With continuous batching a waiting request takes a row as soon as one is free. This is decided
in every step, so the paper calls it iteration-level scheduling (Orca, Yu et al., OSDI 2022).

             static batches    continuous batching
    row 0    A A . . C C C     A A C C C      a letter: a step; A takes 2
    row 1    B B B B D . .     B B B B D      .: the row is idle
"""

from collections.abc import Sequence
from functools import partial

from lessons.lesson import make_llm, runner_of, timed
from lessons.show import Questions, faster, link, say, show_source, show_table
from nanovllm import LLM, SamplingParams, Trace
from nanovllm.cli.trace.trace import State
from nanovllm.engine.scheduler import Scheduler
from nanovllm.loading.memory import num_weights

ROWS = 4  # max_num_seqs
# Plain torch: compiled kernels would change the figures.
OPTIONS = dict(attention_backend="sdpa", num_kv_cache_blocks=64, enable_prefix_caching=False)
LENGTHS = (2, 9, 3, 2, 8, 2, 3, 3)  # output tokens of the requests


def generate(llm: LLM, lengths: Sequence[int], group_size: int) -> list[list[int]]:
    """Run requests with these numbers of output tokens, `group_size` at a time -> their tokens.

    The next group is added when the previous group has finished.
    """
    prompts = [f"What is 12 + {i}?\n" for i in range(len(lengths))]
    tokens: list[list[int]] = []
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in lengths]
    for i in range(0, len(lengths), group_size):
        group = slice(i, i + group_size)
        outputs = llm.generate(prompts[group], params[group], use_tqdm=False)
        tokens += [output.outputs[0].token_ids for output in outputs]
    return tokens


def timeline(llm: LLM, lengths: Sequence[int], group_size: int) -> list[str]:
    """Return a line for each request with a column for each step: P is its prompt, D a decode."""
    state = State()
    columns: list[dict[int, str]] = []
    with Trace(llm) as trace:
        generate(llm, lengths, group_size)
    for event in trace.events:
        state.apply(event)
        if "plan" in event:
            columns.append({seq: "P" for seq, *_ in event["chunks"]})
            columns[-1] |= dict.fromkeys(state.decodes, "D")
    return ["".join(column.get(i, ".") for column in columns) for i in range(len(lengths))]


def count(lines: list[str]) -> tuple[int, int]:
    """Return the steps of a timeline, and the idle row-steps: rows that computed nothing."""
    steps = len(lines[0])
    return steps, ROWS * steps - sum(len(line) - line.count(".") for line in lines)


def show_timeline(name: str, lines: list[str]) -> None:
    steps = range(len(lines[0]))
    print(name)
    for i, line in enumerate(lines):
        print(f"  request {i}  {line}  {LENGTHS[i]} output tokens")
    in_use = "".join(str(sum(line[step] != "." for line in lines)) for step in steps)
    print(f"  rows used  {in_use}  of {ROWS}\n")


def run() -> None:
    llm = make_llm(**OPTIONS, max_num_seqs=ROWS)
    runner = runner_of(llm)
    weights = num_weights(runner.model) * runner.dtype.itemsize / 1e6
    say(f"""A decode step reads {weights:.0f} MB of weights and makes the same calls to torch's
        operators for the linear layers, whether it computes 1 row or {ROWS}. Only attention works
        on each row separately. Lesson 4 measures the cost of more rows.""")
    QUESTIONS.show(1, 2)
    say(f"""Eight requests and {ROWS} rows. P is a step that computes the prompt and samples the
        first token, D is a decode, and n output tokens take n steps.""")
    ways = (("static batches", ROWS), ("continuous batching", len(LENGTHS)))
    rows, runs = [], []
    for name, group_size in ways:
        lines = timeline(llm, LENGTHS, group_size)
        show_timeline(name, lines)
        runs.append(timed(partial(generate, llm, LENGTHS, group_size)))
        rows.append((name, *count(lines), f"{sum(LENGTHS) / runs[-1][1]:.0f}"))
    assert runs[0][0] == runs[1][0]
    say(f"""Both compute the same tokens. With continuous batching request 4 computes its prompt in
        the step after requests 0 and 3 end. {rows[0][1]} steps become {rows[1][1]}, and all
        requests together are {faster(runs[0][1], runs[1][1])}. Fewer steps do the same work, so
        each has more rows and takes a little longer: time shrinks less than the number of steps, as
        far as the timing of {len(LENGTHS)} short requests can show that.""")
    show_table(("", "steps", "idle row-steps", "tokens/s"), rows)
    show_source(
        link(Scheduler._admit, "self.max_num_seqs"), link(Scheduler.leave, "free_rows.append")
    )
    say("""On the ladder this is two rungs: static batches, and continuous batching. What a step
        computes of a long prompt is still missing for the plan that you will build: lesson
        6b.""")


QUESTIONS = Questions("""
    Four requests with 2, 9, 3 and 2 output tokens run in four rows, and a fifth one waits. When
    does it begin?
    (a) When the request with 9 tokens has ended, with both kinds of batching.
    (b) With a static batch, when the request with 9 tokens has ended; with continuous batching,
    after two steps.
    (c) After two steps, with both kinds of batching.
    Answer: b. A static batch runs until its longest request has ended, although two rows are idle
    from the third step on.
    Hint: Which rows are free after two steps, and who may take them?

    Eight requests have 5 output tokens each, and there are four rows. Why does continuous batching
    save no step here?
    (a) The requests are too short.
    (b) There are more requests than rows.
    (c) All rows become free in the same step, so no row is idle in static batches either.
    Answer: c. Continuous batching gains if the lengths of outputs differ, as in real requests.
    Hint: In which steps is a row of a static batch idle, if all its requests are equally long?
""")
