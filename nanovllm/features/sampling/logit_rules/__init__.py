"""Logit rules of rows: penalties, bias, masks, logits processors, and log-probabilities.

engine/logit_rules.py makes the rules of a request from its SamplingParams.

row_rules     the rules of all rows of a step, applied to their logits
rules_of_row  the rules of one row, of which some need its output on the host
penalties     the changes to logits of known tokens
logprobs      the log-probabilities that rows report
"""
