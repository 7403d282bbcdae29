"""Random checkpoints, engines of them, and graded answers of the embedded model."""

import json
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.models.model_config import NEEDED, ModelConfig
from tools.training import data
from tools.training.grade import wrong_answers

VOCAB = 199
FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}


# Of all families of models.
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    eos_token_id=0,
)


def make_config(
    family: str = "qwen3",
    head_dim: int = 32,
    kv_heads: int = 2,
    group: int = 2,
    tie: bool = False,
    **config: object,
) -> Any:
    # Tests that make no checkpoint do not wait for it.
    import transformers

    settings = SIZES | dict(
        architectures=[f"{FAMILIES[family]}ForCausalLM"],
        num_hidden_layers=2,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tie,
        bos_token_id=None,
    )
    if family != "qwen3":
        settings["hidden_size"] = settings.pop("head_dim") * kv_heads * group
    if family == "mistral":
        settings["sliding_window"] = None
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    return config_class(**(settings | config))


def model_config(family: str, **fields: object) -> ModelConfig:
    """The ModelConfig of a config.json with these fields. Sizes that it lacks are 1."""
    raw = dict.fromkeys(NEEDED, 1) | {"architectures": [f"{FAMILIES[family]}ForCausalLM"]}
    return ModelConfig.from_json(raw | fields, Path("config.json"))


def make_checkpoint(
    path: Path, family: str = "qwen3", *shape: int, seed: int = 0, **config: object
) -> torch.nn.Module:
    """Save a random checkpoint and return transformers' model of it, in float32."""
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")
    model = model_class(make_config(family, *shape, **config)).float().eval()
    randomize(model, scale=1.5)
    model.save_pretrained(path)
    return model


def randomize(model: torch.nn.Module, zero_centered: bool = False, scale: float = 1.2) -> None:
    """Set random weights that are large enough for decisive logits.

    Every norm weight and bias is random: fresh ones are 1 and 0, which would hide a dropped term.
    zero_centered: norms multiply by 1 + w.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "linear_attn.norm" in name:
                p.copy_(1 + 0.3 * torch.randn_like(p))
            elif "norm" in name:
                p.copy_((not zero_centered) + 0.3 * torch.randn_like(p))
            elif name.endswith("A_log"):
                p.copy_(torch.randn_like(p))
            elif name.endswith(("bias", "dt_bias")):
                p.copy_(0.5 * torch.randn_like(p))
            elif "embed" in name or "lm_head" in name:
                p.copy_(torch.randn_like(p) * 0.3)
            elif "conv1d" in name:
                p.copy_(torch.randn_like(p) * 0.7)
            else:
                p.copy_(torch.randn_like(p) * scale / p.shape[-1] ** 0.5)


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    """The weights of a model whose backend does not pack them, by their names in a checkpoint."""
    parts = llm.engine.runner.model.checkpoint_tensors()
    return {part.name: part.store.__self__ for part in parts}


def random_llm(path: Path, **options: object) -> LLM:
    settings = dict(dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_cache_blocks=64)
    return LLM(str(path), **(settings | options))


def wrong_by_task(
    llm: LLM, number: int = 25, every: int = 16
) -> dict[str, tuple[list[tuple[data.Sample, str]], int]]:
    """Of each task, the wrong answers with what was said, and how many questions there were:
    `number` of an open task, every so many of a closed one, each of whose answers is asked for in
    several phrasings.
    """
    asked = {
        task: data.graded_samples(task, number)[:: 1 if task in data.OPEN_TASKS else every]
        for task in data.ALL_TASKS
    }
    wrong = wrong_answers(llm, [s for samples in asked.values() for s in samples])
    return {
        task: ([pair for pair in wrong if pair[0].task == task], len(samples))
        for task, samples in asked.items()
    }


def edited(path: Path, tmp_path: Path, **changes: object) -> Path:
    """A copy of the checkpoint whose config.json differs; a change to None removes the field."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {k: v for k, v in config.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    return tmp_path


def prompts_of(*lengths: int, seed: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(1, 199, (n,), generator=generator).tolist()}
        for n in lengths
    ]


def check_greedy(model: torch.nn.Module, outputs: list[Any], tolerance: float = 1e-4) -> None:
    """Every token is the most likely one of transformers, with the same log-probability.

    Of two tokens whose log-probabilities differ by less than 2e-5, either is right: on one
    processor two differ by 9e-6.
    """
    for output in outputs:
        prompt = output.prompt_token_ids
        for sample in output.outputs:
            ids = list(sample.token_ids)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0]
            assert (logprobs.amax(-1) - chosen < 2e-5).all()
            if sample.logprobs is not None:
                ours = [
                    entry[token].logprob for token, entry in zip(ids, sample.logprobs, strict=True)
                ]
                torch.testing.assert_close(torch.tensor(ours), chosen, atol=tolerance, rtol=0)
