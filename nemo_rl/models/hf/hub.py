"""Models by their name on the Hugging Face hub: `local_folders` turns the names of a config into folders.

Called once by the driver, before anything starts; every other process gets a folder and looks nothing up. A folder goes
before the cache of transformers, the cache before the network.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from nemo_rl.config.parts import HUB_NAME
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ModelFolderError, boundary
from nemo_rl.models.hf.loading import STARTERS, check_model_folder
from nemo_rl.utils.hub_reach import ETAG_TIMEOUT_S, why_unreachable

__all__ = ["is_hub_name", "local_folders", "model_folder"]

# What a model folder is read for; weights in other formats stay where they are.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
LOCAL = frozenset({"checkpoints", "data", "models", "results"})
"""First parts of paths in recipes: a folder of ours that is not there yet is never looked for under somebody's name."""


def is_hub_name(name: str) -> bool:
    """Return whether `name` is `owner/model` and no path of this machine."""
    if not HUB_NAME.fullmatch(name) or name.endswith((".json", ".model")):
        return False
    owner, _, model = name.partition("/")
    return not (Path(owner).exists() or owner in LOCAL or model in STARTERS)


def local_folders(policy: PolicyConfig) -> PolicyConfig:
    """Return `policy` with folders in place of the names of models on the hub.

    Raises:
        ModelFolderError: a model is neither in the cache, nor can the hub be reached or has it.
    """
    model = model_folder(policy.model_name, where="policy.model_name")
    tokenizer = policy.tokenizer
    if tokenizer.name is not None:
        named = model_folder(tokenizer.name, where="policy.tokenizer.name", needs_weights=False)
        tokenizer = tokenizer.model_copy(update={"name": named})
    return policy.model_copy(update={"model_name": model, "tokenizer": tokenizer})


def model_folder(name: str, *, where: str, needs_weights: bool = True) -> str:
    """Return the folder of a model by its name on the hub, or the name itself where it is none.

    Args:
        where: the key that names it, for errors.
        needs_weights: False where only the tokenizer is read.

    Raises:
        ModelFolderError: as `local_folders`.
    """
    if not is_hub_name(name):
        return name
    found = _cached(name, needs_weights=needs_weights)
    if found is not None:
        return found
    problem = why_unreachable()
    if problem is not None:
        raise ModelFolderError(
            f"{where}: {name!r} is not a directory here, the cache {constants.HF_HUB_CACHE} does not hold it whole, "
            f"and {problem}; run `hf download {name}` where there is a network and the same HF_HOME, or set {where} "
            "to a model folder"
        )
    try:
        with boundary(ModelFolderError, f"{where}: {name!r} cannot be downloaded (`hf download {name}` tries again)"):
            return str(snapshot_download(name, allow_patterns=list(PATTERNS), etag_timeout=ETAG_TIMEOUT_S))
    except ModelFolderError as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise ModelFolderError(
                f"{where}: {name!r} is gated; accept its terms at {constants.ENDPOINT}/{name}, and run `hf auth login`"
            ) from error
        if isinstance(error.__cause__, RepositoryNotFoundError):
            raise ModelFolderError(
                f"{where}: {name!r} is not a directory here, and {constants.ENDPOINT} has no such model, or shows it "
                "only after `hf auth login`; correct the name, or set it to a model folder"
            ) from error
        raise


def _cached(name: str, *, needs_weights: bool) -> str | None:
    """Return the folder of an earlier download, if that was finished."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if needs_weights:
            check_model_folder(folder)
    except (LocalEntryNotFoundError, ModelFolderError):
        return None
    return str(folder)
