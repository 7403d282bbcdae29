"""Log-probabilities of tokens: how many a request asks for, and the texts of their tokens."""

from nanovllm.engine.detokenizer import CONTEXT, Tokenizer
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Logprob
from nanovllm.plan import TokenLogprobs


def num_logprobs(inputs: InputProcessor, name: str, value: int | None) -> int | None:
    """Return how many log-probabilities a field requests. Raises ValueError for too many."""
    if value is None:
        return None
    size, limit = inputs.vocab_size, inputs.max_logprobs
    limit = size if limit == -1 else min(size, limit)
    num = size if value == -1 else value
    if num > limit:
        raise ValueError(
            f"{name}={value} is more than max_logprobs={limit}; ask for fewer (-1 is the whole "
            f"vocabulary of {size}), or give LLM() a larger max_logprobs (-1: no limit)"
        )
    return num


def decode_logprobs(
    tokenizer: Tokenizer | None, entry: TokenLogprobs, seq: Sequence, position: int
) -> dict[int, Logprob]:
    """Return the log-probabilities at a position of the prompt or of the output."""
    first = seq.num_prompt if position >= seq.num_prompt else 0
    before = seq.token_ids[max(first, position - CONTEXT) : position]

    def text(token: int) -> str | None:
        return None if tokenizer is None else decode_token(tokenizer, token, before)

    return {token: Logprob(p, rank, text(token)) for token, p, rank in entry}


def decode_token(tokenizer: Tokenizer, token: int, before: list[int]) -> str:
    """Return the text of one token after the tokens `before`, as vLLM's `decoded_token`.

    The text of a token that completes a character is the whole character, and the text of the
    other tokens of the character is empty. A decoder removes the space at the start of a text;
    it is inserted again here.
    """
    rules = tokenizer.backend_tokenizer
    context = before[-CONTEXT:]
    for start in range(len(context), -1, -1):
        text: str = rules.decode([*context[start:], token], skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            piece = rules.id_to_token([*context[start:], token][0]) or ""
            num_spaces = len(piece) - len(piece.lstrip("▁"))
            return " " * (num_spaces - len(text) + len(text.lstrip(" "))) + text
    return ""
