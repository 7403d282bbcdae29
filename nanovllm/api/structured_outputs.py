"""StructuredOutputsParams: the format that the text of an output must have.

features/structured.py compiles the format to a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.api.checks import check_scalars, refuse_unknown_fields

# Fields of vLLM that do not exist here, and what to use instead.
ELSEWHERE = {
    "disable_additional_properties": "set additionalProperties to false in the schema",
    "disable_any_whitespace": "JSON is always on one line",
    "disable_fallback": "llguidance is the only backend",
    "structural_tag": "write a grammar of the whole output, with its tags",
    "whitespace_pattern": (
        'put it into the schema: {"x-guidance": {"whitespace_pattern": "..."}, ...}'
    ),
}


@refuse_unknown_fields("field of StructuredOutputsParams", ELSEWHERE)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """The format that the text of an output must have. Set exactly one of these fields:

    json: the output matches this JSON schema. It is a dict, a string or a pydantic model.
    regex: the whole output matches this regular expression. Look-around and back-references are
        not supported.
    choice: the output is one of these strings.
    grammar: the output matches this context-free grammar in GBNF, or in Lark's notation with the
        rule `start`.
    json_object: if True, the output is any JSON object.

    Raises TypeError for a wrong type or an unknown field. Raises ValueError if not exactly one
    field is set, or if `json` is not JSON. The grammar is compiled, and may be refused, when a
    request uses it.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        check_scalars(self)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(names)}, not {' and '.join(given) or 'none'}"
            )
        self.source()

    def source(self) -> tuple[str, str, str]:
        """Return the name of the field that is set, its format in llguidance, and its text."""
        if self.json is not None:
            return "json", "json_schema", schema_text(self.json)
        if self.regex is not None:
            return "regex", "regex", self.regex
        if self.grammar is not None:
            return "grammar", "grammar", self.grammar
        if self.choice is None:
            return "json_object", "json_schema", '{"type": "object"}'
        choice = self.choice
        is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
        if not is_list or not all(isinstance(text, str) for text in choice):
            raise TypeError(f"choice must be a list of strings, not {choice!r}")
        if not choice:
            raise ValueError("choice is empty; give at least one string")
        # The choices form one terminal. llguidance limits the rules that begin at one position.
        strings = " | ".join(json.dumps(text) for text in choice)
        return "choice", "lark", f"start: CHOICE\nCHOICE: {strings}"


def schema_text(schema: Any) -> str:
    """Return a JSON schema, given as a pydantic model, a dict or a string, as a string."""
    value = schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, Mapping):
            return json.dumps(value)
    except RecursionError:
        raise ValueError("json is nested too deeply; flatten the schema, or use $ref") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json={schema!r:.80} is not JSON: {error}") from None
    raise TypeError(
        "json must be a JSON schema, as a dict or a string, or a pydantic model, not "
        f"{schema!r:.80}"
    )
