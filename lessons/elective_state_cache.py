"""Elective state_cache: a prefix cache without positions.

KV can be cut at any token: a request that begins with the same 12 tokens uses the KV of these 12. A
state (`states`) cannot be cut. It is the result of all tokens so far, and the next one overwrites
it. The prefix cache therefore keeps snapshots, which are copies of the state after the last token
of a block. The hash of a block stands for all tokens up to its end (lesson 8), so it also finds the
snapshot. A match ends at the last block that has one:

    request 1   [ a b c d | e f g h | i j k l | m n o p | q ]  nothing is cached
    snapshots                                        16
    request 2   [ a b c d | e f g h | i j k l | r s t u | v ]  KV, no snapshot
    snapshots                              12        16
    request 3   [ a b c d | e f g h | i j k l | w x y z | q ]  KV and a snapshot

This lesson runs the engine's scheduler and block manager on the model of the random tests, whose
state is the list of all tokens that it has consumed. It stops if a row has consumed a wrong token.
"""

from typing import Any

from lessons.lesson import shape_of
from lessons.oracle.oracle import make_samples
from lessons.oracle.states import HybridRunner
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
from nanovllm.features.models.hybrid.state_blocks import StateBlockManager

ROWS, BUDGET, BLOCKS = 4, 128, 200
CHATS, TURNS, TURN, OUTPUT = 4, 5, 10, 6  # a turn adds TURN tokens, and the answer OUTPUT tokens
SLOTS = (0, 4, 8, 12, 40)


class Engine:
    """A scheduler with states, and the model of the random tests."""

    def __init__(self, slots: int, block_size: int = 4) -> None:
        """`slots` is the number of snapshots that fit."""
        num_states = ROWS + 1 + slots  # of rows, padding and snapshots
        self.blocks = StateBlockManager(BLOCKS, block_size, True, ROWS, num_states)
        self.scheduler = Scheduler(self.blocks, ROWS, BUDGET)
        self.runner = HybridRunner(BLOCKS, block_size, ROWS, num_states)
        self.arrivals = 0

    def add(self, prompt: list[int], num_output: int = 1) -> Sequence:
        [seq] = make_samples(prompt, len(prompt) + num_output, self.arrivals)
        self.arrivals += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, self.runner.run(step.plan))

    def run(self, prompt: list[int], num_output: int = 1) -> Sequence:
        """Run a request that is alone."""
        seq = self.add(prompt, num_output)
        while self.scheduler.has_work():
            self.step()
        return seq

    def snapshots(self) -> dict[int, int]:
        """Return the block of each snapshot -> how many tokens its state has consumed."""
        states, slots = self.runner.states, self.blocks.snapshots
        return {block: len(states[slot] or ()) for block, slot in slots.items()}


def numbers(values: list[int]) -> str:
    return ", ".join(map(str, sorted(values))) or "none"


def share(prompts: dict[str, list[int]]) -> list[tuple[Any, ...]]:
    """Run requests -> for each, the tokens with KV, those with a state too, and new snapshots."""
    engine, rows = Engine(slots=40), list[tuple[Any, ...]]()
    for name, prompt in prompts.items():
        old, [probe] = engine.snapshots(), make_samples(prompt, len(prompt) + 1)
        with_kv = len(BlockManager.match(engine.blocks, probe)) * engine.blocks.block_size
        found = engine.run(prompt).num_cached_tokens
        new = [tokens for block, tokens in engine.snapshots().items() if block not in old]
        rows.append((name, len(prompt), with_kv, found, len(prompt) - found, numbers(new)))
    return rows


def changes(engine: Engine, seq: Sequence) -> list[tuple[object, ...]]:
    """Run a request -> how many tokens are computed when the snapshots change, and these."""
    rows, shown = list[tuple[object, ...]](), ""
    while engine.scheduler.has_work():
        engine.step()
        kept = numbers([*engine.snapshots().values()])
        if kept != shown:
            rows.append((seq.num_computed, shown := kept))
    return rows


def converse(slots: int) -> tuple[int, int, int, int]:
    """Take turns with CHATS conversations -> prompt tokens, computed ones, saves, evictions."""
    engine, chats = Engine(slots), [[100 + i] for i in range(CHATS)]
    for turn in range(TURNS):
        for number, chat in enumerate(chats):
            prompt = chat + [10 * turn + number] * TURN
            chats[number] = engine.run(prompt, OUTPUT).token_ids
    total, found = engine.scheduler.prompt_tokens, engine.scheduler.cached_tokens
    return total, total - found, engine.blocks.state_saves, engine.blocks.state_evictions


