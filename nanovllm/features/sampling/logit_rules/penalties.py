"""Penalties: changes to the logits of the known tokens of a row.

    presence       logit - presence_penalty, if the token occurs in the output
    frequency      logit - frequency_penalty * the number of times that it occurs in the output
    repetition     logit / repetition_penalty if it is positive, and logit * repetition_penalty if
                   not, of each token of prompt and output  (Keskar et al. 2019, arXiv:1909.05858)

The known tokens are on the device, so a step does not wait for the tokens of the previous step.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.models.transfers import to_device
from nanovllm.plan import LogitRules
from nanovllm.utils.host import explain_out_of_memory

# This many known tokens are processed at a time, in 50 MB of memory. 256 rows of 40,960 tokens
# would take 0.5 GB.
TOKENS_AT_A_TIME = 2**20
REMEDY = "out of memory for penalties; lower max_num_seqs or max_model_len"


def has_penalties(rules: LogitRules) -> bool:
    factors = rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty
    return factors != (0, 0, 1)


class PenaltyState:
    """The known tokens of the rows with penalties, on the device.

    `tokens` [rows, length] has the tokens of each row, and `counts` the number of times that each
    of them occurs in the output of the row. Equal tokens of a row have equal counts. The memory is
    allocated when a row has penalties for the first time.
    """

    def __init__(self, num_rows: int, length: int, device: torch.device) -> None:
        self.shape = num_rows, length
        self.tokens = torch.empty((0, length), dtype=torch.int32, device=device)
        self.counts = torch.empty((0, length), dtype=torch.float32, device=device)

    def add_row(self, row: int, prompt: list[int], output: list[int]) -> None:
        """Set the tokens and counts of a row."""
        if not len(self.tokens):
            with explain_out_of_memory(REMEDY):
                empty = self.tokens.new_empty(self.shape), self.counts.new_empty(self.shape)
            self.tokens, self.counts = empty
        known = np.array([*prompt, *output], np.int32)
        ids, index = np.unique(known, return_inverse=True)
        counts = np.bincount(index[len(prompt) :], minlength=len(ids))[index]
        self.tokens[row, : len(known)] = to_device(known, self.tokens.device)
        self.counts[row, : len(known)] = to_device(counts, self.counts.device)

    def read(self, rows: Tensor, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return tokens and counts [P, length] of `rows` [P] before `positions` [P].

        Entries from the position on repeat the first entry, so they only write its logit again.
        """
        known = torch.arange(length, device=rows.device) < positions[:, None]
        tokens, counts = self.tokens[:, :length][rows], self.counts[:, :length][rows]
        return torch.where(known, tokens, tokens[:, :1]), torch.where(known, counts, counts[:, :1])

    def append(
        self, rows: Tensor, positions: Tensor, tokens: Tensor, counts: Tensor, sampled: Tensor
    ) -> None:
        """Add `sampled` [P] int32 at `positions` [P] to the tokens and counts that `read` gave."""
        equal = tokens == sampled[:, None]
        counts = counts + equal
        self.counts[:, : counts.shape[1]][rows] = counts
        self.counts[rows, positions] = (counts * equal).amax(dim=1).clamp(min=1)
        self.tokens[rows, positions] = sampled


class Penalties:
    """The penalties of P rows of a step as tensors."""

    def __init__(self, rows: list[tuple[int, int, LogitRules]], state: PenaltyState) -> None:
        """`rows` has (index of the row's logits, row, rules) of each row with penalties."""
        self.state = state
        device = state.tokens.device
        index, row_ids, rules = zip(*rows, strict=True)
        self.index = to_device(np.array(index, np.int64), device)
        self.rows = to_device(np.array(row_ids, np.int64), device)
        names = "repetition_penalty", "frequency_penalty", "presence_penalty"
        factors = [[[getattr(each, name)] for each in rules] for name in names]  # [3, P, 1]
        self.factors = to_device(np.array(factors, np.float32), device)
        # The parts that the last `apply` read: rows, positions, tokens, counts.
        self.known: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def apply(self, logits: Tensor, positions: Tensor, length: int) -> None:
        """Apply the penalties, in place, to logits [R, V].

        `positions` [R] are the positions of the tokens to be sampled, each below `length`.
        """
        flat = logits.view(-1)
        self.known = []
        size = max(1, TOKENS_AT_A_TIME // length)
        columns = self.index, self.rows, positions[self.index]
        parts = zip(*(x.split(size) for x in columns), self.factors.split(size, dim=1), strict=True)
        for index, rows, at, (repetition, frequency, presence) in parts:
            tokens, counts = self.state.read(rows, at, length)
            self.known.append((rows, at, tokens, counts))
            where = tokens + index[:, None] * logits.shape[1]
            x = flat[where]
            scaled = torch.where(x > 0, x / repetition, x * repetition)
            flat[where] = scaled - (frequency * counts + presence * (counts > 0))

    def append(self, tokens: Tensor) -> None:
        """Add the tokens [R] that were sampled from the logits of `apply`."""
        sampled = tokens[self.index].int().split([len(rows) for rows, *_ in self.known])
        for known, part in zip(self.known, sampled, strict=True):
            self.state.append(*known, part)
