"""The frequencies of each rope type are transformers', and a longer context can be asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edited, make_checkpoint, make_config, random_llm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm import SamplingParams
from nanovllm.loading.checkpoint import Checkpoint
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.rope import RopeConfig

YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "factor": 8.0,
}
CASES = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    *(LLAMA3 | {"original_max_position_embeddings": n} for n in (1, 64, 8192)),
    LLAMA3 | {"factor": 32.0, "high_freq_factor": 1.5},
    *(YARN | {"original_max_position_embeddings": n} for n in (8, 4096, 32768)),
    YARN | {"attention_factor": 1.5},
    YARN | {"beta_fast": 16, "beta_slow": 2},
    YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    YARN | {"factor": 1.0},
]


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("params", CASES, ids=str)
def test_the_frequencies_are_those_of_transformers(params: dict[str, Any], dim: int) -> None:
    """Bit for bit, so that the angles of far positions are equal too."""
    theirs = make_config("qwen3", dim, rope_parameters=dict(params))
    want, want_factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](theirs, torch.device("cpu"))
    ours = ModelConfig.from_json(theirs.to_dict(), Path("config.json"))
    frequencies, factor = ours.rope.frequencies(dim)
    assert torch.equal(frequencies, want)
    assert factor == pytest.approx(want_factor, abs=1e-12)


def test_yarn_extends_the_context(tmp_path) -> None:
    """As the cards of Qwen2.5 and Qwen3 say: by config.json, or by hf_overrides."""
    model = make_checkpoint(tmp_path, max_position_embeddings=64)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match="more than the 64 positions"):
        random_llm(tmp_path, max_model_len=200)
    llm = random_llm(tmp_path, max_model_len=200, hf_overrides={"rope_scaling": scaling})
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompt = [1 + i % 190 for i in range(150)]
    got = llm.generate(prompt, params, use_tqdm=False)[0]["token_ids"]
    path = tmp_path / "edited"
    path.mkdir()
    theta = model.config.rope_parameters["rope_theta"]
    edited(tmp_path, path, rope_parameters=scaling | {"rope_theta": theta})
    assert Checkpoint(path).model_config.max_position_embeddings == 256
    with torch.no_grad():
        theirs = type(model).from_pretrained(path).float().eval()
        logits = theirs(torch.tensor([[*prompt, *got]])).logits[0]
    assert got == logits[149:-1].argmax(dim=1).tolist()
    plain = random_llm(tmp_path).engine.runner.model.config
    assert plain.rope == RopeConfig(theta, original_max_position_embeddings=64)
