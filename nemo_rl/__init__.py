"""GRPO post-training with a data plane in the middle."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.training import Run, train

__all__ = ["Run", "__version__", "train"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `train` and `Run` when they are asked for, so that importing the package costs nothing."""
    if name not in ("Run", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module("nemo_rl.training"))[name]
