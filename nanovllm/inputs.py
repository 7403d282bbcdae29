"""Prompts: the forms that callers may pass, and how they are parsed."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypedDict


class Array(Protocol):
    """A NumPy array or a torch tensor."""

    def tolist(self) -> Any: ...


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: list[int]
    prompt: str  # returned with the result, otherwise unused


# A string, token ids, or a dict with "prompt", "prompt_token_ids", or both: a text and its ids.
Prompt: TypeAlias = str | list[int] | Array | Mapping[str, Any]
ParsedPrompt: TypeAlias = tuple[str | None, list[int] | None]  # text and token ids
# Whether to show a progress bar. As in vLLM, a function that makes it is accepted too.
ShowProgress: TypeAlias = bool | Callable[..., Any]


def as_list(prompts: Prompt | Iterable[Prompt], name: str = "prompts") -> list[Prompt]:
    """Return a list of prompts. An array of two dimensions has one prompt in each row.

    Raises TypeError if `prompts` is neither a prompt nor a list; `name` is its name in the message.
    """
    items: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(items, str | Mapping):
        return [items]
    if not isinstance(items, list | tuple):
        raise TypeError(
            f"{name} must be a string, token ids, a dict, or a list of these, not {prompts!r}"
        )
    is_one_prompt = is_number(items[0]) if items else getattr(prompts, "ndim", 0) == 1
    return [list(items)] if is_one_prompt else list(items)


def is_number(item: Any) -> bool:
    """Return whether an item is a number, also one of NumPy or torch, and thus part of a prompt."""
    is_scalar = getattr(item, "shape", None) == () and not isinstance(item, str)  # np.str_ has one
    return isinstance(item, int | float) or is_scalar


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


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Return the text and the token ids of one prompt. One of them may be None.

    A string has no ids yet. Token ids are a list, or anything with `tolist`. A dict may have both:
    the ids are computed, and the text is only reported. Raises TypeError for a value of a wrong
    type, and ValueError for a dict without "prompt" and "prompt_token_ids" or with other keys.
    """
    if isinstance(prompt, str):
        return prompt, None
    text: str | None = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        if not given or not given.keys() <= {"prompt", "prompt_token_ids"}:
            hint = "; use chat for messages" * ("role" in given)
            hint += "; pass the input_ids of a tokenizer's result alone" * ("input_ids" in given)
            raise ValueError(
                "a dict prompt needs 'prompt' or 'prompt_token_ids', and nothing else, not "
                f"{sorted(map(str, prompt))}{hint}"
            )
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the text of a prompt must be a string, not {text!r}")
        if ids is None:
            return text, None
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, list | tuple):
        raise TypeError(f"a prompt must be a string, a list of token ids or a dict, not {ids!r}")
    return text, list(ids) if set(map(type, ids)) == {int} else [as_int(token) for token in ids]


def as_int(token: Any) -> int:
    """Return a token id as an int. It may be an integer of NumPy or torch."""
    try:
        if not isinstance(token, bool):
            return operator.index(token)
    except TypeError:
        pass
    raise TypeError(f"a token id must be an int, not {token!r}")
