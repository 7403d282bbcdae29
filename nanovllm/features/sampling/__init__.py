"""Options of SamplingParams.

logit_rules    rules that change a row's logits, and log-probabilities
structured     structured outputs: the grammars of llguidance
ngram          drafts from earlier n-grams, and how they are verified
tool_calls     parsers of the tool calls in an answer
"""
