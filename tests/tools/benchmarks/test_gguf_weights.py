"""A GGUF file of random weights has their numbers, under the names of llama.cpp."""

import pytest
import torch
from moe_checkpoints import make_moe_checkpoint
from safetensors.torch import load_file

from tools.benchmarks.gguf_weights import gguf_path, write_gguf

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("Q8_0", 0.01)])
def test_experts(kind: str, error: float, tmp_path) -> None:
    make_moe_checkpoint(tmp_path, moe_intermediate_size=64, num_experts=11)
    weights = load_file(tmp_path / "model.safetensors")
    reader = gguf.GGUFReader(write_gguf(tmp_path, kind))
    found = {
        t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors
    }
    for theirs, ours in [("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")]:
        stacked = found.pop(f"blk.1.ffn_{theirs}_exps.weight")
        for i, values in enumerate(stacked):
            expected = weights[f"model.layers.1.mlp.experts.{i}.{ours}.weight"]
            torch.testing.assert_close(values, expected, rtol=0, atol=error * expected.abs().max())
    assert reader.get_field("general.architecture").contents() == "qwen3moe"
    assert reader.get_field("qwen3moe.expert_count").contents() == 11
    assert sum(t.n_elements for t in reader.tensors) == sum(w.numel() for w in weights.values())


def test_other_models_are_refused_early(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    with pytest.raises(ValueError, match=r"qwen3_moe; this is one of qwen3_5_text"):
        gguf_path(tmp_path)
