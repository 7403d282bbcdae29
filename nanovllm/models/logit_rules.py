"""Logit rules: changes to the logits beyond temperature and filters, and log-probabilities.

A row without rules costs nothing. The rules of a step's rows are applied together, by few operations
on the device and without waiting for it. Three kinds need the sampled tokens on the host: logits
processors, grammars, and bad words of several tokens. A step with such a row waits for the tokens of
the step before once it has launched its own forward, so that the rules run on the host while the
device works.

The order is that of transformers and vLLM: log-probabilities of the raw logits, allowed tokens, bad
words, minimum length, bias, penalties, logits processors, and then the grammar, which no other rule
can overrule. The sampler follows.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.api.sampling_params import takes_prompt
from nanovllm.models.batch import to_device
from nanovllm.plan import Join, LogitRules, TokenLogprobs

HIDDEN = float("-inf")
ALWAYS = 2**62
# The most known tokens that penalties work on at a time, in 50 MB of memory. For 256 rows of 40,960
# tokens that would be 0.5 GB, which the memory profile does not measure, because its rows are short.
TOKENS_AT_A_TIME = 2**20


class RowRules:
    """The rules of one row, and its tokens if they are needed on the host.

    Raises ValueError for a token id that the model does not have, whose index in the logits [R * V]
    of a step could be that of another row.
    """

    def __init__(self, rules: LogitRules, join: Join, vocab_size: int) -> None:
        # What processors refer to can be large. Their request keeps them alive, and not its row, of
        # which the runner does not know that it is free until another sequence joins it.
        self.owner = weakref.ref(rules)
        self.rules, self.row = replace(rules, logits_processors=()), join.row
        self.prompt, self.output = join.prompt, list(join.output)
        self.phrases = [word for word in rules.bad_words if len(word) > 1]
        self.take_prompt = [takes_prompt(processor) for processor in rules.logits_processors]
        self.matcher = None if rules.grammar is None else rules.grammar.matcher()
        # Whether `output` must be complete before the next token is sampled.
        self.needs_output = bool(self.phrases or self.take_prompt or self.matcher)
        self.error: Exception | None = None  # raised when the row is to sample
        # Waits for the tokens of a step, and the index of the row's: the one that `output` lacks.
        self.last: tuple[Callable[[], list[int]], int] | None = None
        allowed = rules.allowed_token_ids  # an array, because there can be thousands
        self.allowed = None if allowed is None else np.array(allowed, np.int64)
        # (token, what is added to its logit, the first position at which it is not)
        self.edits = [(word[0], HIDDEN, ALWAYS) for word in rules.bad_words if len(word) == 1]
        first_end = len(join.prompt) + rules.min_tokens
        self.edits += [(token, HIDDEN, first_end) for token in rules.stops]
        self.edits += [(token, value, ALWAYS) for token, value in rules.logit_bias]
        check_ids([token for token, *_ in self.edits], vocab_size)
        check_ids([*itertools.chain(*self.phrases), *(allowed or ())], vocab_size)

    def apply(self, logits: Tensor) -> None:
        """Apply the rules that need the output to the row's logits [V], in place."""
        if self.error is not None:
            raise self.error
        for *start, last in self.phrases:
            if self.output[-len(start) :] == start:
                logits[last] = HIDDEN
        owner = self.owner()
        processors = () if owner is None else owner.logits_processors  # its request has ended
        for processor, with_prompt in zip(processors, self.take_prompt, strict=False):
            token_ids = (self.prompt, self.output) if with_prompt else (self.output,)
            changed = processor(*map(list, token_ids), logits)
            if changed is None:
                continue  # it has changed `logits` itself
            changed = torch.as_tensor(changed)
            if changed.shape != logits.shape:
                raise ValueError(
                    f"the logits processor {processor!r} returned {list(changed.shape)} numbers in "
                    f"place of {list(logits.shape)}; return the logits, or change them in place"
                )
            logits.copy_(changed)
        if processors and not (logits < float("inf")).all():
            # A softmax of infinity is NaN. With NaN there is no token to sample.
            infinite = logits.isposinf()
            logits.copy_(torch.where(infinite & ~logits.isnan().any(), 0.0, HIDDEN))


def check_ids(ids: list[int], vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"token ids {min(ids)} to {max(ids)} exceed a vocabulary of {vocab_size}")


