"""Slot arithmetic: where the tokens of a sequence are in the KV cache.

The task. Block b of B slots has the slots b * B to b * B + B - 1. Write `slots`: the slots of the
positions start to start + count - 1 of a sequence. Write `blocks_to_append`: how many blocks its
block table needs in addition to hold all positions before start + count, or 0 if it has enough. It
may have more than it needs.

Example: B = 4, block table [7, 2]. Positions 2 to 5 have the slots 30, 31, 8, 9. To hold positions
6 to 8, one block must be appended, because two blocks have room for the positions 0 to 7. If start
is 12 and count is 1, two are missing: one for the positions 8 to 11, and one for 12.

What must stay true: `slots` is called only if the table has blocks for all positions. It returns a
new list each time, which is empty if `count` is 0. Neither function changes its arguments.

In the engine: Rows.slots in nanovllm/runner/rows.py, and num_needed in engine/block_manager.py,
which also counts the copy of a shared block. Hints: // and % split a position. -(-a // b) is a / b,
rounded up.
"""


def slots(block_table: list[int], block_size: int, start: int, count: int) -> list[int]:
    raise NotImplementedError("slots is to be written; see the top of this file")


def blocks_to_append(block_table: list[int], block_size: int, start: int, count: int) -> int:
    raise NotImplementedError("blocks_to_append is to be written; see the top of this file")
