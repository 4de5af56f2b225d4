"""Self-attention with grouped key/value heads, causal or not: one function, and what may compute it.

`xla` runs everywhere; `splash` is a Pallas kernel for TPUs, `cudnn` a kernel for GPUs of NVIDIA. `auto` takes a kernel
where the device has it and it can do the case, and `xla` otherwise.
"""

from typing import get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ralm_jax.attention import kernels
from ralm_jax.attention.xla import Past, Valid, attend_xla
from ralm_jax.errors import UsageError
from ralm_jax.settings import AttentionName

__all__ = ["IMPLEMENTATIONS", "Past", "Valid", "attend", "check_device"]

IMPLEMENTATIONS = get_args(AttentionName)
KERNELS = {"splash": kernels.splash, "cudnn": kernels.cudnn}


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    valid: Valid | None = None,
    causal: bool = True,
    window: Int[Array, ""] | None = None,
    past: Past | None = None,
    impl: str = "auto",
) -> Float[Array, "B T N H"]:
    """softmax(scale * q k^T) v over a query's past or over everything; query head n reads key/value head n // (N // K).

    Scores and softmax are float32. Rows of padding, and those without a single valid key, give finite numbers (never
    NaN), which nobody reads.

    Args:
        valid: real tokens, for batches with padding; None if every token is real. Integers are the number of the
            document that each token is of, 0 for padding: a token sees those of its own alone. Not with `past`.
        causal: a query sees itself and what is before it; False for encoders.
        window: it sees the last so many of these; None for all. An array, so that the layers of a scan may differ.
        past: what came before the T tokens; every query sees it, as far as `window` reaches.
        impl: one of `IMPLEMENTATIONS`; "auto" for the best that the devices of the current mesh have.

    Raises:
        ValueError: `impl` is not one of `IMPLEMENTATIONS`.
        UsageError: the one that is named cannot do this.
    """
    refusals = {
        name: device_refusal(name, current_platform(), q.dtype, q.shape[-1]) or case_refusal(name, valid, window, past)
        for name in KERNELS
    }
    if impl == "auto":
        impl = next((name for name, refusal in refusals.items() if refusal is None), "xla")
    elif impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention {impl!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if impl == "xla":
        return attend_xla(q, k, v, scale=scale, valid=valid, causal=causal, window=window, past=past)
    check(impl, refusals[impl])
    return KERNELS[impl](q, k, v, scale=scale, valid=valid, causal=causal)


def check_device(impl: str, platform: str, dtype: DTypeLike, head_dim: int) -> None:
    """What can be known before anything is loaded.

    Args:
        platform: "cpu", "gpu" or "tpu".

    Raises:
        UsageError: no attention by `impl` there, for heads of this size and dtype.
    """
    if impl in KERNELS:
        check(impl, device_refusal(impl, platform, dtype, head_dim))


def check(impl: str, refusal: str | None) -> None:
    if refusal is not None:
        raise UsageError(f"attention {impl} {refusal}; use auto or xla")


def current_platform() -> str:
    """Of the current mesh's devices, which need not be there (compiling for a pod); outside a mesh, the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_refusal(impl: str, platform: str, dtype: DTypeLike, head_dim: int) -> str | None:
    """Why a kernel cannot run on this device, with heads like these."""
    if impl == "splash":
        return None if platform == "tpu" or kernels.INTERPRET else f"needs a TPU, not a {platform.upper()}"
    if platform != "gpu":
        return f"needs a GPU, not a {platform.upper()}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if head_dim > 128 or head_dim % 8:
        return f"needs heads of 8, 16, … 128 dimensions, not {head_dim}"
    return None


def case_refusal(impl: str, valid: Valid | None, window: Int[Array, ""] | None, past: Past | None) -> str | None:
    """Why a kernel cannot do this, on whatever device."""
    if impl == "cudnn" and valid is not None and valid.dtype != bool:
        return "does not keep the documents of a window apart"
    if window is not None:
        return "does not limit how far back a layer sees, as GPT-Neo's do"
    if past is not None:
        return "does not read the keys and values of tokens before its input, as writing does"
    return None
