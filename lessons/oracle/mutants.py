"""One-line faults of the scheduler and the block manager, made in the syntax tree.

A fault names a function, a pattern in it and the replacement of the one place that matches. In a
pattern, a single capital letter matches any expression, so variables may be renamed. `apply`
returns the module with the fault. tests/lessons/test_oracle.py catches every fault. Faults of
states are in states.py. No torch.
"""

import ast
import inspect
import re
import types
from typing import Any, NamedTuple

from nanovllm.engine import block_manager, scheduler


class Mutant(NamedTuple):
    """A fault: in `function` of `module`, `pattern` becomes `replacement`."""

    module: types.ModuleType
    function: str
    pattern: str
    replacement: str


BLOCKS, SCHEDULER = block_manager, scheduler

MUTANTS = {
    "a reference is not counted": Mutant(BLOCKS, "attach_cached", "A.ref_count += 1", "pass"),
    "a shared block stays evictable": Mutant(BLOCKS, "attach_cached", "del A[B]", "pass"),
    "an evicted block can still be found": Mutant(
        BLOCKS, "_evict", "del self.hash_to_block[A]", "pass"
    ),
    "a hash lacks the parent": Mutant(
        BLOCKS, "hash_block", "xxh3_128_digest(A + B)", "xxh3_128_digest(B)"
    ),
    "a match does not compare the tokens": Mutant(BLOCKS, "match", "A is None or B", "A is None"),
    "a match goes to the very end": Mutant(BLOCKS, "match", "len(A) - 1", "len(A)"),
    "a block is cached before it is full": Mutant(
        BLOCKS, "cache_full_blocks", "min(A, B) // C", "-(-min(A, B) // C)"
    ),
    "a block is cached before it is computed": Mutant(
        BLOCKS, "cache_full_blocks", "min(A, B) // C", "min(len(seq.block_table) * C, B) // C"
    ),
    "a shared block is written in place": Mutant(
        BLOCKS, "_shared_block", "A.ref_count == 1 and B", "True"
    ),
    "a cached block is written in place": Mutant(
        BLOCKS, "_shared_block", "A.ref_count == 1 and B", "A.ref_count == 1"
    ),
    "a block is appended one token late": Mutant(
        SCHEDULER, "schedule", "A.num_computed == B", "A.num_computed == B + 1"
    ),
    "a block is appended one token early": Mutant(
        SCHEDULER, "schedule", "A.num_computed == B", "A.num_computed + 1 == B"
    ),
    "a copy is not planned": Mutant(BLOCKS, "copy_on_write", "A._copies.append(B)", "pass"),
    "the copied block is not reported": Mutant(
        SCHEDULER, "allocate", "new.append((A, B // C, D))", "pass"
    ),
    "a fork shares one token too many": Mutant(
        SCHEDULER, "commit", "seq.num_prompt - 1", "seq.num_prompt"
    ),
    "the oldest is preempted": Mutant(
        SCHEDULER, "_make_room", "self.running[-1]", "self.running[0]"
    ),
    "a preempted sequence loses its tokens": Mutant(
        SCHEDULER, "preempt", "seq.preemptions += 1", "del seq.token_ids[seq.num_prompt :]"
    ),
    "admission in a step that preempted": Mutant(SCHEDULER, "schedule", "A > preemptions", "False"),
    "a row is not returned": Mutant(SCHEDULER, "leave", "self.free_rows.append(A)", "pass"),
    "a token sampled too late is kept": Mutant(
        SCHEDULER, "commit", "A.status is Status.FINISHED", "False"
    ),
    "the budget is not spent": Mutant(SCHEDULER, "schedule", "budget -= 1", "pass"),
    "an abandoned step keeps its blocks": Mutant(BLOCKS, "revert", "self._free_all()", "pass"),
    "max_length is passed by one": Mutant(
        SCHEDULER, "finish_if_complete", "len(A) >= B.max_length", "len(A) > B.max_length"
    ),
    "a resumed chunk starts one token late": Mutant(
        SCHEDULER,
        "plan_chunk",
        "Chunk(A, B, C[start:end], D)",
        "Chunk(A, B, C[start + 1 : end + 1], D)",
    ),
    "the cache is reset while sequences run": Mutant(
        BLOCKS, "reset_prefix_cache", "A < self.num_blocks", "False"
    ),
}


def matches(pattern: object, node: object, wildcards: dict[str, Any]) -> bool:
    """Return whether two nodes are equal, except for wildcards.

    Puts the expression that each wildcard matches into `wildcards`.
    """
    if isinstance(pattern, ast.Name) and re.fullmatch("[A-Z]", pattern.id):
        wildcards[pattern.id] = node
        return isinstance(node, ast.expr)
    if isinstance(pattern, list) and isinstance(node, list):
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(matches(p, n, wildcards) for p, n in pairs)
    if isinstance(pattern, ast.expr_context):
        return True
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            matches(value, getattr(node, name), wildcards)
            for name, value in ast.iter_fields(pattern)
        )
    return pattern == node


class Replace(ast.NodeTransformer):
    """Replaces all nodes that match a pattern."""

    def __init__(self, pattern: ast.AST, replacement: ast.AST) -> None:
        self.pattern, self.replacement = pattern, replacement
        self.replaced: list[ast.AST] = []
        self.made: list[ast.AST] = []

    def visit(self, node: ast.AST) -> Any:
        wildcards: dict[str, Any] = {}
        if not matches(self.pattern, node, wildcards):
            return self.generic_visit(node)

        class Fill(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> Any:
                return wildcards.get(name.id, name)

        self.replaced.append(node)
        self.made.append(ast.copy_location(Fill().visit(self.replacement), node))
        return self.made[-1]


def statement(source: str) -> ast.AST:
    return ast.parse(source).body[0]


def transform(mutant: Mutant) -> tuple[ast.Module, ast.AST, ast.AST]:
    """Return the tree of the module with the fault, the replaced node, and its replacement.

    Raises ValueError unless exactly one place matches.
    """
    tree = ast.parse(inspect.getsource(mutant.module))
    pattern = statement(mutant.pattern)
    replacement = statement(mutant.replacement)
    if isinstance(pattern, ast.Expr) and isinstance(replacement, ast.Expr):
        pattern, replacement = pattern.value, replacement.value
    replace = Replace(pattern, replacement)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == mutant.function:
            node.body = [replace.visit(child) for child in node.body]
    if len(replace.replaced) != 1:
        places = f"{len(replace.replaced)} places of {mutant.function}"
        raise ValueError(f"{mutant.pattern!r} matches {places}")
    return ast.fix_missing_locations(tree), replace.replaced[0], replace.made[0]


def apply(mutant: Mutant) -> types.ModuleType:
    """Return the module with the fault. Raises ValueError unless exactly one place matches."""
    tree, *_ = transform(mutant)
    faulty = types.ModuleType("faulty")
    faulty.__dict__["__name__"] = mutant.module.__name__  # dataclasses look up their module by name
    exec(compile(tree, "<mutant>", "exec"), faulty.__dict__)
    return faulty


def describe(mutant: Mutant) -> str:
    """Return the changed line of the engine, before and after."""
    _, old, new = transform(mutant)
    path = mutant.module.__name__.replace(".", "/")
    return (
        f"{path}.py:{getattr(old, 'lineno', 0)}: `{ast.unparse(old)}` became `{ast.unparse(new)}`"
    )
