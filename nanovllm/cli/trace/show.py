"""Shows a trace as a table and as a page.

`table` and `page` take the options of the engine, the events, and the text of each token.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanovllm.cli.trace.events import Event, State

WIDTH = 100  # characters of a line of the table
ROW = "{:>4} {:>4} {:>6} {:>6} {:<8.8} {:<17} {:<14} {:<17} {}"
COLUMNS = (
    "step",
    "free",
    "cached",
    "shared",
    "request",
    "computes",
    "slots",
    "block table",
    "token",
)
# Why the first waiting sequence is not admitted, by the scheduler's word for the reason. {} is
# replaced by the name of the sequence.
WHY_WAITING = {
    "state": "{} waits for a state that this step computes",
    "budget": "the token budget is spent",
    "preempted": "a step that preempts admits nothing",
    "seqs": "max_num_seqs sequences run",
    "in flight": "a token of {} is in flight",
    "blocks": "{} needs more blocks than remain after reserving one for each running sequence",
}
INDENT = " " * 24  # Sentences below the rows of a step begin in the column "request".


def steps(events: list[Event]) -> Iterator[list[Event]]:
    """Yield the events before the first plan, then the events of each step, its plan first."""
    group: list[Event] = []
    for event in list(events):
        if "plan" in event:
            yield group
            group = []
        group.append(event)
    yield group


def page(options: dict[str, Any], events: list[Event], texts: dict[int, str]) -> str:
    """Return a page of HTML that needs no network."""
    state = State()
    words = []
    for event in events:
        state.apply(event)
        words.append(list(describe_changes(event, state, options["policy"], options["block_size"])))
    data = {"options": options, "texts": texts, "events": events, "words": words}
    # JSON is safe in a script element if it contains no "<".
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("TRACE_DATA", text)


def table(options: dict[str, Any], events: list[Event], texts: dict[int, str]) -> str:
    """Return a table with the rows of each step, and sentences about what changed."""
    state = State()
    size = options["block_size"]
    num_steps = sum("plan" in event for event in events)
    num_seqs = sum(len(event.get("new", ())) for event in events)
    indents: Any = {"initial_indent": INDENT, "subsequent_indent": INDENT + "  "}
    lines = [
        f"{plural(num_steps, 'step')} of {plural(num_seqs, 'sequence')}, "
        f"{options['policy']}, {plural(options['num_blocks'], 'block')} of {plural(size, 'token')}",
        f"at most {plural(options['max_num_batched_tokens'], 'token')} and "
        f"{plural(options['max_num_seqs'], 'sequence')} in a step",
        f"slot of a position = block_table[position // {size}] * {size} + position % {size}",
        "",
        table_row(COLUMNS),
    ]
    any_late = False
    for group in steps(events):
        step = [""] * 4
        rows: dict[int, list[str]] = {}
        sentences: list[str] = []
        for event in group:
            state.apply(event)
            if "plan" in event:
                step = [str(n) for n in (event["plan"], *state.pool(options["num_blocks"]))]
                rows = {number: ["nothing", "", "", ""] for number in state.running}
                for chunk in planned(event, state):
                    rows[chunk[0]] = describe_work(state, chunk, size)
            got: dict[int, list[str]] = {}
            for number, token in zip(state.receivers, event.get("tokens", ()), strict=False):
                text = repr(texts[token]) if token in texts else str(token)
                got.setdefault(number, []).append(text)
            for number, tokens in got.items():
                late = f"{event['commit']}: " if step[0] != str(event["commit"]) else ""
                any_late = any_late or bool(late)
                rows.setdefault(number, [""] * 4)[3] = late + " ".join(tokens)
            sentences += describe_changes(event, state, options["policy"], size)
        for number, row in rows.items():
            lines.append(table_row((*step, state.seqs[number].name, *row)))
            step = [""] * 4
        for sentence in sentences:
            lines += textwrap.wrap(sentence, WIDTH, **indents)
    lines[3:3] = ["1: 'x' in a later step is a token of step 1"] * any_late
    return "\n".join(lines)


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def join_names(names: list[str], max_names: int = 8) -> str:
    """Join names, of which a large trace can have hundreds."""
    if len(names) > max_names + 1:
        names = [*names[:max_names], f"{len(names) - max_names} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def block_list(blocks: list[int]) -> str:
    return f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"


def last_words(text: str, width: int) -> str:
    """Shorten a line at its beginning, because a step works on the last blocks and slots."""
    return textwrap.shorten(text[::-1], width, placeholder=" ...")[::-1]


def table_row(cells: Sequence[str]) -> str:
    """Join the cells of a line."""
    *start, slots, blocks, token = cells
    return ROW.format(*start, last_words(slots, 14), last_words(blocks, 17), token)[:WIDTH].rstrip()


def planned(plan: Event, state: State) -> list[list[int]]:
    """Return the chunks and the decodes of a plan: sequence, first position, number of tokens."""
    return plan["chunks"] + [[i, state.seqs[i].computed - 1, 1] for i in state.decodes]


def describe_work(state: State, chunk: list[int], size: int) -> list[str]:
    """Return four cells of the table for a chunk of `planned`.

    They are what it computes, its slots, its block table, and an empty cell for the token.
    """
    number, start, count = chunk
    seq = state.seqs[number]
    end = start + count
    kind = seq.kind(start)
    what = f"{kind} {start}" + f"-{end - 1}" * (kind != "decode" or count > 1)
    what = f"{kind}: nothing" if start == end else what
    # A faulty scheduler may plan positions without a block; see lessons/break_it.py.
    ranges: list[list[int]] = []
    for position in range(start, min(end, len(seq.table) * size)):
        slot = seq.table[position // size] * size + position % size
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1][1] = slot
        else:
            ranges.append([slot, slot])
    slots = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return [what, slots, " ".join(map(str, seq.table)), ""]


def describe_changes(event: Event, state: State, policy: str, size: int) -> Iterator[str]:
    """Yield a sentence for each change of an event, with the reason. `state` is after the event."""
    names = [f"request {seq.name}" for seq in state.seqs]
    for i in event.get("preempted", ()):
        why = "no block was available and it was admitted last"
        ran = state.ran_before
        later = ran[ran.index(i) + 1 :] if i in ran else []
        if still := [names[j] for j in later if j in state.running]:
            why = (
                f"no block was available (admitted after it and still running: {join_names(still)})"
            )
        if "failed" in event:
            why = "the step failed"
        yield f"Preemption: {names[i]} returns to the head of the queue, because {why}."
    for seq in state.seqs[len(state.seqs) - len(event.get("new", ())) :]:
        if seq.parent >= 0 and "commit" in event:
            yield f"Fork: request {seq.name} continues {names[seq.parent]}."
    admitted: dict[str, list[str]] = {}
    for i in event.get("new_rows", ()):
        is_head = state.seqs[i].lost or state.seqs[i].parent >= 0
        rule = "preempted sequences and forks come first" if is_head else policy
        admitted.setdefault(rule, []).append(names[i])
    for rule, admitted_names in admitted.items():
        yield f"Admission: {join_names(admitted_names)} from the head of the queue ({rule})."
    for i, start, count in event.get("chunks", ()):
        seq = state.seqs[i]
        left = len(seq.tokens) - start
        if i in event.get("new_rows", ()):
            if seq.parent >= 0 and not seq.lost and left == 1:
                if start < seq.num_prompt:
                    both = f"{names[i]} shares the prompt's blocks with {names[seq.parent]}"
                    yield f"Fork: {both} and computes only the last prompt token again."
            elif start:
                blocks = block_list(seq.table[: start // size])
                yield f"Prefix hit: positions 0-{start - 1} of {names[i]} are cached ({blocks})."
        if count < left:
            yield f"Token budget: {names[i]} computes {count} of its {left} uncomputed tokens."
    for source, i in event.get("states_read", ()):
        yield f"State: {names[i]} begins with a copy of state {source}."
    for i, num_tokens, slot in event.get("states_saved", ()):
        tokens = plural(num_tokens, "token")
        yield f"Snapshot: the state of {names[i]} after {tokens} is saved in slot {slot}."
    if copies := event.get("copies"):
        pairs = ", ".join(f"{source} to {target}" for source, target in copies)
        yield f"Copy-on-write: block {pairs}, because the block to write is shared or cached."
    if evicted := event.get("evicted"):
        yield f"Eviction: no block was free, so the prefix cache evicted {block_list(evicted)}."
    if host := event.get("host"):
        moves = [f"block {a} is saved to host block {b}" for a, b in event.get("saved", ())]
        moves += [f"block {b} is loaded from host block {a}" for a, b in event.get("loaded", ())]
        yield (
            f"Host memory: before the step computes, {', '.join(moves)}. It holds "
            f"{plural(host['host_blocks'], 'block')}. So far it has lost "
            f"{plural(host['host_evictions'], 'block')}, and "
            f"{plural(host['host_spared_tokens'], 'token')} did not have to be computed again."
        )
    if "why" in event:
        waiting = [names[i] for i in state.waiting]
        why = WHY_WAITING[event["why"]].format(waiting[0])
        yield f"Waiting: {join_names(waiting)}, because {why}."
    for i in event.get("dropped", ()):
        yield f"The token of {names[i]} is dropped, because the sequence had already ended."
    for i, drafted, accepted in event.get("drafts", ()):
        yield f"Drafts: {accepted} of {plural(drafted, 'draft')} of {names[i]} are accepted."
    yield from describe_beams(event, state)
    for i, reason, stop in event.get("finished", ()):
        if reason == "dropped" or (reason == "stop" and state.seqs[i].score is not None):
            continue  # a beam
        by = "" if stop is None else f" by {'token ' if isinstance(stop, int) else ''}{stop!r}"
        yield f"End: {names[i]} finishes ({reason}{by}) and releases its blocks."
    if "failed" in event:
        yield f"Failure: the steps in flight were reverted. {event['failed']}"
    if event.get("ended"):
        yield f"The trace ends with an error. {event['ended']}"


def describe_beams(event: Event, state: State) -> Iterator[str]:
    """Yield sentences about beam searches. The name of a beam is its request and a number."""
    names = [seq.name for seq in state.seqs]
    ended: dict[str, list[str]] = {"dropped": [], "stop": []}
    for i, reason, _ in event.get("finished", ()):
        if reason in ended and state.seqs[i].score is not None:
            ended[reason].append(names[i])
    if "commit" in event and (scores := event.get("scores")):
        yield f"Beams: {', '.join(f'{names[i]} ({score:z.2f})' for i, score in scores)} continue."
    if ended["dropped"]:
        yield f"Dropped: no candidate of {join_names(ended['dropped'])} is among the best."
    for i, _, score, reason in event.get("results", ()):
        yield f"Result: an output that begins like {names[i]} ends ({reason}, score {score:z.3f})."
    if ended["stop"]:
        yield f"End: the search of {join_names(ended['stop'])} ends and releases their blocks."
