"""Selects the device, the dtype and the backend.

device and dtype                     attention_backend="auto"
a GPU                                gpu.backend   ("triton"), from compute capability 7.5
a CPU, float32 or bfloat16           cpu.backend   ("numba"), if Numba is installed and, for
                                     a small model, its kernels are compiled
anything else                        models.backend     ("sdpa")
"""

from collections.abc import Callable

import torch

from nanovllm.models.backend import Backend
from nanovllm.utils.host import cpu_has_fast_bf16
from nanovllm.utils.log import logger

# With fewer weights, plain torch answers before the kernels of the CPU would be compiled.
SMALL_MODEL = 100_000_000


def pick_backend(
    name: str, device: torch.device, dtype: torch.dtype, num_weights: Callable[[], int]
) -> Backend:
    """Return a backend by name. Raises ValueError if it is missing or cannot use the device.

    `num_weights` counts the weights of the model, if "auto" needs to know whether it is small.
    """
    is_auto = name == "auto"
    if is_auto:
        name = "triton" if device.type == "cuda" else "numba"
    if name == "sdpa":
        return Backend(device, dtype)
    try:
        if name == "triton":
            from nanovllm.backends.gpu.backend import make_backend
        else:
            from nanovllm.backends.cpu.kernel_files import is_ready

            # Numba's backend refuses float16, with a reason.
            can_wait = not is_auto or dtype is torch.float16 or is_ready(dtype)
            if not can_wait and num_weights() < SMALL_MODEL:
                # An engine keeps its backend: with another one, its tokens could change.
                return Backend(device, dtype)
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
    return getattr(torch, name)
