"""Renders chat messages as the text of a prompt, with the chat template of the tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jinja2

from nanovllm.api.checks import check_scalar
from nanovllm.api.time_limit import call_with_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Message = dict[str, Any]
# Arguments of apply_chat_template that `render` sets itself.
RESERVED = {"self", "conversation", "conversations", "messages", "tokenize"}
# Limits of a template that is passed with a request. The text of the longest context of a model has
# about a tenth of MAX_CHARACTERS.
MAX_SECONDS = 10
MAX_CHARACTERS = 2**26


def as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Return a list of conversations. `messages` is one conversation, or a list of them."""
    if not isinstance(messages, list | tuple):
        raise TypeError(
            'messages must be a list like [{"role": "user", "content": "..."}], or a list of '
            f"such lists, not {messages!r}"
        )
    is_one = not messages or not isinstance(messages[0], list | tuple)
    conversations = [messages] if is_one else list(messages)
    if not all(conversations):
        raise ValueError("the conversation is empty; give at least one message")
    return cast("list[Sequence[Message]]", conversations)


def render(
    conversation: Iterable[Message],
    tokenizer: Tokenizer,
    variables: dict[str, Any],
    overrides: dict[str, Any] | None,
) -> str:
    """Return the text of a conversation.

    variables: the arguments of `apply_chat_template`, such as a chat template and its variables.
    overrides: the argument chat_template_kwargs of a call. It overrides `variables`, as in vLLM.

    A template that is passed with a request may run forever, so it has a time limit.
    """
    overrides = {} if overrides is None else overrides
    check_scalar("chat_template_kwargs", overrides, dict)
    for name in overrides:
        if not isinstance(name, str) or name in RESERVED:
            raise ValueError(
                f"chat_template_kwargs has {name!r:.80}, which cannot be a variable of a chat "
                "template; remove it"
            )
    variables = variables | overrides
    template = variables.get("chat_template")
    if template is None:
        return render_without_limit(conversation, tokenizer, variables)
    check_scalar("chat_template", template, str)
    try:
        return call_with_limit(
            lambda: render_without_limit(conversation, tokenizer, variables), MAX_SECONDS
        )
    except TimeoutError:
        raise ValueError(
            f"chat_template={template!r:.80} takes more than {MAX_SECONDS} seconds; "
            "end its loops earlier"
        ) from None


def render_without_limit(
    conversation: Iterable[Message], tokenizer: Tokenizer, variables: dict[str, Any]
) -> str:
    template = variables.get("chat_template")
    messages = plain_messages(conversation, tokenizer, template)
    try:
        return apply(tokenizer, messages, variables)
    except Exception as error:  # A template can raise any error, such as ZeroDivisionError.
        shown = "the tokenizer's" if template is None else f"{template!r:.80}"
        raise ValueError(
            "the chat template cannot render these messages "
            f"({type(error).__name__}: {error}); change them, or use "
            f"chat_template=... to replace the template, which is {shown}"
        ) from error


def apply(tokenizer: Tokenizer, messages: list[Message], variables: dict[str, Any]) -> str:
    if (template := variables.get("chat_template")) is not None:
        limit_template(tokenizer.get_chat_template(template))
    return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, **variables))


def limit_template(template: str) -> None:
    """Limit the length of the text that a template returns.

    Raises ValueError if the template has the operator **, because one power of large numbers can
    take hours. During this time no other thread can run, and Ctrl-C has no effect.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tokens = [t for t in jinja2.Environment().lex(template) if t[1] != "whitespace"]
    for (*_, before), (_, kind, token) in itertools.pairwise(tokens):
        # After "(" or ",", ** does not compute a power but unpacks the arguments of a call.
        if kind == "operator" and token == "**" and before not in ("(", ","):
            raise ValueError("the operator ** is not accepted")
    # transformers caches compiled templates, each with its own environment.
    _compile_jinja_template(template).environment.concat = join


def join(parts: Iterable[str]) -> str:
    """Concatenate the parts of a text. Raises ValueError if the text is too long."""
    kept = []
    size = 0
    for part in parts:
        kept.append(part)
        size += 1 + len(part)  # empty parts take memory too
        if size > MAX_CHARACTERS:
            raise ValueError(f"the text has more than {MAX_CHARACTERS} characters")
    return "".join(kept)


def plain_messages(
    conversation: Iterable[Message], tokenizer: Tokenizer, chat_template: str | None
) -> list[Message]:
    """Check the messages. Join content parts, unless the chat template accepts parts."""
    messages = []
    joins_parts = None  # known after the first message with parts
    for message in conversation:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"a chat message needs a 'role' and 'content', not {message!r}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [part_text(part) for part in content]
            parts = [{"type": "text", "text": text} for text in texts]
            if joins_parts is None:
                joins_parts = not takes_parts(tokenizer, chat_template)
            message = message | {"content": "\n".join(texts) if joins_parts else parts}
        elif not isinstance(content, str) and message["role"] in ("system", "user"):
            raise TypeError(
                f"the content of a message must be a string or a list of parts, not {content!r}"
            )
        messages.append(message)
    return messages


def part_text(part: Any) -> str:
    """Return the text of a content part: a string, or {"type": "text", "text": "..."}."""
    if isinstance(part, dict) and part.get("type") == "text":
        part = part.get("text")
    if not isinstance(part, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(
            f"a content part of type {kind!r} is not supported: the models take text only, as "
            '{"type": "text", "text": "..."}'
        )
    return part


def takes_parts(tokenizer: Tokenizer, chat_template: str | None) -> bool:
    """Return whether the chat template accepts content parts, and renders only their text."""
    parts = [{"type": "text", "text": "probe text", "name": "probe name"}]
    probe: list[Message] = [{"role": "user", "content": parts}]
    try:
        shown = apply(tokenizer, probe, {"chat_template": chat_template})
    except Exception:  # A template that takes strings only may fail in any way.
        return False
    return "probe text" in shown and "probe name" not in shown
