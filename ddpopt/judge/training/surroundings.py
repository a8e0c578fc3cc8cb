"""The state of torch and of the process that a step can leave changed.

Invariant: reading it changes nothing, and it is plain text, so that two runs can be compared.
"""

import contextlib
import decimal
import gc
import hashlib
import locale
import logging
import os
import pickle
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack

SET_BY_COMPILERS = ("TORCH", "_TORCH", "TRITON", "PYTORCH", "OMP_", "KMP_")
"""How the names of environment variables begin that torch sets while it compiles."""
THREADS = "Python's threads"
RECURSION = "Python's recursion limit"
CHANGED_BY_COMPILING = (THREADS, RECURSION)
"""What a compiler may change, once, when it is first used."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


def settings_of_torch(device: torch.device) -> str:
    """Everything global in torch that changes what a later step computes, as text."""
    kind = device.type
    cuda: Any = torch.backends.cuda  # torch types not all of it
    sparse: Any = torch.sparse.check_sparse_tensor_invariants
    words = {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": f"{torch.is_autocast_enabled(kind)} to {torch.get_autocast_dtype(kind)}",
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": f"{torch.get_deterministic_debug_mode()}",
        "products": torch.get_float32_matmul_precision(),
        "warnings": torch.is_warn_always_enabled(),
        "anomaly detection": f"{torch.is_anomaly_enabled()}, {torch.is_anomaly_check_nan_enabled()}",
        "threads": torch.get_num_threads(),
        "denormals": _keeps_denormals(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "flash attention": cuda.flash_sdp_enabled(),
        "efficient attention": cuda.mem_efficient_sdp_enabled(),
        "math attention": cuda.math_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": f"{torch.backends.cudnn.enabled}, {torch.backends.cudnn.benchmark}",
        "tf32": f"{torch.backends.cudnn.allow_tf32}, {cuda.matmul.allow_tf32}",
        "sparse checks": sparse.is_enabled(),
        "function modes": len(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]  # of torch
    }
    return ", ".join(f"{name} {value}" for name, value in words.items())


def _keeps_denormals() -> bool:
    """Whether numbers below the smallest normal one are kept; torch has no function that says so."""
    half = torch.tensor(SMALLEST_NORMAL, device="cpu") / 2
    return bool(half != 0)


ADJUSTABLE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_device, torch.set_default_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (_keeps_denormals, lambda keeps: torch.set_flush_denormal(not keeps)),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)
"""Settings of torch that outlive a step: how each is read, and how it is set."""


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """A block after which settings of torch are as before: what it leaves changed is not for the next one."""
    before = [(read, change, read()) for read, change in ADJUSTABLE]
    try:
        yield
    finally:
        for read, change, value in before:
            if read() != value:
                change(value)


def process_state() -> dict[str, Any]:
    """Everything in this process outside of torch that a step could change, by name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(SET_BY_COMPILERS)}
    handlers = [signal.getsignal(each) for each in SIGNALS]
    return {
        **{f"the environment variable {name}": value for name, value in environment.items()},
        "the working directory": _working_directory(),
        "signal handlers": handlers,
        RECURSION: sys.getrecursionlimit(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "the level of the root logger": (logging.getLogger().level, logging.root.manager.disable),
        "NumPy's error handling": np.geterr(),
        "the decimal context": (decimal.getcontext().prec, decimal.getcontext().rounding),
        "the locale": locale.setlocale(locale.LC_ALL),
        "standard output": (id(sys.stdout), id(sys.stderr)),
        "exception hooks": (sys.excepthook, threading.excepthook),
        THREADS: Counter(each.name for each in threading.enumerate() if not _is_of_torch(each)),
    }


def _is_of_torch(thread: threading.Thread) -> bool:
    """Whether a thread runs a function of torch, ddpopt or Python's own executors, or ends just now.

    A thread of torch's backward or of a process group is known to Python as soon as a callback on it asks
    for the current thread. Which one that is, and when, is chance.
    """
    if isinstance(thread, threading._DummyThread) or not hasattr(thread, "_target"):
        return True
    function = thread._target
    return getattr(function, "__module__", "").startswith(
        ("torch", "ddpopt", "concurrent", "multiprocessing")
    )


def _working_directory() -> str:
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return "none"


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two states of the process, by name.

    A thread that has ended is no change: an earlier trial may have started it.
    """
    missing = object()
    names = sorted(before.keys() | after.keys())
    differ = [name for name in names if before.get(name, missing) != after.get(name, missing)]
    return [name for name in differ if name != THREADS or not after[name] <= before[name]]


def seed_all(seed: int) -> None:
    """Seed the generators that programs share: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """In this block these generators are seeded; then they are as before."""
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_all(seed)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def generators() -> dict[str, str]:
    """A digest of the state of each generator outside of torch."""
    states = {"Python's": random.getstate(), "NumPy's": np.random.get_state()}  # as above
    return {
        name: hashlib.blake2b(pickle.dumps(state), digest_size=8).hexdigest()
        for name, state in states.items()
    }