def run() -> None:
    prefix = [*range(12)]
    prompts = {str(i): prefix + [100 * i + j for j in range(5)] for i in (1, 2, 3)}
    prompts["1 again"] = prompts["1"]
    QUESTIONS.show(1)
    say("""The picture in numbers. Blocks have 4 slots. The prompts of requests 1, 2 and 3 begin
        with the same 12 tokens. All columns count tokens. The last one says after how many tokens
        the request made snapshots:""")
    head = ("request", "prompt", "has KV", "found", "computed", "new snapshots")
    show_table(head, share(prompts))
    config = shape_of("qwen3.5-0.8b")
    assert isinstance(config, HybridConfig)
    ratio = config.state_bytes(2) / config.block_bytes(16, 2)
    say(f"""Request 1 made one snapshot, after the last full block of its prompt. Request 2 found KV
        of 12 tokens and no state, so it computed them again. Other prompts may begin with the same
        12 tokens, so it made a snapshot after them, which request 3 used. Snapshots after all
        blocks would avoid this, but they are large: in Qwen3.5-0.8B one takes as much memory as the
        KV of {ratio:.0f} blocks of 16 tokens.""")

    QUESTIONS.show(2)
    engine = Engine(slots=8)
    seq = engine.add([*range(10)], num_output=12)
    say("""Decodes make snapshots too, for the next turn of a chat. A prompt of 10 tokens gets 12
        tokens. When a decode fills a block, the state becomes a snapshot, and replaces the previous
        one of the same output. It is kept when the request ends:""")
    show_table(("tokens computed", "snapshots after"), changes(engine, seq))
    turn = engine.run([*seq.token_ids, 50, 51, 52])
    say(f"""The next turn has {turn.num_prompt} tokens: the prompt, the output and 3 more.
        {turn.num_cached_tokens} of them are found.""")

    say(f"""A state slot is the place of a snapshot on the device. If none is free, the least
        recently used snapshot is evicted. {CHATS} chats take turns. There are enough blocks for the
        KV of all:""")
    rows = [(slots, *(f"{n:,}" for n in converse(slots))) for slots in SLOTS]
    show_table(("state slots", "prompt tokens", "computed", "snapshots made", "evicted"), rows)
    say("""A turn makes three or four snapshots on average. With few state slots the turns of the
        other chats evict nearly all snapshots of a chat before its next turn. The whole prompt is
        then computed again, although its KV is still cached. With 12 nothing is computed twice,
        although snapshots are evicted: of the snapshots of a chat, only the last is used.""")

    say("""Two requests with the same prompt arrive together. They could share KV in the same step
        (lesson 8), because each layer stores the KV of the step before any query attends. A state
        is copied to the new row before the step computes anything, so the second request waits for
        one step, and then computes one token instead of 17.""")
    show_source(
        link(StateBlockManager.match, "not in self.snapshots"),
        link(StateBlockManager.attach_cached, "self.wanted[seq] ="),
        link(StateBlockManager.cache_blocks, "_snapshot_at_boundary"),
        link(StateBlockManager._roll),
        link(StateBlockManager._take_slot),
        link(StateBlockManager.is_ready),
    )


QUESTIONS = Questions("""
    Request 2 begins with the same 12 tokens as request 1, whose KV is cached. Why does it compute
    them again? (a) The KV of request 1 was evicted. (b) There is no state after exactly these 12
    tokens, and a later state cannot be cut. (c) The KV of a prefix is valid only with the state of
    the same request.
    Answer: b. Request 1 made a snapshot after 16 tokens, four of which request 2 does not have. KV
    can be cut at any token.
    Hint: After how many tokens is there a snapshot, and which tokens are in it?

    Blocks have 16 slots. A prompt of 20 tokens gets 30 tokens. How many snapshots are there at the
    end?
    Answer: 2. One after the first block, which is the last full one of the prompt, and one after 48
    tokens, which has replaced the one after 32.
    Hint: One for the prompt. How many of those that the decodes made are left?
""")
