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


PARAMS = [
    (SamplingParams, {}),
    (BeamSearchParams, {"beam_width": 2, "max_tokens": 3}),
    (PoolingParams, {}),
    (StructuredOutputsParams, {"regex": "a"}),
]


@pytest.mark.parametrize(("kind", "fields"), PARAMS)
def test_an_unknown_field_is_an_error(kind, fields) -> None:
    """Also if it is set later, where a typing error would otherwise change nothing."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_token'"):
        kind(**fields, max_token=1)
    params = kind(**fields)
    with pytest.raises((AttributeError, TypeError), match="max_token"):
        params.max_token = 1
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
