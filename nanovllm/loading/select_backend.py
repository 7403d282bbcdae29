"""Selects the device, the dtype and the backend.

device and dtype                     attention_backend="auto"
a GPU                                gpu.backend   ("triton"), from compute capability 7.5
a CPU, float32 or bfloat16           cpu.backend   ("numba"), if Numba is installed and, for
                                     a small model, its kernels are compiled
anything else                        models.backend     ("sdpa")

`checked` compares the kernels with plain torch, which takes the place of those that fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.config import EngineConfig
from nanovllm.loading import check
from nanovllm.models.backend import Backend
from nanovllm.models.qwen3 import Qwen3
from nanovllm.utils.host import cpu_has_fast_bf16
from nanovllm.utils.log import logger, progress_bar

# With fewer weights, plain torch answers before the kernels of the CPU would be compiled.
SMALL_MODEL = 100_000_000


def pick_backend(name: str, device: torch.device, dtype: torch.dtype, num_weights: int) -> Backend:
    """Return a backend by name. Raises ValueError if it is missing or cannot use the device."""
    is_auto = name == "auto"
    if is_auto:
        name = "triton" if device.type == "cuda" else "numba"
        # Numba's backend refuses float16, with a reason.
        if name == "numba" and dtype is not torch.float16 and num_weights < SMALL_MODEL:
            from nanovllm.backends.cpu.kernel_files import is_ready

            if not is_ready(dtype):
                # An engine keeps its backend: with another one, its tokens could change.
                name = "sdpa"
    if name == "sdpa":
        return Backend(device, dtype)
    try:
        if name == "triton":
            from nanovllm.backends.gpu.backend import make_backend
        else:
            from nanovllm.backends.cpu.backend import make_backend
        return make_backend(device, dtype)
    except (ImportError, ValueError) as error:
        if is_auto:
            logger.warning(f"attention runs in plain torch, which is slower: {error}")
            return Backend(device, dtype)
        if isinstance(error, ValueError):
            raise
        raise ValueError(
            f"attention_backend={name!r} needs {name.title()} ({error}); pip install {name} if it "
            "is missing, or use attention_backend='sdpa'"
        ) from error


def checked(
    backend: Backend, plain: Backend, config: EngineConfig, model: Qwen3, vocab_size: int
) -> Backend:
    """Return the backend, with plain torch in place of a kernel that fails or is wrong.

    Returns `plain` if there are several, or if no single one can be replaced. Raises ValueError
    instead if attention_backend is not "auto". `model` is on the meta device.
    """
    if backend.is_checked():
        return backend
    if not config.check_kernels:
        logger.info("check_kernels=False: no kernel is compared with plain torch")
        return backend
    sizes = model, vocab_size, config.block_size, config.kv_cache_dtype != "auto"
    errors: dict[str, Exception] = {}
    is_replaced = True
    cases = [*check.checks((backend, plain), *sizes)]
    bar = progress_bar("Compiling and checking kernels", "kernel", cases)
    with torch.inference_mode(), backend.step_context():
        for name, comparisons in bar:
            bar.set_postfix_str(name, refresh=False)
            try:
                check.check(comparisons, backend.dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of Triton, of its compilers, of torch or of Numba
                check_device(backend.device)
                errors.setdefault(name, error)
                is_replaced &= backend.replace_kernel(name, plain)
    if not errors:
        backend.set_checked()
        return backend
    first = next(iter(errors.values()))
    problem = (
        f"the kernel {' and the kernel '.join(errors)} fails or is wrong on "
        f"{check.system(backend.device)}: {type(first).__name__}: {first!s:.500}. Please report it "
        "with the output of the command `nanovllm check`"
    )
    if config.attention_backend != "auto":
        raise ValueError(
            f"{problem}. attention_backend='auto' computes it in plain torch, and "
            "attention_backend='sdpa' everything"
        ) from first
    # The store of attention is not counted: plain attention replaces it too.
    is_replaced &= len(errors.keys() - {"norm_rope_store"}) <= 1
    what = ", ".join(errors) if is_replaced else "everything"
    logger.warning(f"plain torch, which is slower, computes {what}: {problem}")
    return backend if is_replaced else plain


def check_device(device: torch.device) -> None:
    """Raise an error of the GPU that has come before, such as an illegal memory access."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def explain_lost_device(device: torch.device) -> Iterator[None]:
    """Raise ValueError with a remedy if the `with` block fails and leaves the GPU unusable."""
    try:
        yield
    except Exception as error:
        try:
            check_device(device)
        except RuntimeError as lost:
            raise ValueError(
                f"a kernel has made {check.system(device)} unusable for this process: "
                f"{lost!s:.200}. Start again with attention_backend='sdpa', which uses none of the "
                "kernels, and please report it with the output of the command `nanovllm check`"
            ) from error
        raise


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' needs a GPU, and torch finds none; use device='cpu'")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(name: str, device: torch.device, stored: str | None) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            # A checkpoint that is stored in float32 may need it, as smollm2-135m does.
            name = "bfloat16" if stored != "float32" and cpu_has_fast_bf16() else "float32"
        else:
            name = stored or "bfloat16"
            if name == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
                name = "float16"  # GPUs before Ampere have no bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
