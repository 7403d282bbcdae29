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
from engines import is_idle, still_serves
from host_cache_history import HostCacheHistory
from hybrid_checkpoints import make_hybrid_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file

from lessons.oracle.disk import MUTANTS, DiskHistory
from lessons.oracle.mutants import Mutant, apply
from lessons.oracle.oracle import plain_sequence, run_history
from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.features.memory import disk_cache
from nanovllm.features.memory.host_cache.blocks import HostBlock

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
def saved(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
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


# Faults, besides the ones that are exercises.
FAULTS = MUTANTS | {
    "the block before a cached one is saved": Mutant(
        disk_cache, "cached_blocks", "blocks.blocks[block_id]", "blocks.blocks[block_id - 1]"
    ),
    "a loaded block stays free": Mutant(disk_cache, "restore", "blocks.free.pop()", "pass"),
    "a block is loaded that is cached already": Mutant(
        disk_cache, "restore", "blocks.find(block_hash) is None", "True"
    ),
    "another block is taken than the one with the KV": Mutant(
        disk_cache, "restore", "reversed(blocks.free)", "blocks.free"
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
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"attention_backend": "sdpa", "block_size": 5},
        {"attention_backend": "sdpa", "block_size": 1, "num_kv_cache_blocks": 500},
        {"quantization": "int8"},
        {"swap_space": 0.01},
    ],
    ids=str,
)
def test_the_same_kv_and_tokens(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    first = random_llm(path, **options)
    computed, again = run(first), run(first)
    num_saved = first.save_prefix_cache(tmp_path)
    assert num_saved == len(kv_by_hash(first)) * options.get("block_size", 16) > 150
    second = random_llm(path, **options)
    assert second.load_prefix_cache(tmp_path) == num_saved
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
    assert second.stats()["prefix_hit_rate"] > 0.9
    assert second.stats()["evictions"] == 0


def test_kv_in_a_wrong_block_changes_the_tokens(
    path: Path, saved: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise equal tokens would show nothing."""
    write_kv = disk_cache.write_kv
    monkeypatch.setattr(disk_cache, "write_kv", lambda r, kv, x: write_kv(r, kv.roll(1, 0), x))
    llm = random_llm(path)
    assert llm.load_prefix_cache(saved[0]) > 0
    assert tokens(run(llm)) != saved[1]


@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_and_capacities(path: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    base = [[rng.randrange(1, 199) for _ in range(90)] for _ in range(3)]
    prompts = [
        [
            *rng.choice(base)[: rng.randrange(91)],
            *(rng.randrange(1, 199) for _ in range(rng.randrange(1, 40))),
        ]
        for _ in range(12)
    ]
    options = dict(block_size=8, max_num_seqs=3, max_model_len=136)
    sizes = [rng.randrange(17, 40) for _ in range(2)]
    first, second = (random_llm(path, num_kv_cache_blocks=n, **options) for n in sizes)
    expected = tokens(run(first, prompts))
    content = kv_by_hash(first)
    first.save_prefix_cache(tmp_path)
    if rng.random() < 0.5:
        run(second, prompts[:2])
    before = kv_by_hash(second)
    num_loaded = second.load_prefix_cache(tmp_path) // 8
    after = kv_by_hash(second)
    assert before.items() <= after.items()  # nothing was evicted
    assert len(after) == len(before) + num_loaded
    loaded = {block_hash: after[block_hash] for block_hash in after.keys() - before.keys()}
    assert loaded.items() <= content.items()
    assert {parent for _, parent, _ in loaded.values()} <= after.keys() | {b""}
    assert num_loaded > 0
    assert is_idle(second.engine)
    assert tokens(run(second, prompts)) == expected
    assert is_idle(second.engine)


def test_the_last_used_prefix_is_loaded_first(path: Path, tmp_path: Path) -> None:
    """Of two prompts of ten blocks, a cache of twelve gets the second and two blocks of the other."""
    old, new = ([start + i % 50 for i in range(160)] for start in (1, 100))
    llm = random_llm(path)
    for prompt in (old, new):
        run(llm, [prompt])
    llm.save_prefix_cache(tmp_path)
    small = random_llm(path, num_kv_cache_blocks=12)
    assert small.load_prefix_cache(tmp_path) == 12 * 16
    match = small.engine.scheduler.block_manager.match
    assert len(match(plain_sequence([*new, 0]))) == 10
    assert len(match(plain_sequence([*old, 0]))) == 2
    # What is used last is evicted last, as if the blocks were from this process.
    run(small, [[9] * 40])
    assert len(match(plain_sequence([*old, 0]))) == 0
    assert len(match(plain_sequence([*new, 0]))) > 5


def test_blocks_of_host_memory(path: Path, tmp_path: Path) -> None:
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
    assert second.save_prefix_cache(tmp_path) == 30 * 16
    # Without host memory, the most recently used prompt is loaded.
    small = random_llm(path, num_kv_cache_blocks=13)
    assert small.load_prefix_cache(tmp_path) == 13 * 16
    assert run(small, prompts[2:])[0].num_cached_tokens == 144
    assert tokens(run(small, prompts[2:])) == expected[2]


def test_blocks_that_are_cached_already(path: Path, saved: tuple[Path, list[list[int]]]) -> None:
    llm = random_llm(path)
    run(llm, PROMPTS[:1])
    before = kv_by_hash(llm)
    total = len(run(llm)) and len(kv_by_hash(llm))
    llm.reset_prefix_cache()
    run(llm, PROMPTS[:1])
    assert llm.load_prefix_cache(saved[0]) == (total - len(before)) * 16
    assert llm.load_prefix_cache(saved[0]) == 0
    assert tokens(run(llm)) == saved[1]


def test_another_backend(path: Path, saved: tuple[Path, list[list[int]]]) -> None:
    """The layout of the KV cache is the same in all backends."""
    llm = random_llm(path, attention_backend="sdpa")
    assert llm.load_prefix_cache(saved[0]) > 0
    outputs = run(llm)
    assert tokens(outputs) == saved[1]
    assert outputs[0].num_cached_tokens == 96


def test_the_file_is_in_the_format_of_safetensors(path: Path, saved: tuple[Path, Any]) -> None:
    with safe_open(saved[0] / disk_cache.NAME, framework="pt") as file:
        assert file.metadata()["block_size"] == "16"
        kv, blocks = file.get_tensor("kv"), json.loads(file.metadata()["blocks"])
        assert kv.shape == (len(blocks), 2, 2, 2, 16, 32)
        assert [token for _, token_ids in blocks[:6] for token in token_ids] == SHARED[:96]


# ---- files that are refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype is torch.float32 in the file and torch.bfloat16 here"),
        ({"block_size": 32}, "block_size is 16 in the file and 32 here"),
        (
            {"kv_cache_dtype": "fp8"},
            "dtype of the KV cache is torch.float32 in the file and torch.f",
        ),
        ({"quantization": "int8"}, "quantization is none in the file and int8 here"),
        (
            {"load_format": "dummy"},
            "weights is [0-9a-f]{32} in the file and random with seed 0 and",
        ),
        (
            {"hf_overrides": {"rope_theta": 5e5}},
            r"rope_theta in config.json is \S+ in the file and 500000.0 here",
        ),
    ],
    ids=str,
)
def test_other_options(
    path: Path, saved: tuple[Path, Any], options: dict[str, Any], message: str
) -> None:
    llm = random_llm(path, **options)
    with pytest.raises(ValueError, match=message):
        llm.load_prefix_cache(saved[0])
    assert is_empty(llm)
    still_serves(llm)


def test_another_model(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """The same sizes and other weights. The same weights elsewhere are the same model."""
    make_checkpoint(tmp_path / "other", seed=1)
    other = random_llm(tmp_path / "other")
    with pytest.raises(
        ValueError, match=f"is of the model {path} and .* used with {tmp_path}/other: weights is"
    ):
        other.load_prefix_cache(saved[0])
    assert is_empty(other)
    copy = random_llm(Path(shutil.copytree(path, tmp_path / "copy")))
    copy.load_prefix_cache(saved[0])
    assert tokens(run(copy)) == saved[1]


def test_another_adapter(path: Path, tmp_path: Path) -> None:
    """The same tensors with another scale."""
    factors = lora(load_file(path / "model.safetensors"), "q_proj")
    for alpha in (4, 8):
        adapter = save_adapter(tmp_path / "adapter", factors, lora_alpha=alpha)
        llm = random_llm(path, adapter=adapter)
        if alpha == 8:
            with pytest.raises(ValueError, match=r"adapter is .* 4.* in the file and .* 8.* here"):
                llm.load_prefix_cache(tmp_path)
        run(llm)
        assert llm.save_prefix_cache(tmp_path) > 0
        assert llm.reset_prefix_cache()
        assert llm.load_prefix_cache(tmp_path) > 0


def test_random_weights(path: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        llm = random_llm(path, load_format="dummy", seed=seed)
        if seed == 2:
            with pytest.raises(
                ValueError, match="random with seed 1 and .* random with seed 2 and"
            ):
                llm.load_prefix_cache(tmp_path)
        run(llm)
        assert llm.save_prefix_cache(tmp_path) > 0
    assert random_llm(path, load_format="dummy", seed=2).load_prefix_cache(tmp_path) > 0


def test_a_checkpoint_that_has_changed(path: Path, tmp_path: Path) -> None:
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


def test_damaged_files(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    llm, good = random_llm(path), (saved[0] / disk_cache.NAME).read_bytes()
    rng = random.Random(0)
    lengths = [0, 1, 7, 8, 16, 100, len(good) // 2, len(good) - 16, len(good) - 1]
    damaged = [good[:length] for length in lengths]
    damaged += [good + b"\0", bytes(len(good)), good[16:] + good[:16]]
    places = [*range(8), 9, 100, len(good) - 1, *(rng.randrange(len(good)) for _ in range(50))]
    for place in places:
        flipped = bytearray(good)
        flipped[place] ^= 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        (tmp_path / disk_cache.NAME).write_bytes(content)
        with pytest.raises(
            ValueError,
            match="prefix-cache.safetensors is damaged or cannot be read, and nothing was",
        ):
            llm.load_prefix_cache(tmp_path)
        assert is_empty(llm)
    run(llm)
    llm.save_prefix_cache(tmp_path)  # replaces it
    llm.reset_prefix_cache()
    assert llm.load_prefix_cache(tmp_path) > 0
    assert tokens(run(llm)) == saved[1]


# ---- engines without a prefix cache on disk ----


def test_a_disabled_prefix_cache(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    llm = random_llm(path, enable_prefix_caching=False)
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(ValueError, match="enable_prefix_caching is False"):
            call(saved[0])
    still_serves(llm)


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    make_hybrid_checkpoint(tmp_path)
    llm = random_llm(tmp_path)
    for call in (llm.save_prefix_cache, llm.load_prefix_cache):
        with pytest.raises(ValueError, match="Qwen3_5ForCausalLM has states of linear attention"):
            call(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_several_ranks_are_refused(llm: LLM, tmp_path: Path) -> None:
    config = replace(llm._config, tensor_parallel_size=2)
    for call in (disk_cache.save, disk_cache.load):
        with pytest.raises(ValueError, match="each of tensor_parallel_size=2 ranks has a part"):
            call(llm.engine, config, tmp_path)


def test_nothing_to_save_or_load(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    llm = random_llm(path)
    assert llm.load_prefix_cache(tmp_path / "nowhere") == 0
    assert llm.save_prefix_cache(tmp_path) == 0
    assert not (tmp_path / disk_cache.NAME).exists()
    run(llm)
    assert llm.save_prefix_cache(tmp_path) > 0
    llm.reset_prefix_cache()
    assert llm.save_prefix_cache(tmp_path) == 0  # and the file remains
    assert llm.load_prefix_cache(tmp_path) > 0
    for path in (tmp_path / disk_cache.NAME, ""):
        for call in (llm.save_prefix_cache, llm.load_prefix_cache):
            with pytest.raises(NotADirectoryError, match="is no directory; give a directory"):
                call(path)


# ---- at any time ----


def test_while_requests_run(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    llm = random_llm(path)
    calls = [lambda: llm.save_prefix_cache(tmp_path), lambda: llm.load_prefix_cache(saved[0])]
    llm.engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(3):
        for call in calls:
            with pytest.raises(RuntimeError, match="wait for their end, or abort them"):
                call()
        llm.engine.step()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert all(call() > 0 for call in calls)


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
    path: Path, saved: tuple[Path, Any], tmp_path: Path, call: str, fault: Any
) -> None:
    """The engine remains usable, the old file or the new one is there, and no temporary one."""
    llm = random_llm(path)
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    blocks, files = llm.engine.scheduler.block_manager, ("features/memory/disk_cache.py",)

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


def test_a_load_that_fails(
    path: Path, saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded."""
    llm, calls, hash_block = random_llm(path), [], BlockManager.hash_block

    def fail_at_the_fourth(self: BlockManager, *arguments: Any) -> bytes:
        calls.append(arguments)
        return fail() if len(calls) == 4 else hash_block(self, *arguments)

    monkeypatch.setattr(BlockManager, "hash_block", fail_at_the_fourth)
    with pytest.raises(OSError, match="No space"):
        llm.load_prefix_cache(saved[0])
    monkeypatch.undo()
    assert is_empty(llm)
    assert tokens(run(llm)) == saved[1]


def test_a_full_disk(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    llm, file = random_llm(path), tmp_path / disk_cache.NAME
    llm.load_prefix_cache(saved[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=f"{file} cannot be written: "):
            llm.save_prefix_cache(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    still_serves(llm)


def test_two_processes(path: Path, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Both save and load all the time, and each load finds a whole file of one of them."""
    code = f"""
import torch
from nanovllm import LLM, SamplingParams
llm = LLM({str(path)!r}, dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_cache_blocks=64)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
prompts = {PROMPTS!r}
for i in range(25):
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
