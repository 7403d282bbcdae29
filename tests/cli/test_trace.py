"""Trace: events equal the engine's state; the table and the page equal them."""

import json
import math
import random
import re
import runpy
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chromium
import pytest
from fake_runner import FakeRunner, greedy

from nanovllm import LLM, BeamSearchParams, SamplingParams, Trace
from nanovllm.cli.trace import show as pages
from nanovllm.cli.trace.show import describe_changes, steps
from nanovllm.cli.trace.trace import Event, State
from nanovllm.config import SpeculativeConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import NO_OBSERVER
from nanovllm.features.sampling.ngram import NgramSpeculation


class CheckedTrace(Trace):
    """Compares what the events say with the engine after every event."""

    def __enter__(self) -> "CheckedTrace":
        self.before: dict[str, int | float] = {}
        super().__enter__()
        return self

    def _add(self, event: Event) -> None:
        super()._add(json.loads(json.dumps(event)))
        engine, state = self._engine, self._state
        scheduler, blocks = engine.scheduler, engine.scheduler.block_manager
        numbers, stats = self._numbers, engine.stats()
        self.before = self.before or stats
        assert [numbers[seq] for seq in scheduler.running] == state.running
        assert len(state.waiting) == len(scheduler.waiting)
        for counter, key in (("evictions", "evicted"), ("preemptions", "preempted")):
            count = sum(len(e.get(key, ())) for e in self.events)  # type: ignore[arg-type]
            assert count == stats[counter] - self.before[counter], counter
        assert state.cached == {block.block_id for block in blocks.hash_to_block.values()}
        on_host = getattr(blocks, "hash_to_host_block", {})
        assert state.host_cached == {block.block_id for block in on_host.values()}
        shared = sum(block.ref_count > 1 for block in blocks.blocks)
        assert state.pool(blocks.num_blocks) == (len(blocks.free), len(blocks.evictable), shared)
        for seq, number in numbers.items():
            said = state.seqs[number]
            assert said.tokens == seq.token_ids
            assert said.table == seq.block_table
            if number in state.running:
                assert said.computed == seq.num_computed


def replay(trace: Trace) -> State:
    state = State()
    for event in json.loads(json.dumps(trace.events)):
        state.apply(event)
    return state


@pytest.fixture
def small(make, monkeypatch) -> Callable[[bool], LLM]:
    """A function that makes an engine on the fake runner, with small pools."""
    monkeypatch.setattr(FakeRunner, "num_blocks", 12)
    monkeypatch.setattr(FakeRunner, "host_pool", SimpleNamespace(num_blocks=4))
    return partial(make, swap_space=1, max_num_batched_tokens=9, max_num_seqs=5)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(small, request) -> LLM:
    return small(request.param)


PROMPTS = [[0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 2], [1] * 11, [0, 1, 2, 0, 1, 2], [2]]


def drive(engine: LLMEngine, rng: random.Random) -> None:
    """Random additions, aborts and resets between the steps of an engine."""
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 11)]
            engine.add_request(
                prompt, greedy(max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 3]))
            )
        if rng.random() < 0.1 and engine.requests:
            engine.abort_request(rng.choice(list(engine.requests)))
        if rng.random() < 0.03:
            engine.reset_prefix_cache()
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()


def test_events_equal_the_engine(llm: LLM) -> None:
    """The traces begin in the middle of a run, perhaps with a step in flight."""
    engine, kinds = llm.engine, set[str]()
    for seed in range(8):
        for prompt in PROMPTS[:3]:
            engine.add_request(prompt, greedy(max_tokens=5))
        engine.step()
        with CheckedTrace(engine) as trace:
            drive(engine, random.Random(seed))
        kinds |= {key for event in trace.events for key in event}
        plans = [event["plan"] for event in trace.events if "plan" in event]
        assert plans == list(range(1, trace.num_steps + 1))
        assert replay(trace) == trace._state
        assert len(str(trace).splitlines()) > trace.num_steps
    others = {"failed", "dropped", "likely", "states_read", "states_saved"}
    others |= {"scores", "results", "drafts"}
    assert kinds | others == set(Event.__annotations__)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_accepted_and_wrong_drafts(make, asynchronous: bool) -> None:
    llm = make(asynchronous, speculative_config={"prompt_lookup_min": 1}, num_kv_cache_blocks=40)
    with CheckedTrace(llm) as trace:
        llm.generate(PROMPTS, greedy(max_tokens=30), use_tqdm=False)
    drafts = [entry for event in trace.events for entry in event.get("drafts", ())]
    stats = llm.stats()
    assert sum(drafted for _, drafted, _ in drafts) == stats["drafted_tokens"]
    accepted = sum(accepted for *_, accepted in drafts)
    assert 0 < accepted < stats["drafted_tokens"]
    assert stats["accepted_tokens"] - accepted in range(len(PROMPTS) + 1)  # the last is an end
    table = str(trace)
    assert "Drafts: 1 of 2 drafts of request" in table
    assert max(map(len, table.splitlines())) <= 100


