"""Logit rules: penalties, bias, masks, log-probabilities and logits processors of a request."""
