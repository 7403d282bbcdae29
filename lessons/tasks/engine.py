"""Your engine: one file that grows from lesson to lesson and answers questions.

Six milestones, m1 to m6, are about this file, engine.py. `python -m lessons build m2 --check
engine.py` runs the checks of m1 and m2. Each builds on parts, small tasks of their own. `from slots
import slots` takes your part from slots.py beside this file, or copy it here. Add methods and
fields as you like. All answers must be transformers' answers, the most likely token at each step,
and `self.model.logits` must compute every token: the checks watch which tokens, and where. An
output includes the end token, one of `ends`.

m1 (lesson 3; part: cache). A loop answers one prompt after the other. self.model.logits(ids,
positions, attend) computes n tokens and returns their logits [n, V]. It calls attend(layer, q, k,
v) in each layer. A KVCache for each layer keeps the keys and values, so that the first step
computes the prompt and each later one only the token before. self.model.config has num_layers,
num_kv_heads (K) and head_dim (D).

m2 (lesson 5; part: slots). Keys and values move into blocks. `__init__` makes self.blocks =
BlockManager(num_blocks, size) of nanovllm/engine/block_manager.py and self.kv = torch.zeros(layers,
2, (num_blocks + 1) * size, K, D), where block 0 belongs to nobody. Each prompt becomes a Sequence
(nanovllm/engine/sequence.py), whose num_computed you advance. self.blocks.append_block(seq) gives
it a block when a token needs it, and release(seq) takes all of them back at its end. `attend`
writes k and v to the slots of the new tokens in self.kv, and reads the earlier ones through
seq.block_table. Hint: for tokens after a prefix, a new KVCache gets the earlier keys with queries
of zeros, whose results you leave out.

m3 (lesson 6; part: step). A step computes tokens of many requests. Those of the plan, one after the
other, go to one call of self.model.logits: at most `budget` tokens of at most `max_num_seqs`
requests. plan_step admits from a list of waiting requests to a list of running ones. `attend` gives
each request its own part of q, k and v. A token is sampled only of a request whose tokens are all
computed, from the logits of its last token. A request that has ended makes room for a waiting one.

m4 (lesson 8; parts: prefix, eviction). Requests share cached prefixes. self.blocks becomes a
Blocks(Matching, FewestHits). For the first waiting requests, as many as there are free rows,
match(seq) says how many tokens are cached: plan_step must not plan these, so set seq.num_computed.
Those that it admits take the blocks, before anybody else gets new ones: attach_cached(seq,
match(seq)), once for each admission. A waiting request holds no block. cache_full_blocks(seq) after
each step caches what is computed.

m5 (lesson 9). The pool may be too small for all running requests. If no block is available for the
tokens of a request in the plan, the running one that was admitted last loses its blocks, its row
and its place in the plan, and becomes the head of the waiting list, with all of its tokens. That
may be the request that needed the block. The oldest never waits. Each request fits alone.

m6 (lesson 12; part: stop). A stream shows text, up to a stop string. Write `stream`, with the
arguments of `generate`, then stop strings and a function from a token to its bytes. It yields
(number of the prompt, new text) as soon as a StopStream shows the text, never "", and what is held
back at the end. An end token has no text. A request ends at a stop string too: its blocks are
released before its text is yielded. A caller may close the stream early, which raises GeneratorExit
at the `yield`: all blocks are released, and the engine can answer other prompts.
"""

from cache import KVCache  # noqa: F401

from lessons.lesson02_model import Model


class Engine:
    def __init__(
        self, model: Model, num_blocks: int, size: int, max_num_seqs: int, budget: int
    ) -> None:
        """size: slots of a block. m1 needs only the model, m2 no max_num_seqs and no budget."""
        self.model = model

    def generate(
        self, prompts: list[list[int]], max_tokens: list[int], ends: set[int]
    ) -> list[list[int]]:
        """Return the output tokens of each prompt, at most max_tokens[i] of prompt i."""
        raise NotImplementedError("generate is to be written; see the top of this file")
