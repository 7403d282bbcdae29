"""Logit rules of a request: penalties, bias, masks, logits processors, and log-probabilities.

params               the rules of a request, made from SamplingParams
sampling_with_rules  the task that has them
row_rules            the rules of all rows of a step, applied to their logits
penalties            the changes to logits of known tokens
logprobs             the log-probabilities that rows report
"""
