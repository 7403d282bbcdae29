"""Unknown names and wrong values of fields are refused, and signatures list every field."""

import copy
import dataclasses
import inspect
import math
import pickle
import pydoc

import pytest
from wrong_values import WRONG

from nanovllm import (
    LLM,
    BeamSearchParams,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from nanovllm.config import EngineConfig, SpeculativeConfig
from nanovllm.utils.checks import scalar_fields


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


CONFIGS = [(EngineConfig, {}), (SpeculativeConfig, {}), (RepetitionDetectionParams, {})]


@pytest.mark.parametrize(("kind", "fields"), [*PARAMS, *CONFIGS])
def test_wrong_values_of_every_field(kind, fields) -> None:
    """Of other types, and just outside the limits that the annotation states."""
    for name, (scalar, limits, optional) in scalar_fields(kind).items():
        others = [value for value in WRONG[scalar] if type(value) not in (int, float)]
        others += [1.5] * (scalar is int) + [None] * (not optional)
        if name in ("logprobs", "prompt_logprobs"):
            others.remove(True)  # as in vLLM, it is 1
        outside = ["of no kind"] if limits else []
        if scalar in (int, float):
            low, high = limits or (-math.inf, math.inf)
            outside = [x for x in (low - 1, high + 1) if math.isfinite(x)] + [math.nan, -1e31, 1e31]
            outside = outside if scalar is float else outside[:-3]
        if name == "dtype":  # a name, whatever its type
            outside, others = outside + others, []
        for error, values in ((TypeError, others), (ValueError, outside)):
            for value in values:
                with pytest.raises(error, match=f"^{name} must be"):
                    kind(**fields | {name: value})
