"""Launches of Triton kernels with the options that all of them share."""

from typing import Any

from triton.runtime import KernelInterface

# Products may be rounded once, with the addition that follows. Triton 3.9 warns if this is not set,
# because 3.10 changes the default.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


def launch(
    kernel: KernelInterface[Any],
    grid: tuple[int, int, int],
    args: tuple[Any, ...],
    constants: dict[str, int],
    **options: int,
) -> None:
    """Launch `kernel` on `grid`: num_warps and num_stages are options.

    `args` are tensors and numbers. `constants` are the kernel's constexpr parameters in their
    order, and follow `args`. Triton compiles a variant for each combination of dtypes, constants
    and options. What varies between the steps of an engine must not change the variant, because a
    compilation takes about a second: such integers are in the kernel's `do_not_specialize`, and
    tensors that may be slices are in its `do_not_specialize_on_alignment`.
    """
    kernel[grid](*args, *constants.values(), **options, **COMPILE_OPTIONS)
