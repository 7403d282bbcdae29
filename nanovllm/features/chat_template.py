"""Chat templates that are passed with a request. They have limits, because they may run forever."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jinja2

from nanovllm.engine.chat import Message, explain_template_error, render
from nanovllm.features.time_limit import call_with_limit
from nanovllm.utils.checks import check_scalar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

MAX_SECONDS = 10
MAX_CHARACTERS = 2**26  # about ten times as many as in the longest context of a model


def render_with_limits(
    conversation: Iterable[Message], tokenizer: Tokenizer, variables: dict[str, Any]
) -> str:
    """Return the text of a conversation, as `render` does, by `variables["chat_template"]`."""
    template = variables["chat_template"]
    check_scalar("chat_template", template, str)
    if "{" not in template and os.path.isfile(template):
        raise ValueError(
            f"chat_template={template!r} is a file; pass its text: Path({template!r}).read_text()"
        )

    def render_template() -> str:
        with explain_template_error(template):
            limit_template(tokenizer.get_chat_template(template))
        return render(conversation, tokenizer, variables)

    try:
        return call_with_limit(render_template, MAX_SECONDS)
    except TimeoutError:
        raise ValueError(
            f"chat_template={template!r:.80} takes more than {MAX_SECONDS} seconds; "
            "end its loops earlier"
        ) from None


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
