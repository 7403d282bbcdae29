"""Converts prompts, in every form that callers may pass, to text and lists of token ids."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict


class Array(Protocol):
    """A NumPy array or a torch tensor."""

    def tolist(self) -> Any: ...


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # returned with the result, otherwise unused


# A string, token ids, or a dict with "prompt", "prompt_token_ids", or both: a text and its ids.
# A tokenizer's BatchEncoding, with "input_ids", is a Mapping too.
Prompt: TypeAlias = str | list[int] | Array | Mapping[str, Any]


class CallArguments(TypedDict, total=False):
    """Further arguments of vLLM's `generate` and `chat`, with the values that are accepted."""

    chat_template_content_format: Literal["auto"] | None
    lora_request: Sequence[None] | None
    mm_processor_kwargs: dict[str, Any] | None
    priority: Literal[0] | Sequence[Literal[0]] | None
    prompt_token_ids: None
    tokenization_kwargs: dict[str, Any] | None


ENCODING_KEYS = {"input_ids", "attention_mask", "token_type_ids", "special_tokens_mask"}


def as_list(prompts: Prompt | Iterable[Prompt], name: str = "prompts") -> list[Prompt]:
    """Return a list of prompts. Token ids of two dimensions are one prompt for each row."""
    items = plain_ids(prompts)
    if isinstance(items, str | Mapping):
        return [items]
    if not isinstance(items, list | tuple):
        raise TypeError(
            f"{name} must be a string, token ids, a dict, or a list of these, not {prompts!r}"
        )
    if not items:
        # An empty array is an empty prompt, but an empty list has no prompts.
        return [] if items is prompts else [[]]
    is_one_prompt = all(is_number(item) for item in items)
    return [list(items)] if is_one_prompt else list(items)


def is_number(item: Any) -> bool:
    """Return whether an item is a number, and thus part of a prompt, even if of a wrong type."""
    return isinstance(item, int | float) or getattr(item, "shape", None) == ()


def pair_up(
    prompts: Prompt | Iterable[Prompt], params: Any, kind: type, name: str, optional: bool = True
) -> list[tuple[Prompt, Any]]:
    """Return each prompt with its parameters.

    params: one object for all prompts, or a list with one for each.
    kind: the class of the parameters.
    name: the name of the argument `params` in error messages.
    optional: whether None is accepted.
    """
    items = as_list(prompts)
    each = list(params) if isinstance(params, list | tuple) else [params] * len(items)
    if len(each) != len(items):
        raise ValueError(f"{len(items)} prompts but {len(each)} {name}; give one, or one for each")
    for item in each:
        if not isinstance(item, kind) and not (optional and item is None):
            raise TypeError(f"{name} must be a {kind.__name__}, not {item!r}")
    return list(zip(items, each, strict=True))


def split_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt; one of them may be None."""
    text: object = None
    ids: object = prompt
    if isinstance(prompt, str):
        text, ids = prompt, None
    elif isinstance(prompt, Mapping) and "input_ids" not in prompt:
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        given = {name for name, value in prompt.items() if value is not None}
        if not given or not given <= {"prompt", "prompt_token_ids"}:
            hint = "; use chat for messages" * ("role" in given)
            raise ValueError(
                "a dict prompt needs 'prompt' or 'prompt_token_ids', and nothing else, not "
                f"{sorted(map(str, prompt))}{hint}"
            )
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the text of a prompt must be a string, not {text!r}")
    ids = plain_ids(ids)
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]  # a tokenizer's result with return_tensors has one row
    if ids is None and text is not None:
        return text, None
    if not isinstance(ids, list | tuple):
        raise TypeError(f"a prompt must be a string, a list of token ids or a dict, not {ids!r}")
    return text, list(ids) if set(map(type, ids)) == {int} else [as_int(token) for token in ids]


def as_int(token: Any) -> int:
    """Return a token id as an int. It may be an integer of NumPy or torch."""
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except Exception:  # a tensor can raise any error
        pass
    raise TypeError(f"a token id must be an int, not {token!r}")


def plain_ids(prompt: Any) -> Any:
    """Return the token ids of an array, a tensor or a BatchEncoding as lists.

    The attention mask of a BatchEncoding removes padding. Several rows give a list of lists. Any
    other object is returned unchanged.
    """
    if getattr(prompt, "ndim", 0) > 2:
        raise ValueError(
            f"token ids have one dimension, or two for several prompts, not {tuple(prompt.shape)}"
        )
    if not isinstance(prompt, Mapping) or "input_ids" not in prompt:
        return dense(prompt) if hasattr(prompt, "tolist") else prompt
    if not prompt.keys() <= ENCODING_KEYS:
        raise ValueError(
            f"a prompt with input_ids may also hold {', '.join(sorted(ENCODING_KEYS))}; remove "
            f"{', '.join(sorted(map(str, prompt.keys() - ENCODING_KEYS)))}"
        )
    mask = prompt.get("attention_mask")
    return plain_ids(prompt["input_ids"]) if mask is None else unpadded(prompt["input_ids"], mask)


def dense(array: Any) -> Any:
    """Return the values of an array or tensor as lists."""
    try:
        return array.tolist()
    except Exception as error:  # a tensor that is sparse, or on the device "meta"
        raise TypeError(
            f"token ids cannot be read from {type(array).__name__} ({type(error).__name__}: "
            f"{error!s:.200}); give a list or a dense tensor"
        ) from error


def unpadded(ids: Any, mask: Any) -> list[Any]:
    """Return the token ids whose attention mask is 1, as a list, or as one list for each row."""
    ids, mask = plain_ids(ids), plain_ids(mask)
    are_lists = isinstance(ids, list | tuple) and isinstance(mask, list | tuple)
    if not are_lists or len(ids) != len(mask):
        raise ValueError(
            f"attention_mask must have the shape of input_ids, not {mask!r:.80} for {ids!r:.80}"
        )
    if any(isinstance(plain_ids(row), list | tuple) for row in (*ids, *mask)):
        return [unpadded(*row) for row in zip(ids, mask, strict=True)]
    for value in mask:
        if plain_ids(value) not in (0, 1):
            raise ValueError(f"attention_mask must hold 1, or 0 for padding, not {value!r}")
    return list(itertools.compress(ids, mask))
