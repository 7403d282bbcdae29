"""An unknown name is refused, and signatures list every field."""

import copy
import dataclasses
import inspect
import pickle
import pydoc

import pytest

from nanovllm import LLM, BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from nanovllm.config import EngineConfig


def test_signatures_list_every_field() -> None:
    for thing, fields in ((SamplingParams, SamplingParams), (LLM, EngineConfig)):
        shown = inspect.signature(thing).parameters
        for field in dataclasses.fields(fields):
            assert shown[field.name].default == field.default
            assert f"{field.name}: " in pydoc.render_doc(thing, renderer=pydoc.plaintext)
    assert inspect.signature(LLM).parameters == inspect.signature(EngineConfig).parameters
    assert next(iter(inspect.signature(LLM).parameters)) == "model"


UNKNOWN_FIELDS = [
    (SamplingParams, {}, "max_token", "did you mean 'max_tokens'"),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 3}, "beam_with", "did you mean 'beam_width"),
    (PoolingParams, {}, "dimension", "did you mean 'dimensions'"),
    (PoolingParams, {}, "size", "known: dimensions, normalize, prompt_name"),
    (StructuredOutputsParams, {"regex": "a"}, "grammer", "did you mean 'grammar'"),
]


@pytest.mark.parametrize(("kind", "fields", "name", "hint"), UNKNOWN_FIELDS)
def test_an_unknown_field_is_an_error(kind, fields, name, hint) -> None:
    """Also if it is set later, where a typing error would otherwise change nothing."""
    with pytest.raises(TypeError, match=f"unknown field of {kind.__name__} '{name}'; {hint}"):
        kind(**fields, **{name: 1})
    params = kind(**fields)
    with pytest.raises((AttributeError, TypeError), match=name):
        setattr(params, name, 1)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
