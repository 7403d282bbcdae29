"""Elective state_cache: a prefix cache without positions.

KV can be cut at any token: a request that begins with the same 12 tokens uses the KV of these 12. A
state (`states`) cannot be cut. It is the result of all tokens so far, and the next one overwrites
it. The prefix cache therefore keeps snapshots, which are copies of the state after the last token
of a block. The hash of a block stands for all tokens up to its end (lesson 8), so it also finds the
snapshot. Request 1, when it has ended:

    tokens      [ a b c d | e f g h | i j k l | m n o p | q ]
    KV            cached    cached    cached    cached
    snapshot                                          16   after 16 tokens

This lesson runs the engine's scheduler and block manager on the model of the random tests, whose
state is the list of all tokens that it has consumed. It stops if a row has consumed a wrong token.
"""

from lessons.lesson import shape_of
from lessons.oracle.oracle import make_samples
from lessons.oracle.states import HybridRunner
from lessons.show import Questions, link, say, show_source, show_table
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.models.hybrid.hybrid_config import HybridConfig
from nanovllm.features.models.hybrid.state_blocks import StateBlockManager

ROWS, BLOCKS, STATES = 4, 100, 20  # states of rows, padding and snapshots


class Engine:
    """A scheduler with states, and the model of the random tests."""

    def __init__(self, block_size: int = 4) -> None:
        self.blocks = StateBlockManager(BLOCKS, block_size, True, ROWS, STATES)
        self.scheduler = Scheduler(self.blocks, ROWS, 128)  # at most 128 tokens in a step
        self.runner = HybridRunner(BLOCKS, block_size, ROWS, STATES)

    def snapshots(self) -> dict[int, int]:
        """Return the block of each snapshot -> how many tokens its state has consumed."""
        states = self.runner.states
        slots = self.blocks.snapshots
        return {block: len(states[slot] or ()) for block, slot in slots.items()}

    def run(self, prompt: list[int], num_output: int = 1) -> tuple[Sequence, dict[str, int]]:
        """Run a request -> it, and after how many of its tokens there were which snapshots."""
        [seq] = make_samples(prompt, len(prompt) + num_output)
        kept = dict[str, int]()
        self.scheduler.add(seq)
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.commit(step, self.runner.run(step.plan))
            kept.setdefault(", ".join(map(str, self.snapshots().values())), seq.num_computed)
        return seq, kept


def share() -> list[tuple[object, ...]]:
    """Run three requests -> for each, the tokens with KV, those with a state, new snapshots."""
    engine = Engine()
    rows = list[tuple[object, ...]]()
    for number in (1, 2, 3):
        prompt = [*range(12), *range(100 * number, 100 * number + 5)]
        [probe] = make_samples(prompt, 18)
        old = engine.snapshots()
        with_kv = len(BlockManager.match(engine.blocks, probe)) * engine.blocks.block_size
        found = engine.run(prompt)[0].num_cached_tokens
        new = sorted(tokens for block, tokens in engine.snapshots().items() if block not in old)
        rows.append((number, 17, with_kv, found, 17 - found, ", ".join(map(str, new))))
    return rows


def run() -> None:
    QUESTIONS.show(1)
    say("""Requests 1, 2 and 3 begin with the same 12 tokens. The columns count tokens: how many of
        the prompt have KV in the cache, how many of these are used, and how many are computed. The
        last one says after how many tokens the request made snapshots:""")
    show_table(("request", "prompt", "have KV", "used", "computed", "new snapshots"), share())
    config = shape_of("qwen3.5-0.8b")
    assert isinstance(config, HybridConfig)
    ratio = config.state_bytes(2) / config.block_bytes(16, 2)
    say(f"""Request 1 made one snapshot, after the last full block of its prompt. Request 2 found KV
        of 12 tokens and no state for them. Other prompts may begin with these 12 tokens too, so it
        made a snapshot after them, which request 3 used. Snapshots after all blocks would avoid
        this, but they are large: in Qwen3.5-0.8B one takes as much memory as the KV of {ratio:.0f}
        blocks of 16 tokens. Their places on the device, the state slots, are therefore few. If none
        is free, the least recently used snapshot is evicted.""")

    engine = Engine()
    seq, kept = engine.run([*range(10)], num_output=12)
    say("""Decodes make snapshots too, for the next turn of a chat. When a decode fills a block, the
        state becomes a snapshot, and replaces the previous one of the same output. The last one is
        kept when the request ends. A prompt of 10 tokens gets 12 tokens, in blocks of 4 slots:""")
    show_table(("tokens computed", "snapshots after"), [(n, tokens) for tokens, n in kept.items()])
    turn, _ = engine.run([*seq.token_ids, 50, 51, 52])
    say(f"""The next turn has {turn.num_prompt} tokens: the prompt, the output and 3 more.
        {turn.num_cached_tokens} of them are not computed again.""")
    QUESTIONS.show(2)
    show_source(
        link(StateBlockManager.match, "not in self.snapshots"),
        link(StateBlockManager.attach_cached, "self.resumable_at[seq] ="),
        link(StateBlockManager.cache_blocks, "_snapshot_at_boundary"),
        link(StateBlockManager._take_slot),
    )


QUESTIONS = Questions("""
    Request 2 follows request 1 of the picture. Its tokens are a b c d e f g h i j k l r s t u v.
    How many of its 17 tokens are computed?
    Answer: 17. The KV of 12 of them is cached, but the only state is the one after 16 tokens, four
    of which request 2 does not have.
    Hint: After which tokens is there a snapshot, and does request 2 have all of these?

    Blocks have 16 slots. A prompt of 20 tokens gets 30 tokens. How many snapshots are there at the
    end?
    Answer: 2. One after the first block, which is the last full one of the prompt, and one after 48
    tokens, which has replaced the one after 32.
    Hint: One for the prompt. How many of those that the decodes made are left?
""")

IN_VLLM = """`MambaManager` in `v1/core/single_type_kv_cache_manager.py`. A snapshot is a block of a
pool that it shares with the KV. In the mode "align" of `mamba_cache_mode`, the default with prefix
caching, a step that ends at the end of a block leaves its state there."""
