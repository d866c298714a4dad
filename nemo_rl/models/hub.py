"""Models by their name on the Hugging Face hub: `local_folders` turns the names of a config into folders.

Called once by the driver, before anything starts; every other process gets a folder and looks nothing up. A folder goes
before the cache of transformers, the cache before the network.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import get_session

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ModelFolderError, boundary, shorten
from nemo_rl.models.loading import STARTERS, check_model_folder

__all__ = ["is_hub_name", "local_folders"]

REACH_TIMEOUT_S = 8.0
"""For the hub to answer at all, looking up its address included."""
ETAG_TIMEOUT_S = 15.0
# What a model folder is read for; weights in other formats stay where they are.
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
LOCAL = frozenset({"checkpoints", "data", "models", "results"})
"""First parts of paths in recipes: a folder of ours that is not there yet is never looked for under somebody's name."""
_NAME = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether `name` is `owner/model` and no path of this machine."""
    if not _NAME.fullmatch(name) or name.endswith((".json", ".model")):
        return False
    owner, _, model = name.partition("/")
    return not (Path(owner).exists() or owner in LOCAL or model in STARTERS)


def local_folders(policy: PolicyConfig) -> PolicyConfig:
    """`policy` with folders in place of the names of models on the hub.

    Raises:
        ModelFolderError: a model is neither in the cache, nor can the hub be reached or has it.
    """
    model = _folder(policy.model_name, where="policy.model_name")
    tokenizer = policy.tokenizer
    if tokenizer.name is not None:
        named = _folder(tokenizer.name, where="policy.tokenizer.name", needs_weights=False)
        tokenizer = tokenizer.model_copy(update={"name": named})
    return policy.model_copy(update={"model_name": model, "tokenizer": tokenizer})


def _folder(name: str, *, where: str, needs_weights: bool = True) -> str:
    if not is_hub_name(name):
        return name
    found = _cached(name, needs_weights=needs_weights)
    if found is not None:
        return found
    problem = _unreachable()
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
                f"{where}: {name!r} is given to those only who accepted its terms; accept them at "
                f"{constants.ENDPOINT}/{name}, and run `hf auth login`"
            ) from error
        if isinstance(error.__cause__, RepositoryNotFoundError):
            raise ModelFolderError(
                f"{where}: {name!r} is not a directory here, and {constants.ENDPOINT} has no such model, or shows it "
                "only after `hf auth login`; correct the name, or set it to a model folder"
            ) from error
        raise


def _cached(name: str, *, needs_weights: bool) -> str | None:
    """The folder of an earlier download, if that was finished."""
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if needs_weights:
            check_model_folder(folder)
    except (LocalEntryNotFoundError, ModelFolderError):
        return None
    return str(folder)


def _unreachable() -> str | None:
    """Why the hub cannot be asked; None when it answers, with whatever code."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    failed: list[str] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=REACH_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  (whatever a network raises: the hub does not answer)
            failed.append(shorten(f"{type(error).__name__}: {error}"))

    # A thread that nobody waits for: looking up an address has no deadline of its own.
    thread = threading.Thread(target=ask, daemon=True, name="hub-probe")
    thread.start()
    thread.join(REACH_TIMEOUT_S + 1)
    if thread.is_alive():
        return f"{constants.ENDPOINT} does not answer within {REACH_TIMEOUT_S:.0f} s"
    return f"{constants.ENDPOINT} cannot be reached ({failed[0]})" if failed else None
