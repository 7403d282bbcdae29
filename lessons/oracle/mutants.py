"""One-line faults of the scheduler and the block manager.

tests/lessons/test_oracle.py catches every one of them. No torch.
"""

import ast
import inspect
import re
import types
from typing import NamedTuple

from nanovllm.engine import block_manager, scheduler


class Mutant(NamedTuple):
    """A fault: in `function` of `module`, the text `old` becomes `new`."""

    module: types.ModuleType
    function: str
    old: str
    new: str


def read(table: str, *modules: types.ModuleType) -> dict[str, Mutant]:
    """Read lines "name of a fault | function of one of `modules` | old | new"."""
    mutants = {}
    for line in table.strip().splitlines():
        name, function, old, new = (cell.strip() for cell in line.split("|"))
        [module] = (m for m in modules if f"def {function}(" in inspect.getsource(m))
        mutants[name] = Mutant(module, function, old, new)
    return mutants


MUTANTS = read(
    """
    a reference is not counted | attach_cached | block.ref_count += 1 | pass
    a shared block stays evictable | attach_cached | del self.evictable[block.block_id] | pass
    an evicted block can still be found | _evict | del self.hash_to_block[block.block_hash] | pass
    a hash lacks the parent | hash_block | parent_block_hash + array | array
    a match does not compare the tokens | match \
        | if block is None or block.token_ids != self._token_ids(seq, i) | if block is None
    a match goes to the very end | match | len(seq.token_ids) - 1 | len(seq.token_ids)
    a block is cached before it is full (rounded up) | cache_full_blocks \
        | // self.block_size | // -self.block_size * -1
    a block is cached before it is computed | cache_full_blocks \
        | seq.num_computed, | len(seq.block_table) * self.block_size,
    a shared block is written in place | _shared_block \
        | block.ref_count == 1 and not block.is_cached | True
    a cached block is written in place | _shared_block | 1 and not block.is_cached | 1
    a block is appended one token late | schedule | * block_size: | * block_size + 1:
    a block is appended one token early, and none if blocks have one slot | schedule \
        | num_computed == len | num_computed + 1 == len
    a copy is not planned | copy_on_write \
        | self._copies.append(BlockCopy(shared.block_id, copy)) | pass
    the copied block is not reported | allocate \
        | new.append((seq.row, seq.num_computed // self.block_manager.block_size, copy)) | pass
    a fork shares one token too many | commit | seq.num_prompt - 1 | seq.num_prompt
    the oldest is preempted | _make_room | self.running[-1] | self.running[0]
    a preempted sequence loses its tokens | preempt \
        | seq.preemptions += 1 | del seq.token_ids[seq.num_prompt:]
    admission in a step that preempted | schedule | self.preemptions > preemptions | False
    a row is not returned | leave | self.free_rows.append(seq.row) | pass
    a token sampled too late is kept | commit | seq.status is Status.FINISHED | False
    the budget is not spent | schedule | budget -= 1 | pass
    an abandoned step keeps its blocks | revert | self._free_all() | pass
    max_length is passed by one | finish_if_complete | >= | >
    a resumed chunk starts one token late | plan_chunk | [start:end] | [start + 1 : end + 1]
    the cache is reset while sequences run | reset_prefix_cache \
        | self.num_available < self.num_blocks | False
    """,
    block_manager,
    scheduler,
)


def change(mutant: Mutant) -> tuple[str, int]:
    """Return the source of the module with the fault, and the number of the changed line.

    Raises ValueError unless the old text is at exactly one place of the function.
    """
    source = inspect.getsource(mutant.module)
    old = mutant.old
    lines = source.splitlines(keepends=True)
    places = list[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == mutant.function:
            start, end = (len("".join(lines[:n])) for n in (node.lineno - 1, node.end_lineno))
            places += [start + m.start() for m in re.finditer(re.escape(old), source[start:end])]
    if len(places) != 1:
        raise ValueError(f"{old!r} is at {len(places)} places of {mutant.function}")
    before, after = source[: places[0]], source[places[0] + len(old) :]
    return before + mutant.new + after, before.count("\n") + 1


def apply(mutant: Mutant) -> types.ModuleType:
    """Return the module with the fault."""
    faulty = types.ModuleType(mutant.module.__name__)  # where dataclasses look up their module
    exec(compile(change(mutant)[0], "<mutant>", "exec"), faulty.__dict__)
    return faulty


def describe(mutant: Mutant) -> str:
    """Return the changed line of the engine, before and after."""
    faulty, number = change(mutant)
    sources = inspect.getsource(mutant.module), faulty
    old, new = (source.splitlines()[number - 1].strip() for source in sources)
    path = mutant.module.__name__.replace(".", "/")
    return f"{path}.py:{number}: `{old}` became `{new}`"
