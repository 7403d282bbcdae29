"""RowRules: what a request asks of its logits beyond temperature and top-k, top-p, min-p.

Owns: for one row that asks, the counts and tokens that its rules look at. Given: the row's LogitRules
and tokens. Mutates: the row's logits. Rows that ask for nothing have no RowRules and cost nothing.

Order, as in transformers and vLLM: log-probabilities of the raw logits; allowed tokens; bad words;
minimum length; bias; penalties; the user's own processors. Then sampler.py takes over.
"""

import torch
from torch import Tensor

from nanovllm.plan import LogitRules, TokenLogprobs

NOTHING = float("-inf")


class RowRules:
    def __init__(
        self,
        rules: LogitRules,
        prompt: list[int],
        output: list[int],
        size: int,
        device: torch.device,
    ) -> None:
        """`prompt` and `output` are the tokens known when the row joins; V = `size`."""
        self.rules = rules
        self.prompt = prompt
        self.output = list(output)
        self.device = device
        self.counts = self.in_prompt = torch.empty(0)
        if rules.penalizes:
            ids = torch.tensor(output, dtype=torch.int64, device=device)
            self.counts = torch.bincount(ids, minlength=size).float()  # [V], of the output
            self.in_prompt = torch.zeros(size, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt, device=device)] = True

    def apply(self, logits: Tensor) -> None:
        """Change the row's logits [V] in place."""
        rules = self.rules
        if rules.allowed is not None:
            kept = logits[list(rules.allowed)]
            logits.fill_(NOTHING)[list(rules.allowed)] = kept
        for *start, last in rules.bad_words:
            if not start or self.output[-len(start) :] == start:
                logits[last] = NOTHING
        if len(self.output) < rules.min_tokens:
            logits[list(rules.stops)] = NOTHING
        if rules.bias:
            tokens, values = zip(*rules.bias, strict=True)
            logits[list(tokens)] += torch.tensor(values, device=self.device)
        if rules.penalizes:
            seen = self.counts > 0
            scaled = torch.where(logits > 0, logits / rules.repetition, logits * rules.repetition)
            logits.copy_(torch.where(seen | self.in_prompt, scaled, logits))
            logits -= rules.frequency * self.counts + rules.presence * seen
        for processor in rules.processors:
            logits.copy_(processor([*self.prompt, *self.output], logits))

    def drew(self, token: int) -> None:
        self.output.append(token)
        if self.rules.penalizes:
            self.counts[token] += 1


def token_logprobs(logits: Tensor, token: int, k: int) -> TokenLogprobs:
    """(token, log-probability, rank) of `token` and of the k likeliest; logits [V] as they came."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs[token]
    found = [(token, float(own), int((logprobs > own).sum()) + 1)]
    values, ids = logprobs.topk(k)
    likeliest = zip(ids.tolist(), values.tolist(), range(1, k + 1), strict=True)
    return found + [entry for entry in likeliest if entry[0] != token]
