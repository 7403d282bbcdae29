"""Trains qwen3-nano: `python -m tools.training.train`, about an hour on 2 cores.

It writes a Hugging Face checkpoint to --out. While it runs, it saves its state in a directory with
the same name and the suffix .resume. After an interruption, the same command resumes from there.

Recipe: conversations of one to three turns drawn anew from data.py; loss on the answers only;
batches of equal padded size; Muon for the matrices (Jordan et al. 2024) and AdamW for embeddings
and norms; a linear warm-up and decay; bf16 arithmetic with fp32 master weights if the processor has
bf16. Training runs in pools. Pool i draws its conversations from seed i, so a resumed run draws the
same conversations as an uninterrupted run.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from tools.training.data import draw
from tools.training.tokenizer import END_OF_TEXT, IM_END, build

MODELS = ("qwen3-nano", "qwen3.5-nano")  # the second with linear attention in three of five layers
POOL = 4096  # conversations drawn, sorted by length and batched at a time
BATCH_TOKENS = 8192  # padded tokens in a batch
SAVE_EVERY = 10  # pools
SYSTEM = ("You are a helpful assistant.", "You are qwen3-nano.", "Answer briefly.")

ABOUT = """Makes the text, the tokenizer and the weights of qwen3-nano, in about an hour on 2 cores.
It REPLACES the embedded model unless --out names another directory. You can interrupt it: the same
command resumes from the last save, in the directory --out with the suffix .resume. Remove that
directory to start again. Grade the result with python -m tools.training.grade --model."""

Conversation = tuple[list[int], list[bool]]  # token ids; whether the loss counts each


def model_config(name: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
        "dtype": "bfloat16",
    }
    if name == "qwen3-nano":
        return Qwen3Config(**common)
    return Qwen3_5TextConfig(
        **common,
        layer_types=[f"{'full' if i in (2, 4) else 'linear'}_attention" for i in range(5)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )


def conversation(rng: random.Random) -> list[tuple[str, bool]]:
    """Draw the parts of one training text, each with whether the loss counts it."""
    if rng.random() < 0.15:  # no template: the answer is on the next line
        sample = draw(rng)
        return [(sample.question + "\n", False), (sample.answer + END_OF_TEXT, True)]
    parts = []
    if rng.random() < 0.1:
        parts.append((f"<|im_start|>system\n{rng.choice(SYSTEM)}<|im_end|>\n", False))
    thought = "<think>\n\n</think>\n\n" if rng.random() < 0.1 else ""
    for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 3))):
        sample = draw(rng)
        ask = f"<|im_start|>user\n{sample.question}<|im_end|>\n<|im_start|>assistant\n{thought}"
        parts += [(ask, False), (sample.answer + IM_END, True), ("\n", False)]
    return parts


def pool(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[Conversation]]:
    """Yield batches of conversations of similar length, in random order."""
    rng = random.Random(seed)
    drawn = [conversation(rng) for _ in range(POOL)]
    pieces = tokenizer([text for parts in drawn for text, _ in parts])["input_ids"]
    encoded: list[Conversation] = []
    num_parts = 0
    for parts in drawn:
        ids: list[int] = []
        counts: list[bool] = []
        for _, counted in parts:
            ids += pieces[num_parts]
            counts += [counted] * len(pieces[num_parts])
            num_parts += 1
        encoded.append((ids, counts))
    encoded.sort(key=lambda c: len(c[0]))
    batches: list[list[Conversation]] = [[]]
    for item in encoded:
        if (len(batches[-1]) + 1) * len(item[0]) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(item)
    rng.shuffle(batches)
    yield from batches


def collate(batch: list[Conversation], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids [N, L] and targets [N, L]. A target of -1 does not count."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), -1, dtype=torch.long)
    for i, (row, counted) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        after = torch.tensor([t if c else -1 for t, c in zip(row[1:], counted[1:], strict=True)])
        targets[i, : len(row) - 1] = after
    return ids.to(device), targets.to(device)


def loss_of(model: PreTrainedModel, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # Padding is on the right, so with a causal mask no counted position attends to it.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    counted = targets >= 0
    logits = model.lm_head(hidden[counted])
    return torch.nn.functional.cross_entropy(logits.float(), targets[counted])


def optimizers(model: PreTrainedModel, lr: float) -> list[torch.optim.Optimizer]:
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    outer = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(inner, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def rate(step: float) -> float:
    """Return the share of the peak learning rate: warm-up, plateau, linear decay.

    step: the share of the run that is done.
    """
    return min(step / 0.01, 1.0, max(0.0, 1.0 - step) / 0.5)


def save_state(
    model: PreTrainedModel, opts: list[torch.optim.Optimizer], path: Path, done: int
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{n}": p.detach().clone() for n, p in model.named_parameters()}
    for k, opt in enumerate(opts):
        for i, state in opt.state_dict()["state"].items():
            tensors |= {f"opt.{k}.{i}.{n}": torch.as_tensor(v).clone() for n, v in state.items()}
    save_file(tensors, path / "new.safetensors")
    (path / "new.safetensors").replace(path / "state.safetensors")
    (path / "progress.json").write_text(json.dumps({"pools": done}))


def load_state(model: PreTrainedModel, opts: list[torch.optim.Optimizer], path: Path) -> int:
    tensors = load_file(path / "state.safetensors")
    for name, p in model.named_parameters():
        p.data.copy_(tensors[f"model.{name}"])
    for k, opt in enumerate(opts):
        full = opt.state_dict()
        for key, value in tensors.items():
            kind, *rest = key.split(".")
            if kind == "opt" and int(rest[0]) == k:
                full["state"].setdefault(int(rest[1]), {})[rest[2]] = value
        opt.load_state_dict(full)
    pools: int = json.loads((path / "progress.json").read_text())["pools"]
    return pools


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a Hugging Face checkpoint in bf16."""
    tensors = {
        n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        eos_token_id=tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Only settings and a class name that all versions of transformers know.
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.eos_token,
        "model_max_length": tokenizer.model_max_length,
        "pad_token": tokenizer.pad_token,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.training.train", description=ABOUT)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="directory of the checkpoint (the embedded model)")
    help = f"pools of {POOL} conversations (%(default)s)"
    parser.add_argument("--pools", type=int, default=133, help=help)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cuda or cpu (%(default)s)")
    args = parser.parse_args()

    if args.out is None:
        args.out = Path(__file__).parents[2] / "nanovllm" / "loading" / args.model
    torch.manual_seed(0)
    tokenizer = build()
    config = model_config(args.model, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(args.device)
    opts = optimizers(model, args.lr)
    resume = args.out.with_name(args.out.name + ".resume")
    done = load_state(model, opts, resume) if (resume / "progress.json").exists() else 0
    parameters = sum(p.numel() for p in model.parameters())
    sizes = f"{parameters:,} parameters, {len(tokenizer):,} tokens"
    print(f"{sizes}, starting at pool {done} of {args.pools}")
    has_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)  # not for Macs
    fast_bf16 = args.device != "cpu" or has_bf16()
    bar = tqdm(range(done, args.pools), initial=done, total=args.pools, unit="pool")
    for index in bar:
        batches = list(pool(tokenizer, index))
        losses = []
        for i, batch in enumerate(batches):
            share = rate((index + i / len(batches)) / args.pools)
            ids, targets = collate(batch, args.device)
            with torch.autocast(args.device, torch.bfloat16, enabled=fast_bf16):
                loss = loss_of(model, ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = args.lr * share
                opt.step()
                opt.zero_grad()
            losses.append(loss.item())
        bar.set_postfix(loss=f"{sum(losses) / len(losses):.4f}")
        if (index + 1) % SAVE_EVERY == 0 or index + 1 == args.pools:
            save_state(model, opts, resume, index + 1)
            export(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
