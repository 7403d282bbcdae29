"""An unknown name is refused with the nearest one, and signatures list every field."""

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
    (SamplingParams, {}, "max_token", "max_tokens"),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 3}, "beam_with", "beam_width"),
    (PoolingParams, {}, "dimension", "dimensions"),
    (StructuredOutputsParams, {"regex": "a"}, "grammer", "grammar"),
]


@pytest.mark.parametrize(("kind", "fields", "name", "near"), UNKNOWN_FIELDS)
def test_an_unknown_field_names_a_similar_one(kind, fields, name, near) -> None:
    with pytest.raises(TypeError, match=f"'{name}'; did you mean '{near}'"):
        kind(**fields, **{name: 1})
    params = kind(**fields)
    with pytest.raises(AttributeError, match=name):  # a frozen one says that it is frozen
        setattr(params, name, 1)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
