"""Renders chat messages as the text of a prompt, with the chat template of the tokenizer."""

import json
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from nanovllm.engine.detokenizer import Tokenizer
from nanovllm.utils.checks import check_scalar, located

Message = dict[str, Any]


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
    conversations: list[Any] = [messages] if is_one else list(messages)
    if not all(conversations):
        raise ValueError("the conversation is empty; give at least one message")
    return conversations


def render(
    conversation: Iterable[Message],
    tokenizer: Tokenizer,
    variables: dict[str, Any],
    overrides: dict[str, Any] | None = None,
) -> str:
    """Return the text of a conversation.

    variables: the arguments of `apply_chat_template`: a chat template and its variables.
    overrides: the argument chat_template_kwargs of a call. It overrides `variables`, as in vLLM.
    """
    if overrides is not None:
        check_scalar("chat_template_kwargs", overrides, dict)
        variables = variables | overrides
    if (template := variables.get("chat_template")) is not None:
        check_scalar("chat_template", template, str)
        if os.path.isfile(template):
            raise ValueError(
                f"chat_template={template!r} is a file; pass its text: "
                f"Path({template!r}).read_text()"
            )
    known = str(template or getattr(tokenizer, "chat_template", ""))  # the embedded one knows none
    if variables.get("tools") and "tools" not in known:
        text = "the chat template ignores `tools`; give another one, or describe them in a message"
        warnings.warn(text, stacklevel=2)  # which Python shows once; the log would repeat it
    messages = list(conversation)
    failure: Exception | None = None
    # A template that joins the arguments of tool calls with text raises a TypeError for a dict.
    for as_text in (False, True):
        plain = plain_messages(messages, tokenizer, template, as_text)
        try:
            return str(tokenizer.apply_chat_template(plain, tokenize=False, **variables))
        except Exception as error:  # A template can raise any error, such as ZeroDivisionError.
            failure = error
            if not isinstance(error, TypeError):
                break
    shown = "the tokenizer's" if template is None else f"{template!r:.80}"
    raise ValueError(
        "the chat template cannot render these messages "
        f"({type(failure).__name__}: {failure}); change them, or use "
        f"chat_template=... to replace the template, which is {shown}"
    ) from failure


def plain_messages(
    conversation: Iterable[Message], tokenizer: Tokenizer, chat_template: str | None, as_text: bool
) -> list[Message]:
    """Check the messages, and parse their tool calls.

    Joins content parts, unless the chat template accepts parts.
    """
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
        if isinstance(calls := message.get("tool_calls"), list | tuple):
            message = message | {"tool_calls": [parsed_tool_call(call, as_text) for call in calls]}
        messages.append(message)
    return messages


def parsed_tool_call(call: Any, as_text: bool) -> Any:
    """Return a tool call whose arguments are a dict, as most chat templates expect, or JSON.

    In OpenAI's format they are a string in JSON, which may be empty. Raises ValueError if it is not
    JSON. A call without a function is returned unchanged.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with located(f"the arguments {arguments!r:.200} of a tool call are no JSON: "):
            parsed = json.loads(arguments)
        arguments = arguments if as_text else parsed
    elif as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


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
        text = tokenizer.apply_chat_template(probe, chat_template=chat_template, tokenize=False)
    except Exception:  # A template that takes strings only may fail in any way.
        return False
    return "probe text" in text and "probe name" not in text