class RulesState:
    """What rules keep on the device between steps, and memory for the logits that they change.

    `tokens` are the known tokens of each row with penalties, `counts` how often its output contains
    them. Equal tokens of a row always have equal counts.
    """

    def __init__(self, num_rows: int, length: int, vocab_size: int, device: torch.device) -> None:
        # torch.empty takes no memory on a CPU before it is written.
        self.tokens = torch.empty((num_rows, length), dtype=torch.int32, device=device)
        self.counts = torch.empty((num_rows, length), dtype=torch.float32, device=device)
        self.logits = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
        # [256, 8]: for each byte of a grammar's mask, the most that the logits of its tokens may be.
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self.caps = to_device(np.where(bits, np.inf, HIDDEN).astype(np.float32), device)

    def join(self, row: int, prompt: list[int], output: list[int]) -> None:
        known = np.array([*prompt, *output], np.int32)
        ids, index = np.unique(known, return_inverse=True)
        check_ids([*ids[:1], *ids[-1:]], self.logits.shape[1])
        counts = np.bincount(index[len(prompt) :], minlength=len(ids))[index]
        self.tokens[row, : len(known)] = to_device(known, self.tokens.device)
        self.counts[row, : len(known)] = to_device(counts, self.counts.device)

    def read(self, rows: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """tokens and counts [P, length] of `rows` [P] before `positions` [P].

        Entries past these repeat the first one: it then gets the same penalty more than once.
        """
        known = torch.arange(length, device=rows.device) < positions[:, None]
        tokens, counts = self.tokens[:, :length][rows], self.counts[:, :length][rows]
        return torch.where(known, tokens, tokens[:, :1]), torch.where(known, counts, counts[:, :1])

    def append(
        self, rows: Tensor, positions: Tensor, known: tuple[Tensor, Tensor], sampled: Tensor
    ) -> None:
        """Add `sampled` [P] int32 at `positions` [P], which are within what `read` returned."""
        tokens, counts = known
        equal = tokens == sampled[:, None]
        counts = counts + equal
        self.counts[:, : counts.shape[1]][rows] = counts
        self.counts[rows, positions] = (counts * equal).amax(dim=1).clamp(min=1)
        self.tokens[rows, positions] = sampled


class RulesBatch:
    """The rules of the rows of a step, as tensors. Steps with the same rows share it.

    `rows` has (index of the row's logits, rules) for each row with rules. P rows have penalties and
    Q report log-probabilities.
    """

    def __init__(self, rows: list[tuple[int, RowRules]], state: RulesState) -> None:
        self.state, device, vocab_size = state, state.logits.device, state.logits.shape[1]
        self.rows = [row.row for _, row in rows]
        self.length = 0  # more than the position of any token that is sampled next; set by Rows
        self.host_rules = [(i, row) for i, row in rows if row.needs_output]
        self.has_grammar = any(row.matcher for _, row in rows)
        # Of the last `apply`: errors by row, and the indices of logits whose grammars are complete.
        self.errors: dict[int, Exception] = {}
        self.completed: list[int] = []

        def send(values: Any, dtype: Any = np.int64) -> Tensor:
            return to_device(np.array(values, dtype), device)

        # 1. Allowed tokens, by their index in the logits [R * V].
        allowed = [(i, row.allowed) for i, row in rows if row.allowed is not None]
        self.restricted = send([i for i, _ in allowed])
        indices = [ids + i * vocab_size for i, ids in allowed]
        self.allowed = send(np.concatenate(indices) if indices else [])
        # 2. Bad words, minimum length and bias: additions to single logits.
        edits = [(i * vocab_size + t, value, end) for i, row in rows for t, value, end in row.edits]
        self.edited = send([index for index, _, _ in edits])
        self.added = send([value for _, value, _ in edits], np.float32)
        self.until = send([end for _, _, end in edits])
        # 3. Penalties.
        penalized = [(i, row) for i, row in rows if row.rules.has_penalties]
        self.penalized = send([i for i, _ in penalized])
        self.penalized_rows = send([row.row for _, row in penalized])
        # What `apply` read, in parts, and at which rows and positions, for `append`.
        self.known: list[tuple[Tensor, Tensor, tuple[Tensor, Tensor]]] = []
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        factors = [[[getattr(row.rules, name)] for _, row in penalized] for name in names]
        self.repetition, self.frequency, self.presence = send(factors, np.float32)
        # 4. Log-probabilities.
        self.reported = [
            (i, row.row, k) for i, row in rows if (k := row.rules.logprobs) is not None
        ]
        self.reported_index = send([i for i, *_ in self.reported])
        self.num_logprobs = max((k for *_, k in self.reported), default=0)
        self.changes_logits = bool(allowed or edits or penalized or self.host_rules)

    def apply(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return logits [R, V] with the rules applied, in float32; the next call overwrites them.

        positions [R] of the tokens to be sampled.
        """
        logits = self.state.logits[: len(logits)].copy_(logits)
        flat, vocab_size = logits.view(-1), logits.shape[1]
        if len(self.restricted):
            kept = flat[self.allowed]
            logits.index_fill_(0, self.restricted, HIDDEN)
            flat[self.allowed] = kept
        if len(self.edited):
            active = positions[self.edited // vocab_size] < self.until
            flat.index_add_(0, self.edited, torch.where(active, self.added, 0.0))
        if len(self.penalized):
            self.known, size = [], max(1, TOKENS_AT_A_TIME // self.length)
            rows, factors = self.penalized_rows, (self.repetition, self.frequency, self.presence)
            columns = self.penalized, rows, positions[self.penalized], *factors
            for part in zip(*(x.split(size) for x in columns), strict=True):
                index, rows, at, repetition, frequency, presence = part
                tokens, counts = self.state.read(rows, at, self.length)
                self.known.append((rows, at, (tokens, counts)))
                where = tokens + index[:, None] * vocab_size
                x = flat[where]
                scaled = torch.where(x > 0, x / repetition, x * repetition)
                flat[where] = scaled - (frequency * counts + presence * (counts > 0))
        if self.host_rules:
            self._apply_on_host(logits)
        return logits

    def _apply_on_host(self, logits: Tensor) -> None:
        """Apply the rules that need the output to logits [R, V], in place."""
        for _, row in self.host_rules:
            if row.last is not None:
                token_ids, i = row.last
                row.output.append(token_ids()[i])
                row.last = None
        self.errors, self.completed = {}, []
        num_bytes = -(-logits.shape[1] // 8)
        masks = np.full((len(logits), num_bytes), 0xFF, np.uint8)  # a bit is 0: the token is hidden
        for i, row in self.host_rules:
            try:
                row.apply(logits[i])
                mask = row.matcher.mask(row.output) if row.matcher else None
                if mask:
                    masks[i] = np.frombuffer(mask, np.uint8, num_bytes)
                elif mask is not None:
                    self.completed.append(i)
                    logits[i].fill_(HIDDEN)
            except Exception as error:  # of its processor or grammar: it ends its own request only
                self.errors[row.row] = error
                logits[i].fill_(HIDDEN)
        if self.has_grammar:
            # On a CPU masked_fill takes several times as long.
            index = to_device(masks, logits.device).int().flatten()
            caps = self.state.caps.index_select(0, index).view(len(logits), -1)
            torch.minimum(logits, caps[:, : logits.shape[1]], out=logits)

    def append(self, positions: Tensor, tokens: Tensor, token_ids: Callable[[], list[int]]) -> None:
        """Add the tokens [R] that were sampled from what `apply` returned.

        `token_ids` waits for the device and returns them. Rules on the host do this in the next step.
        """
        if len(self.penalized):
            sampled = tokens[self.penalized].int()
            for part, read in zip(sampled.split(len(self.known[0][0])), self.known, strict=True):
                self.state.append(*read, part)
        token_ids = functools.cache(token_ids)  # one list for all rows
        for i, row in self.host_rules:
            row.last = token_ids, i


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Log-probabilities of tokens [Q], all >= 0, and of the k most likely, from raw logits [Q, V].

    Returns [Q, 2 + 2k] float64: log-probability and rank of the token, k log-probabilities, k ids.
    """
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    return torch.cat((own.double(), rank, *logprobs.topk(k)), dim=1)


def unpack_logprobs(packed: list[float], token: int, k: int) -> TokenLogprobs:
    """(token, log-probability, rank) of `token` and the k most likely, from `token_logprobs`."""
    likely = [(other, p, i + 1) for i, (other, p) in enumerate(likely_tokens(packed[2:], k))]
    return [(token, packed[0], int(packed[1])), *(entry for entry in likely if entry[0] != token)]


def likely_tokens(packed: list[float], k: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the first k, from as many log-probabilities as token ids."""
    half = len(packed) // 2
    return list(zip(map(int, packed[half : half + k]), packed[:k], strict=True))
