"""Values of hf_overrides, and those that are refused. test_rope.py extends a context with them."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_llm

from nanovllm.models.rope import RopeConfig


@pytest.mark.parametrize(
    ("overrides", "error", "words"),
    [
        ({"rope_scalin": {}}, ValueError, "did you mean 'rope_scaling'"),
        ({"rope_scaling": 4}, ValueError, "rope_scaling must be"),
        ({"factor": 4.0}, ValueError, "'factor' is a field of 'rope_scaling'"),
        ({1: None}, ValueError, "unknown field"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ValueError, "with hf_overrides: rope type"),
        ({"vocab_size": "many"}, ValueError, "vocab_size must be"),
        (lambda config: config, TypeError, "hf_overrides must be a dict"),
    ],
)
def test_wrong_overrides(path: Path, overrides: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        random_llm(path, hf_overrides=overrides)


def test_an_override_of_a_plain_field(path: Path) -> None:
    llm = random_llm(path, hf_overrides={"rms_norm_eps": 1e-3, "rope_theta": 2e4})
    config = llm.engine.runner.model.config
    assert (config.rms_norm_eps, config.rope.rope_theta) == (1e-3, 2e4)
    overrides = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 3e4}
    config = random_llm(path, hf_overrides=overrides).engine.runner.model.config
    assert config.rope == RopeConfig(3e4, "linear", 2.0, 512)