def test_a_plan_comes_before_the_commit_of_the_step_before(llm: LLM) -> None:
    with CheckedTrace(llm) as trace:
        outs = llm.generate(PROMPTS, greedy(max_tokens=4), use_tqdm=False)
    order = [(k, event[k]) for event in trace.events for k in ("plan", "commit") if k in event]  # type: ignore[literal-required]
    delay = llm.engine.async_scheduling
    assert order[: 3 + delay] == (
        [("plan", 1), ("plan", 2), ("commit", 1), ("plan", 3)]
        if delay
        else [("plan", 1), ("commit", 1), ("plan", 2)]
    )
    tokens = [seq.tokens[seq.num_prompt :] for seq in replay(trace).seqs]
    assert tokens == [out["token_ids"] for out in outs]


# ---- the table ----


def test_the_table(embedded_run: Trace) -> None:
    lines = str(embedded_run).splitlines()
    assert max(map(len, lines)) <= 100
    assert "slot of a position = block_table[position // 4] * 4 + position % 4" in lines
    head = next(line for line in lines if line.startswith("step"))
    at = {name: head.index(name) for name in ("computes", "slots", "block table", "token")}
    checked = 0
    for line in lines[lines.index(head) + 1 :]:
        computes = line[at["computes"] : at["slots"]].split()
        if len(computes) != 2 or computes[0] not in ("prompt", "decode", "again"):
            continue
        table = line[at["block table"] : at["token"]].split()
        first, last = map(int, (computes[1].split("-") * 2)[:2])
        slots = re.findall(r"(\d+)(?:-(\d+))?", line[at["slots"] : at["block table"]])
        if "..." in line[: at["token"]] or not slots:
            continue
        written = [s for a, b in slots for s in range(int(a), int(b or a) + 1)]
        assert written == [int(table[p // 4]) * 4 + p % 4 for p in range(first, last + 1)]
        checked += 1
    assert checked > 20
    text = " ".join(" ".join(lines).split())
    assert "from the head of the queue (first come first served)." in text
    assert "Prefix hit: positions 0-7 of request 3 are cached (blocks 1, 2)." in text
    assert (
        "Preemption: request 5 returns to the head of the queue, because no block was available"
        in text
    )


def kinds(trace: Trace) -> list[dict[int, str]]:
    """What each step computes for each sequence, from the positions that the steps before it had.

    The trace must begin on an idle engine, and no step of it may fail.
    """
    state, reached, before, steps = State(), dict[int, int](), dict[int, int](), []
    for event in trace.events:
        state.apply(event)
        if "plan" in event:
            work = event["chunks"] + [[n, state.seqs[n].computed - 1, 1] for n in state.decodes]
            steps.append({})
            for n, start, count in work:
                output = "prompt" if start < state.seqs[n].num_prompt else "decode"
                steps[-1][n] = "again" if start < reached.get(n, 0) else output
                before[n] = reached.get(n, 0)
                reached[n] = max(before[n], start + count)
        for n, drafted, accepted in event.get("drafts", ()):
            reached[n] = max(before[n], reached[n] - drafted + accepted)
    return steps


@pytest.fixture(scope="session")
def beam_run() -> tuple[Trace, list]:
    """Two beam searches, and their outputs."""
    llm = LLM(block_size=4, num_kv_cache_blocks=64, dtype="float32")
    with CheckedTrace(llm) as trace:
        params = BeamSearchParams(4, 10)
        outputs = llm.beam_search(["How does ", "What is 12 + 30?\n"], params, use_tqdm=False)
    return trace, [sequence for output in outputs for sequence in output.sequences]


def test_the_results_of_a_beam_search_are_in_the_trace(beam_run: tuple[Trace, list]) -> None:
    trace, sequences = beam_run
    state, found = State(), []
    for event in trace.events:
        for i, token, score, reason in event.get("results", ()):  # after the beams before the event
            tokens = [*state.seqs[i].tokens, token]
            length = len(tokens) - state.seqs[i].num_prompt
            found.append((tokens[: None if reason == "length" else -1], round(score * length, 2)))
        state.apply(event)
        for i, _ in event.get(
            "scores", ()
        ):  # the best first, and a fork is no better than its parent
            seq = state.seqs[i]
            assert seq.parent < 0 or (seq.score or 0) <= 0
        listed = [state.seqs[i].score for i, _ in event.get("scores", ())]
        assert all(score is not None for score in listed)
    for sequence in sequences:
        assert (sequence.tokens, round(sequence.cum_logprob, 2)) in found
    assert {sequence.finish_reason for sequence in sequences} == {"stop", "length"}


def test_a_beam_without_a_candidate_is_dropped(beam_run: tuple[Trace, list]) -> None:
    trace, _ = beam_run
    ended = {i: reason for event in trace.events for i, reason, _ in event.get("finished", ())}
    names = [seq.name for seq in trace._state.seqs]
    dropped = {names[i] for i, reason in ended.items() if reason == "dropped"}
    text = " ".join(str(trace).split())
    said = re.findall(r"Dropped: no candidate of (.*?) is among the best\.", text)
    assert {name for part in said for name in re.findall(r"\d\.\d+", part)} == dropped != set()
    assert "abort" not in text
    last_lines = re.findall(r"End: the search of (.*?) ends", text)
    left = {name for part in last_lines for name in re.findall(r"\d\.\d+", part)}
    assert left == set(names) - dropped


def printed_kinds(trace: Trace) -> list[dict[int, str]]:
    names = {seq.name: n for n, seq in enumerate(trace._state.seqs)}
    steps: list[dict[int, str]] = [{} for _ in range(trace.num_steps)]
    lines, number = str(trace).splitlines(), 0
    for line in lines[next(i for i, line in enumerate(lines) if line.startswith("step")) + 1 :]:
        number = int(line[:4].strip() or number)
        row = re.match(r".{24}(\S+) +(prompt|decode|again) \d", line)
        if row is not None:
            steps[number - 1][names[row[1]]] = row[2]
    return steps


def test_what_is_computed_again(llm: LLM) -> None:
    """Generated tokens, too, are never called a prompt."""
    resumed_after_prompt = False
    for seed in range(8):
        with CheckedTrace(llm) as trace:
            drive(llm.engine, random.Random(seed))
        assert printed_kinds(trace) == kinds(trace)
        seqs, chunks = trace._state.seqs, [c for e in trace.events for c in e.get("chunks", ())]
        resumed_after_prompt |= any(start >= seqs[n].num_prompt for n, start, _ in chunks)
    assert resumed_after_prompt
    # A prompt that is preempted a second time before it is where it was the first time.
    state = State()
    state.apply({"new": [("0", 20, [1] * 20, 0, -1)], "running": [0]})
    for count in (12, 4):
        state.apply({"plan": 1, "chunks": [[0, 0, count]]})
        state.apply({"preempted": [0]})
    kinds_at = [state.seqs[0].kind(start) for start in (4, 11, 12, 19)]
    assert kinds_at == ["again", "again", "prompt", "prompt"]


@pytest.fixture(scope="session")
def embedded_run() -> Trace:
    """Six requests, a shared prefix, evictions and a preemption."""
    llm = LLM(block_size=4, num_kv_cache_blocks=22, max_num_batched_tokens=16, dtype="float32")
    prompts = ["What is 12 + 30?\n", "What is 12 + 7?\n", "Sort 4, 7, 9, 23, 42.\n"]
    prompts += ["What is 12 + 30?\n", "Count from 1 to 9\n", "Spell garden\n"]
    one = SamplingParams(temperature=0, max_tokens=30)
    params = [one, SamplingParams(temperature=0, max_tokens=30, logprobs=3), *[one] * 4]
    with CheckedTrace(llm) as trace:
        llm.generate(prompts, params, use_tqdm=False)
    return trace


@pytest.mark.slow
def test_the_example_prints_a_trace(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("sys.argv", ["example.py", "--trace"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parents[2] / "example.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "Prefix hit: positions 0-3 of request 1 are cached (block 1)." in text
    *table, last_line = text.splitlines()
    assert max(map(len, table)) <= 100
    assert last_line == f"The same as a page for a browser: {(tmp_path / 'trace.html').as_uri()}"
    assert page_data((tmp_path / "trace.html").read_text())["events"]


def test_sentences_say_what_happened() -> None:
    """A preemption says whether it took the last admitted, which a faulty scheduler may not do."""
    state = State()
    state.apply({"new": [(str(i), 4, [1] * 4, 0, -1) for i in range(14)], "running": [0, 1, 2]})
    for preempted, running in ((2, [0, 1]), (0, [1])):
        event: Event = {"running": running, "preempted": [preempted], "waiting": [preempted, 5]}
        state.apply(event)
        (said,) = describe_changes(event, state, "", 4)
        after = "(admitted after it and still running: request 1)"
        reason = "and it was admitted last" if preempted == 2 else after
        assert said == (
            f"Preemption: request {preempted} returns to the head of the queue, because no block "
            f"was available {reason}."
        )
    event = {"plan": 1, "chunks": [], "why": "blocks", "waiting": list(range(3, 14))}
    state.apply(event)
    (said,) = describe_changes(event, state, "", 4)
    assert said == (
        "Waiting: request 3, request 4, request 5, request 6, request 7, request 8, request 9, "
        "request 10 and 3 more, because request 3 needs more blocks than remain after reserving "
        "one for each running sequence."
    )


def test_the_most_likely_tokens() -> None:
    """A trace has the probabilities of requests with logprobs, and no others."""
    llm = LLM(block_size=4, num_kv_cache_blocks=40, dtype="float32")
    params = [SamplingParams(temperature=1, seed=3, max_tokens=6, logprobs=k) for k in (3, 9, 0)]
    prompts = ["What is 12 + 30?\n", "Count from 1 to 9\n", "Spell garden\n", "Spell big\n"]
    with CheckedTrace(llm) as trace:
        outs = llm.generate(
            prompts, [*params, SamplingParams(temperature=0, max_tokens=6)], use_tqdm=False
        )
    likely: list[list] = [[] for _ in prompts]
    for event in trace.events:
        for number, rank, pairs in event.get("likely", ()):
            likely[number].append((rank, pairs))
            assert {token for token, _ in pairs} <= trace.texts().keys()
    for entries, out in zip(likely, outs, strict=True):
        wanted = out.outputs[0].logprobs or []
        assert len(entries) == len(wanted)
        for (rank, pairs), logprobs in zip(entries, wanted, strict=True):
            own, *others = logprobs.items()
            assert rank == own[1].rank
            assert [token for token, _ in pairs] == [token for token, _ in (own, *others[:5])]
            expected = [math.exp(logprob.logprob) for _, logprob in (own, *others[:5])]
            assert [p for _, p in pairs] == pytest.approx(expected, rel=1e-3)


# ---- failures and bad input ----


@pytest.mark.parametrize("error", [RuntimeError("no device"), KeyboardInterrupt()])
def test_a_failed_run_leaves_a_trace(llm: LLM, error: BaseException, tmp_path) -> None:
    run, calls = llm.engine.runner.run, iter(range(100))

    def fails(plan):
        if next(calls) in (4, 9):
            raise error
        return run(plan)

    llm.engine.runner.run = fails
    trace = CheckedTrace(llm)
    with pytest.raises(type(error)), trace:
        llm.generate(PROMPTS, greedy(max_tokens=9), use_tqdm=False)
    assert trace.num_steps == 5
    failed = next(event for event in trace.events if "failed" in event)
    assert len(failed["preempted"]) >= 3
    text = " ".join(str(trace).split())
    assert f"Failure: the steps in flight were reverted. {type(error).__name__}" in text
    assert f"The trace ends with an error. {type(error).__name__}" in text
    trace.save(tmp_path / "trace.html")
    assert llm.engine.observer is NO_OBSERVER
    with CheckedTrace(llm) as again:
        with pytest.raises(type(error)):
            llm.generate(PROMPTS, greedy(max_tokens=9), use_tqdm=False)
        llm.generate(PROMPTS, greedy(max_tokens=3), use_tqdm=False)
    commits = [event["commit"] for event in again.events if "commit" in event]
    assert commits[-1] == again.num_steps - llm.engine.async_scheduling
    assert again.num_steps > 7


def test_bad_input(llm: LLM, tmp_path) -> None:
    for wrong in (5, None, LLM, llm.engine.runner):
        with pytest.raises(TypeError, match="a Trace records an LLM or its LLMEngine, not "):
            Trace(wrong)
    trace = Trace(llm)
    with pytest.raises(RuntimeError, match="the trace is empty; call llm.generate inside"):
        trace.save(tmp_path / "trace.html")
    with trace:
        with pytest.raises(RuntimeError, match="the engine has a Trace already; leave"), Trace(llm):
            pass
        llm.generate(PROMPTS[:2], greedy(max_tokens=3), use_tqdm=False)
    with pytest.raises(RuntimeError, match="has been used; create another"), trace:
        pass
    assert list(tmp_path.glob("trace*")) == []
    assert llm.generate(PROMPTS[0], greedy(max_tokens=3), use_tqdm=False)[0]["token_ids"]
    assert trace.num_steps <= 5, "a finished trace records nothing"


# ---- the page ----


def page_data(page: str) -> dict:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_the_page_has_the_trace(embedded_run: Trace, tmp_path) -> None:
    embedded_run.save(tmp_path / "trace.html")
    data = page_data((tmp_path / "trace.html").read_text())
    assert data["events"] == json.loads(json.dumps(embedded_run.events))
    assert data["options"]["num_blocks"] == 22
    tokenizer = embedded_run._engine.input_processor.tokenizer
    used = {token for seq in embedded_run._state.seqs for token in seq.tokens}
    entries = [entry for event in embedded_run.events for entry in event.get("likely", ())]
    used |= {token for *_, pairs in entries for token, _ in pairs}
    tokenizer = getattr(tokenizer, "full", tokenizer)
    assert data["texts"] == {str(token): tokenizer.decode([token]) for token in used}


class Tokenizer:
    """Each token is a piece of HTML that would break a page which does not escape it."""

    @property
    def backend_tokenizer(self) -> "Tokenizer":
        return self

    def id_to_token(self, token: int) -> str:
        return ""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ["</script><script>alert(1)</script>", "<!--<script>", "\u2028\"'&amp;\ud800"][
            ids[0]
        ]


def hostile_trace(llm: LLM) -> Trace:
    llm.engine.input_processor.tokenizer = Tokenizer()  # type: ignore[assignment]
    with Trace(llm) as trace:
        llm.engine.add_request(PROMPTS[0], greedy(max_tokens=9), "</script><b>&lt;id")
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    return trace


def test_tokens_are_escaped(llm: LLM) -> None:
    trace = hostile_trace(llm)
    assert "</script>" in str(trace)
    page = pages.page(trace.options, trace.events, trace.texts())
    assert page.count("</script>") == 2
    assert "<b>" not in page
    assert page_data(page)["texts"]["0"] == "</script><script>alert(1)</script>"
    page.encode()  # a lone surrogate is escaped


# ---- the page in a browser ----

# Goes through all steps in the browser, and returns what they show.
PROBE = """(() => {
const errors = [];
window.addEventListener("error", event => errors.push(event.message));
const seen = [], text = node => node.textContent.trim();
const slot = node => [node.className, node.textContent];
for (let k = 1; k <= last; k++) {
  go(k);
  seen.push({
    position: text($("position")), words: text($("words")), counts: text($("counts")),
    rows: [...document.querySelectorAll("#requests tr[data-seq]")].map(row => [row.dataset,
      [...row.children].map(node => node.textContent), [...row.lastChild.children].map(text)]),
    kinds: [...document.querySelectorAll("#timeline td.here")].map(node => node.title),
    odds: [...document.querySelectorAll(".odds, .bars")].map(
      node => node.title || node.textContent),
    blocks: [...document.querySelectorAll("#pool .block")].map(node => [
      text(node.querySelector("b")), node.className,
      [...node.querySelectorAll(".slots span")].map(slot)]),
    hosts: [...document.querySelectorAll("#host-pool .block")].map(node => [
      ...[...node.querySelectorAll(".head > *")].map(text),
      [...node.querySelectorAll(".slots span")].map(text)]),
    moves: text($("moves")),
    nodes: [...document.querySelectorAll("#trees .node:not(.root)")].map(node => [
      node.className.trim(), ...[...node.querySelectorAll("b, span")].map(text)]),
  });
}
const jumps = [...$("kind").options].map(({ value }) => {
  $("kind").value = value;
  const found = [];
  for (go(1); cursor !== found[found.length - 1]; $("next-event").click()) found.push(cursor);
  return [value, found];
});
$("slider").value = 2; $("slider").dispatchEvent(new Event("input"));
const moves = [cursor];
for (const key of ["ArrowRight", "Home", "End"]) {
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  moves.push(cursor);
}
return JSON.stringify({ seen, moves, jumps, errors });
})()"""


@pytest.mark.skipif(not chromium.PATH, reason="no chromium on PATH")
@pytest.mark.slow
@pytest.mark.parametrize(
    "which", ["failed", "hostile", "random", "drafts", "chunk", "embedded", "beams"]
)
def test_the_browser_agrees_in_every_step(
    small, which: str, embedded_run: Trace, beam_run: tuple[Trace, list], tmp_path
) -> None:
    """Block tables, slots, tokens, queues and counts on the page are those of the trace."""
    llm = small(which != "drafts")
    if which in ("embedded", "beams"):
        trace = embedded_run if which == "embedded" else beam_run[0]
    elif which == "failed":
        calls, run = iter(range(100)), llm.engine.runner.run
        llm.engine.runner.run = lambda plan: run(plan) if next(calls) < 6 else 1 / 0
        with pytest.raises(ZeroDivisionError), Trace(llm) as trace:
            llm.generate(PROMPTS, greedy(max_tokens=9), use_tqdm=False)
    elif which == "hostile":
        trace = hostile_trace(llm)
    elif which == "chunk":  # the first step yields no token
        llm.engine.scheduler.token_budget = 4
        with Trace(llm) as trace:
            llm.generate(PROMPTS, greedy(max_tokens=9), use_tqdm=False)
        assert "receivers" not in trace.events[2]
    else:
        if which == "drafts":
            config = SpeculativeConfig(prompt_lookup_min=1)
            llm.engine.scheduler.speculation = NgramSpeculation(config, max_tokens=9)
        with Trace(llm) as trace:
            drive(llm.engine, random.Random(1))
        assert any("drafts" in event for event in trace.events) == (which == "drafts")
    trace.save(tmp_path / "trace.html")
    with chromium.open_page((tmp_path / "trace.html").as_uri()) as page:
        page.wait("document.readyState == 'complete' && typeof last == 'number'")
        found, last = json.loads(page.evaluate(PROBE)), trace.num_steps
    assert not found["errors"]
    assert found["moves"] == [2, 3, 1, last], "the slider and the keys"
    for kind, visited in found["jumps"]:
        wanted = [k for k, seen in enumerate(found["seen"], 1) if f"{kind}: " in seen["words"]]
        assert visited == [1] * (1 not in wanted) + wanted, kind

    state, size, texts = State(), trace.options["block_size"], trace.texts()
    contents: dict[int, tuple[int, int]] = {}  # block -> the sequence and the index of its content
    host: dict[int, tuple[int, int] | None] = {}

    def follow(event: Event) -> None:
        state.apply(event)
        for block in event.get("host_cached", ()):
            if block in host:
                del host[block]
            else:
                host[block] = None
        host.update({target: contents.get(block) for block, target in event.get("saved", ())})
        for n, keep, *blocks in event.get("tables", ()):
            contents.update({block: (n, keep + k) for k, block in enumerate(blocks)})

    def show(token: int) -> str:
        return texts[token].replace("\n", "⏎") if texts else f" {token}"

    nodes = Counter[tuple[str, str]]()  # of the beams that were kept, and of the results
    dropped = set[str]()
    groups = steps(trace.events)
    for event in next(groups):
        follow(event)
    expected = kinds(trace) if which != "failed" else [{}] * last
    for number, (group, seen) in enumerate(zip(groups, found["seen"], strict=True), 1):
        plan = group[0]
        follow(plan)
        for block, owner, tokens in seen["hosts"]:
            held = host.get(int(block))
            assert owner == (state.seqs[held[0]].name if held else "?" * (int(block) in host))
            if held and which != "hostile":
                known = state.seqs[held[0]].tokens[held[1] * size :][:size]
                assert tokens == [show(token).strip() or "␣" for token in known]
        for block, target in plan.get("saved", ()):
            assert f"block {block}↓ host{target}" in seen["moves"]
        free, cached, shared = state.pool(trace.options["num_blocks"])
        assert seen["position"] == f"Step {number} of {last}"
        numbers = [int(n) for n in re.findall(r"\d+", seen["counts"])][:4]
        assert numbers[1:] == [shared, cached, free]
        work = {n: (start, start + count) for n, start, count in plan["chunks"]}
        work |= {n: (state.seqs[n].computed - 1, state.seqs[n].computed) for n in state.decodes}
        is_small = len(trace._state.seqs) <= 12
        shown = {int(data["seq"]): (data, *rest) for data, *rest in seen["rows"]}
        assert set(shown) >= set(range(len(state.seqs)) if is_small else state.running)
        slots: dict[int, tuple[str, bool]] = {}  # slot -> its token, and whether it is written now
        for n, (data, row, arithmetic) in shown.items():
            seq, (begin, end) = state.seqs[n], work.get(n, (0, 0))
            assert row[0] == seq.name
            assert (int(data["known"]), int(data["computed"])) == (len(seq.tokens), seq.computed)
            assert data.get("table", "") == " ".join(map(str, seq.table))
            glyphs = [show(token) for token in seq.tokens]
            glyphs += ["?"] * (seq.computed - len(glyphs))  # they are not known yet
            stored = range(min(seq.computed, len(seq.table) * size))
            at = [seq.table[p // size] * size + p % size for p in stored]
            for p in stored:  # of which several sequences may share a slot
                is_now = begin <= p < end or slots.get(at[p], ("", False))[1]
                slots[at[p]] = glyphs[p].strip() or "␣", is_now
            written = [int(text.rpartition(" = ")[2]) for text in arithmetic]
            assert written == (list(dict.fromkeys((at[begin], at[end - 1]))) if end else [])
            if which != "hostile":
                assert row[1].startswith("".join(glyphs)) or row[1].startswith("… ")
            if n in expected[number - 1]:
                said = f"{expected[number - 1][n]}"
                assert row[2].startswith(f"{said} {begin}")
                assert any(f", {seq.name}: {said}, position" in title for title in seen["kinds"])
        for block, classes, content in seen["blocks"]:
            owned = {"owned"} & set(classes.split())
            assert owned == {"owned"} & {"owned" for seq in state.seqs if int(block) in seq.table}
            assert ("cached" in classes.split()) == (int(block) in state.cached)
            for slot, (style, token) in enumerate(content, int(block) * size):
                if owned and which != "hostile":
                    assert (token, "now" in style) == slots.get(slot, ("", False))
                elif not owned:
                    assert ("empty" in style) == ("cached" not in classes)
        for event in group[1:]:
            follow(event)
            if event.get("tokens"):
                assert f"Commit of step {event['commit']}: " in seen["words"]
            for n, reason, _ in event.get("finished", ()):
                said = f"request {state.seqs[n].name} finishes ({reason}"
                dropped |= {state.seqs[n].name} if reason == "dropped" else set()
                assert state.seqs[n].score is not None or said in seen["words"]
            if "failed" in event:
                assert "reverted. ZeroDivisionError" in seen["words"]
            if "commit" in event:
                nodes.update((state.seqs[i].name, f"{x:z.2f}") for i, x in event.get("scores", ()))
                nodes.update(("result", f"{x:z.2f}") for _, _, x, _ in event.get("results", ()))
        assert Counter((name, score) for _, _, name, score in seen["nodes"]) == nodes
        struck = {name for style, _, name, _ in seen["nodes"] if "B" in style.split()}
        assert struck == dropped
    if which == "hostile":
        assert "</script><script>alert(1)</script>" in found["seen"][-1]["words"]
    if which == "embedded":
        said = [seen["words"] for seen in found["seen"] if "Sampling: request 1" in seen["words"]]
        assert len(said) == len([e for e in trace.events if e.get("likely")]) > 3
        told = r'gets ".+" \(\d+ %, rank 1\); the most likely others are ".+" \(.* %\)'
        assert any(re.search(told, text) for text in said)
        assert any("the most likely others are" in text for text in found["seen"][-4]["odds"])
