"""The prefix cache on disk: the same KV and tokens after a restart, and never another model's."""

import json
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import fresh
import pytest
import torch
from adapters import lora, save_adapter
from checkpoints import edited, make_checkpoint, random_llm
from disk_history import DiskHistory
from engines import is_idle, still_serves
from host_cache_history import HostCacheHistory
from hybrid_checkpoints import make_hybrid_checkpoint
from oracle_engine import plain_sequence
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lessons.oracle.mutants import Mutant, apply
from lessons.oracle.oracle import run_history
from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import Block
from nanovllm.features.kv import disk_cache
from nanovllm.features.kv.host_cache.host_blocks import HostBlock

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
SHARED = [7 * i % 190 + 1 for i in range(100)]  # six blocks and four tokens
PROMPTS = [[*SHARED, *range(1, length)] for length in (3, 40, 80)]


def run(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    return llm.generate(prompts, GREEDY, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def kv_by_hash(llm: LLM) -> dict[bytes, tuple[list[int], bytes, bytes]]:
    """Of each cached block: its tokens, the hash of its parent, and its KV."""
    cache = llm.engine.runner.attention.cache.view(torch.uint8)
    return {
        block_hash: (
            block.token_ids,
            block.parent_block_hash,
            cache[:, :, block.block_id].numpy().tobytes(),
        )
        for block_hash, block in llm.engine.scheduler.block_manager.hash_to_block.items()
    }


def is_empty(llm: LLM) -> bool:
    return not kv_by_hash(llm) and llm.stats()["blocks_evictable"] == 0 and is_idle(llm.engine)


@pytest.fixture(scope="module")
def saved(path: Path, tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A directory with the prefix cache of an engine in float32, and the engine's tokens."""
    directory, llm = tmp_path_factory.mktemp("saved"), random_llm(path)
    outputs = tokens(run(llm))
    llm.save_prefix_cache(directory)
    return directory, outputs


# ---- random histories ----


class HostDiskHistory(HostCacheHistory, DiskHistory):
    """With a host cache, whose blocks are saved and loaded too."""

    def kv_of(self, block: Block) -> list[Any]:
        is_host = isinstance(block, HostBlock)
        return self.runner.host[block.block_id] if is_host else super().kv_of(block)

    def write_kv(self, block: Block, content: list[Any]) -> None:
        if isinstance(block, HostBlock):
            self.runner.host[block.block_id] = content
        else:
            super().write_kv(block, content)


@pytest.mark.parametrize("make", [DiskHistory, HostDiskHistory])
def test_random_histories_with_restarts(make: Any) -> None:
    histories = [run_history(seed, make=make) for seed in range(100)]
    assert sum(history.num_loaded for history in histories) > 500


FAULTS = {
    "a block is loaded with the KV of another one": Mutant(
        disk_cache, "restore", "[-1]]), i", "[-1]]), max(0, i - 1)"
    ),
    "a loaded block is found after any beginning": Mutant(
        disk_cache, "restore", "hash_block(parent_hash, token_ids)", "hash_block(b'', token_ids)"
    ),
    "the block before a cached one is saved": Mutant(
        disk_cache, "cached_blocks", "blocks.blocks[block_id]", "blocks.blocks[block_id - 1]"
    ),
    "a loaded block stays free": Mutant(
        disk_cache, "restore", "evictable[blocks.free.pop()]", "evictable[block.block_id]"
    ),
    "a block is loaded that is cached already": Mutant(
        disk_cache, "restore", "blocks.find(block_hash) is not None", "False"
    ),
    "another block is taken than the one with the KV": Mutant(
        disk_cache, "restore", "blocks.blocks[blocks.free[-1]]", "blocks.blocks[blocks.free[0]]"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    with pytest.raises(AssertionError, match="fails"):
        for seed in range(200):
            run_history(seed, make=DiskHistory, disks=apply(FAULTS[name]))


# ---- after a restart ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"attention_backend": "sdpa", "block_size": 5},
        {"quantization": "int8"},
        {"swap_space": 0.01},
    ],
    ids=str,
)
def test_the_same_kv_and_tokens(path: Path, tmp_path, options: dict[str, Any], caplog) -> None:
    first = random_llm(path, **options)
    computed, again = run(first), run(first)
    num_saved = first.save_prefix_cache(tmp_path)
    assert num_saved == len(kv_by_hash(first)) * options.get("block_size", 16) > 150
    second = random_llm(path, **options)
    assert second.load_prefix_cache(tmp_path) == num_saved
    assert f"saved the KV of {num_saved:,} tokens to {tmp_path}" in caplog.text
    assert f"loaded the KV of {num_saved:,} tokens from {tmp_path}" in caplog.text
    assert kv_by_hash(second) == kv_by_hash(first)
    assert is_idle(second.engine)
    outputs = run(second)
    # In bfloat16, a prompt with a cached prefix has other roundings than one without.
    assert tokens(outputs) == tokens(again)
    assert tokens(outputs) == tokens(computed) or options.get("dtype") == "bfloat16"
    size = options.get("block_size", 16)
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // size * size for prompt in PROMPTS
    ]


def test_the_last_used_prefix_is_loaded_first(path: Path, tmp_path) -> None:
    """Of two prompts of ten blocks, a cache of twelve gets the second and two blocks of the other."""
    old, new = ([start + i % 50 for i in range(160)] for start in (1, 100))
    llm = random_llm(path)
    for prompt in (old, new):
        run(llm, [prompt])
    llm.save_prefix_cache(tmp_path)
    with torch.inference_mode():  # tensors that are made in it are read-only outside
        small = random_llm(path, num_kv_cache_blocks=12)
    assert small.load_prefix_cache(tmp_path) == 12 * 16
    match = small.engine.scheduler.block_manager.match
    assert len(match(plain_sequence([*new, 0]))) == 10
    assert len(match(plain_sequence([*old, 0]))) == 2
    # What is used last is evicted last, as if the blocks were from this process.
    run(small, [[9] * 40])
    assert len(match(plain_sequence([*old, 0]))) == 0
    assert len(match(plain_sequence([*new, 0]))) > 5


def test_blocks_of_host_memory(path: Path, tmp_path) -> None:
    """What the device has no room for is saved from host memory, and loaded into it."""
    prompts = [[start + i % 50 for i in range(160)] for start in (1, 60, 120)]
    options = dict(num_kv_cache_blocks=13, swap_space=0.001)
    first, second = (random_llm(path, **options) for _ in range(2))
    expected = [tokens(run(first, [prompt])) for prompt in prompts]
    assert first.save_prefix_cache(tmp_path) == 30 * 16
    assert second.load_prefix_cache(tmp_path) == 30 * 16
    stats = second.stats()
    assert (stats["blocks_evictable"], stats["host_blocks"]) == (13, 17)
    assert second.load_prefix_cache(tmp_path) == 0
    outputs = [run(second, [prompt])[0] for prompt in prompts]
    assert [tokens([output]) for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [144] * 3
    assert second.stats()["host_loads"] > 9


def test_blocks_that_are_cached_already(path: Path, saved: tuple[Path, list[list[int]]]) -> None:
    """Also, blocks of the CPU's kernels have another layout than plain torch's."""
    plain, llm = random_llm(path, attention_backend="sdpa"), random_llm(path)
    with pytest.raises(ValueError, match=r"layout of the KV cache \(tiles of 16 slots; here rows"):
        plain.load_prefix_cache(saved[0])
    run(llm, PROMPTS[:1])
    before = kv_by_hash(llm)
    assert llm.load_prefix_cache(saved[0]) > 0
    after = kv_by_hash(llm)
    assert before.items() < after.items()
    assert llm.load_prefix_cache(saved[0]) == 0
    outputs = run(llm)
    assert tokens(outputs) == saved[1]
    assert outputs[2].num_cached_tokens == (len(PROMPTS[2]) - 1) // 16 * 16


def test_the_file_is_in_the_format_of_safetensors(path: Path, saved: tuple[Path, Any]) -> None:
    with safe_open(saved[0] / disk_cache.NAME, framework="pt") as file:
        kv, blocks = file.get_tensor("kv"), json.loads(file.metadata()["blocks"])
    assert kv.shape == (len(blocks), 2, 2, 2, 16, 32)
    assert [token for _, token_ids in blocks[:6] for token in token_ids] == SHARED[:96]


# ---- files that are refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"dtype \(torch.float32; here torch.bfloat16\), kv_cache_dtype \("),
        ({"block_size": 32}, r"block_size \(16; here 32\)"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype .*here torch.float8_e4m3fn"),
        ({"quantization": "int8"}, "quantization .*None; here int8"),
        ({"load_format": "dummy"}, "weights .*here random with seed 0"),
        (
            {"hf_overrides": {"rope_theta": 5e5}},
            r".*rope_theta of config.json \(None; here 500000.0\); use",
        ),
    ],
    ids=str,
)
def test_other_options(
    path: Path, saved: tuple[Path, Any], options: dict[str, Any], message: str
) -> None:
    llm = random_llm(path, **options)
    with pytest.raises(ValueError, match=f"they differ in {message}"):
        llm.load_prefix_cache(saved[0])
    assert is_empty(llm)
    still_serves(llm)


def test_another_model(path: Path, saved: tuple[Path, Any], tmp_path) -> None:
    """The same sizes and other weights. The same weights elsewhere are the same model."""
    make_checkpoint(tmp_path / "other", seed=1)
    other = random_llm(tmp_path / "other")
    with pytest.raises(
        ValueError,
        match=rf"differ in model \({path}; here {tmp_path}/other\), weights \(\w+; here \w+\); use",
    ):
        other.load_prefix_cache(saved[0])
    assert is_empty(other)
    copy = random_llm(Path(shutil.copytree(path, tmp_path / "copy")))
    copy.load_prefix_cache(saved[0])
    assert tokens(run(copy)) == saved[1]


def test_another_adapter_or_seed(path: Path, tmp_path) -> None:
    """The same tensors of an adapter with another scale, and random weights."""
    factors = lora(load_file(path / "model.safetensors"), "q_proj")
    for kind in ("adapter", "seed"):
        for value in (4, 8):
            options: dict[str, Any] = {"load_format": "dummy", "seed": value}
            if kind == "adapter":
                options = {"adapter": save_adapter(tmp_path / "a", factors, lora_alpha=value)}
            llm = random_llm(path, **options)
            if value == 8:
                with pytest.raises(ValueError, match=f"{kind} .*4.*; here .*8"):
                    llm.load_prefix_cache(tmp_path / kind)
            run(llm)
            assert llm.save_prefix_cache(tmp_path / kind) > 0
            assert llm.reset_prefix_cache()
            assert llm.load_prefix_cache(tmp_path / kind) > 0


def test_scales_that_load_weights_keeps(path: Path, tmp_path) -> None:
    file, options = edited(path, tmp_path) / "model.safetensors", {"kv_cache_dtype": "fp8"}
    save_file(load_file(file) | {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}, file)
    llm = random_llm(path, **options)
    llm.load_weights(tmp_path)
    run(llm)
    llm.save_prefix_cache(tmp_path)
    with pytest.raises(ValueError, match=r"they differ in kv_scales .*; here .*\(0.5, 1.0\)"):
        random_llm(tmp_path, **options).load_prefix_cache(tmp_path)


def test_a_checkpoint_that_has_changed(path: Path, tmp_path) -> None:
    llm = random_llm(edited(path, tmp_path))
    run(llm)
    (tmp_path / "other").mkdir()
    make_checkpoint(tmp_path / "other", seed=1)
    (tmp_path / "other" / "model.safetensors").replace(tmp_path / "model.safetensors")
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(ValueError, match="model.safetensors has changed since it was loaded"):
            call(tmp_path)
    assert not (tmp_path / disk_cache.NAME).exists()
    still_serves(llm)


def test_damaged_files(path: Path, saved: tuple[Path, Any], tmp_path) -> None:
    llm, good = random_llm(path), (saved[0] / disk_cache.NAME).read_bytes()
    rng = random.Random(0)
    damaged = [good[:length] for length in (0, 8, 100, len(good) // 2, len(good) - 1)]
    damaged += [good + b"\0", bytes(len(good)), good[16:] + good[:16]]
    places = [0, 7, 9, 100, len(good) - 1, *(rng.randrange(len(good)) for _ in range(30))]
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        (tmp_path / disk_cache.NAME).write_bytes(content)
        with pytest.raises(ValueError, match="prefix-cache.safetensors is damaged, remove it"):
            llm.load_prefix_cache(tmp_path)
        assert is_empty(llm)
    run(llm)
    llm.save_prefix_cache(tmp_path)  # replaces it
    llm.reset_prefix_cache()
    assert llm.load_prefix_cache(tmp_path) > 0
    assert tokens(run(llm)) == saved[1]


# ---- engines without a prefix cache on disk ----


def test_engines_that_are_refused(path: Path, llm: LLM, tmp_path) -> None:
    make_hybrid_checkpoint(tmp_path)
    disabled, hybrid = random_llm(path, enable_prefix_caching=False), random_llm(tmp_path)
    for engine, config, reason in (
        (disabled.engine, disabled._config, "enable_prefix_caching is False"),
        (hybrid.engine, hybrid._config, "the model has states of linear attention"),
        (llm.engine, replace(llm._config, tensor_parallel_size=2), "tensor_parallel_size=2 ranks"),
    ):
        for call in (disk_cache.save, disk_cache.load):
            with pytest.raises(ValueError, match=f"cannot be saved or loaded, because .*{reason}"):
                call(engine, config, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_nothing_to_save_or_load(path: Path, tmp_path) -> None:
    llm = random_llm(path)
    assert llm.load_prefix_cache(tmp_path / "nowhere") == 0
    assert llm.save_prefix_cache(tmp_path) == 0
    assert not (tmp_path / disk_cache.NAME).exists()
    run(llm)
    assert llm.save_prefix_cache(tmp_path) > 0
    llm.reset_prefix_cache()
    assert llm.save_prefix_cache(tmp_path) == 0  # and the file remains
    assert llm.load_prefix_cache(tmp_path) > 0
    with pytest.raises(OSError, match="cannot be written: .*Not a directory"):
        llm.save_prefix_cache(tmp_path / disk_cache.NAME / "below")
    for wrong in (tmp_path / disk_cache.NAME, "", None, 3, "~nobody-here/x"):
        for call in (llm.save_prefix_cache, llm.load_prefix_cache):
            with pytest.raises(ValueError, match="path must be a directory, not"):
                call(wrong)


# ---- at any time ----


def test_while_a_step_runs_without_requests(path: Path, saved: tuple[Path, Any]) -> None:
    """The step still writes to blocks that are free, because another thread aborts its request."""
    llm = random_llm(path)
    engine, launch, refused = llm.engine, llm.engine.runner.run, []

    def abort_and_load(plan: Any) -> Any:
        engine.abort_all()
        assert not engine.requests
        with pytest.raises(
            RuntimeError, match="cannot be saved, loaded or freed while requests run"
        ):
            llm.load_prefix_cache(saved[0])
        refused.append(plan)
        return launch(plan)

    engine.runner.run = abort_and_load
    run(llm, PROMPTS[:1])
    engine.runner.run = launch
    assert len(refused) == 1
    assert llm.load_prefix_cache(saved[0]) > 0
    assert tokens(run(llm)) == saved[1]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> Any:
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("save_prefix_cache", interrupt),
        ("save_prefix_cache", fail),
        ("load_prefix_cache", interrupt),
    ],
)
def test_a_fault_at_any_line(
    path: Path, saved: tuple[Path, Any], tmp_path, call: str, fault: Any
) -> None:
    """The engine remains usable, the old file or the new one is there, and no temporary one."""
    llm = random_llm(path)
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    blocks, files = llm.engine.scheduler.block_manager, ("features/kv/disk_cache.py",)

    def prepare() -> Any:
        llm.reset_prefix_cache()
        if call == "save_prefix_cache":
            run(llm, PROMPTS[:1])
        return lambda: getattr(llm, call)(tmp_path)

    lines, num_raised = faults.run(prepare(), files), 0
    assert len(lines) > 40
    for at in faults.each_line(lines):
        action = prepare()
        try:
            faults.run(action, files, at, fault)
        except (KeyboardInterrupt, OSError, ValueError):
            num_raised += 1
        assert is_idle(llm.engine)
        assert len(blocks.evictable) == len(blocks.hash_to_block)
        assert [file.name for file in tmp_path.iterdir()] == [disk_cache.NAME]
        assert tokens(run(llm)) == saved[1]
        assert random_llm(path).load_prefix_cache(tmp_path) > 0 or call == "load_prefix_cache"
    assert num_raised > 20


def test_two_processes(path: Path, saved: tuple[Path, Any], tmp_path) -> None:
    """Both save and load all the time, and each load finds a whole file of one of them."""
    code = f"""
import torch
from nanovllm import LLM, SamplingParams
llm = LLM({str(path)!r}, dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_cache_blocks=64)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
prompts = {PROMPTS!r}
for i in range(15):
    llm.reset_prefix_cache()
    assert i == 0 or llm.load_prefix_cache({str(tmp_path)!r}) > 0
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == {saved[1]!r}
    assert i == 0 or outputs[1].num_cached_tokens >= 96
    assert llm.save_prefix_cache({str(tmp_path)!r}) > 0
"""
    processes = [fresh.Process(code) for _ in range(2)]
    for done in [process.wait() for process in processes]:
        assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [disk_cache.NAME]
