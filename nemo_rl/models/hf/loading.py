"""Loading a Hugging Face causal language model from a folder.

Called by the policy worker, the embedded engine and the starter. Invariant: a folder that is missing or incomplete is
a `ModelFolderError` that names the file, before any process group or engine exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from nemo_rl.config.parts import HUB_NAME
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import GENERATION_CONFIG
from nemo_rl.errors import ModelFolderError, boundary, shorten
from nemo_rl.models.vision import family_of
from nemo_rl.utils.files import read_plain_text
from nemo_rl.utils.hub_reach import ETAG_TIMEOUT_S, why_unreachable

__all__ = [
    "ADAPTER_PART",
    "CONFIG_FILE",
    "DTYPES",
    "EAGER",
    "GROUPED",
    "GROUPED_BYTES",
    "PROCESSOR_FILES",
    "build_meta_model",
    "check_model_folder",
    "decoder_sizes",
    "fit_experts",
    "is_experts",
    "is_hub_name",
    "load_causal_lm",
    "load_model_config",
    "local_folders",
    "model_class",
    "model_folder",
    "model_without_weights",
    "named_weights",
]


# Progress bars of all processes would garble each other and the trainer's panel.
transformers_logging.disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EAGER, GROUPED = "eager", "grouped_mm"
"""Experts one by one, and Hugging Face's default: one kernel for all of them."""
GROUPED_BYTES = 16
"""Row size that the grouped kernel needs: it takes matrices whose rows are a multiple of this many bytes."""
MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Names for the width of a feed-forward block, in families that do not say `intermediate_size`."""
CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of a model folder with settings for what is no text; transformers reads the image processor of the first or the
second."""
ADAPTER_PART = "low_rank"
"""Name of the submodule of a linear layer that is its adapter."""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MAX_CONFIG_BYTES = 2**20
NOISE = re.compile("drop|jitter")
"""Names of what makes a training pass random: dropout by its many names, noise of routers."""
STARTERS: Mapping[str, tuple[str, str]] = {
    "starter_sort": ("demo", ""),
    "starter_sort_moe": ("learn-sort-moe", " --experts 8"),
    "starter_chain_sum": ("learn-chain-sum", " --task chain_sum"),
    "starter_chain_sums": ("learn-curriculum", " --task chain_sums"),
    "starter_guess": ("learn-guess", " --task guess"),
    "starter_calculator": ("learn-calculator", " --task calculator"),
}
"""Folders that recipes of ours name -> the make target that makes them first, and the options of make_starter.py."""
# The largest released models stay below by a factor of ten and more; beyond, building the layers would not end.
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": 2_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "moe_intermediate_size": 2**24,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**40,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "num_experts_per_tok": 2**16,
}
"""Sizes of a decoder in config.json -> the largest that is believed; the smallest is 1."""


def check_model_folder(folder: str | Path) -> Path:
    """Return the folder as a path, if it holds a config and weights.

    Raises:
        ModelFolderError: it does not.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelFolderError(
            f"model folder {str(path)!r}: no such folder; set policy.model_name to a folder with config.json and "
            f"safetensors{_maker_of(path)}"
        )
    if not (path / CONFIG_FILE).is_file():
        raise ModelFolderError(f"model folder {str(path)!r}: expected {CONFIG_FILE}, which is missing")
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        if any((path / name).is_file() for name in PICKLES):
            raise ModelFolderError(
                f"model folder {str(path)!r}: expected weights as safetensors, got pickles ({PICKLES[0]}), which can "
                'run code when they are read; convert them once where you trust them: python -c "from transformers '
                f"import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('{path}')\""
            )
        raise ModelFolderError(f"model folder {str(path)!r}: expected weights ({' or '.join(WEIGHT_FILES)}), got none")
    return path


def load_model_config(folder: str | Path) -> PretrainedConfig:
    """Return the architecture of a model folder.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable, or its config holds sizes that are none.
    """
    path = check_model_folder(folder)
    where = f"model folder {str(path)!r}: {CONFIG_FILE}"
    with boundary(ModelFolderError, f"{where} cannot be read"):
        given = _read_json(path / CONFIG_FILE)
        _check_sizes(given, where)
        if given.get("quantization_config") is not None:
            raise ModelFolderError(
                f"{where}: quantization_config: quantised weights cannot be trained; take the folder with full weights"
            )
        # Code in the folder is never run; unless this is said, transformers asks on the terminal.
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        # Fails here if the settings cannot be read, which all parts of a run read.
        config.get_text_config().to_dict()
    _switch_off_noise(config)
    return config


def _switch_off_noise(config: PretrainedConfig) -> None:
    """Set every dropout and every jitter of a config, and of the configs in it, to 0.

    The probability of a token must be the same when it is drawn, scored and trained. With dropout in the training pass
    alone, the ratios of the first update would be noise around 1, and no two layouts would agree.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _switch_off_noise(value)
        elif NOISE.search(name) and isinstance(value, float | int) and not isinstance(value, bool) and value:
            setattr(config, name, type(value)(0))


def decoder_sizes(config: PretrainedConfig) -> dict[str, Any]:
    """Return the config of the language model as a dictionary in which every size also has its common name.

    Example:
        >>> from transformers import GPT2Config
        >>> sizes = decoder_sizes(GPT2Config(n_embd=64))
        >>> sizes["n_embd"], sizes["hidden_size"]
        (64, 64)
    """
    text = config.get_text_config()
    given: dict[str, Any] = text.to_dict()
    found = given | {common: given[own] for common, own in (text.attribute_map or {}).items() if own in given}
    width = next((found[name] for name in MLP_WIDTHS if isinstance(found.get(name), int)), None)
    if width is not None:
        found["intermediate_size"] = width
    if "num_kv_heads" in found and "num_key_value_heads" not in found:
        # Falcon: one head of keys for all queries in its first form, groups in its second.
        is_single = found.get("multi_query") and not found.get("new_decoder_architecture")
        found["num_key_value_heads"] = 1 if is_single else found["num_kv_heads"]
    return found


def model_without_weights(config: PretrainedConfig, folder: str | Path) -> PreTrainedModel:
    """Return the model of an architecture, which may be that of a folder.

    Raises:
        ModelFolderError: the config describes no causal language model.
    """
    what = f"model folder {str(folder)!r}: {CONFIG_FILE} of {config.model_type!r} describes no causal language model"
    with boundary(ModelFolderError, what), torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(config, trust_remote_code=False)
    return model


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds a model: with its vision tower where images are understood."""
    return AutoModelForCausalLM if family_of(config) is None else AutoModelForImageTextToText


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model on the CPU in evaluation mode.

    Raises:
        ModelFolderError: the folder is missing, incomplete or unreadable, or lacks some of the weights.
    """
    path = check_model_folder(folder)
    config = load_model_config(path)
    with boundary(ModelFolderError, f"model folder {str(path)!r}: cannot be loaded"):
        model, report = model_class(config).from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelFolderError(f"model folder {str(path)!r}: {len(missing)} weights are missing, first {missing[0]!r}")
    fit_experts(model, dtype)
    model.eval()
    return model  # type: ignore[no-any-return]


def fit_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let experts run one by one where the kernel for all of them cannot take their sizes.

    Args:
        dtype: that the experts compute in.
    """
    if model.config._experts_implementation != GROUPED:
        return
    # Both sizes of a matrix are row sizes: its own forwards, those of its transpose backwards.
    sizes = {size for name, weight in model.named_parameters() if is_experts(name, weight) for size in weight.shape[1:]}
    if any(size * dtype.itemsize % GROUPED_BYTES for size in sizes):
        model.set_experts_implementation(EAGER)


def is_experts(name: str, weight: torch.Tensor) -> bool:
    """Return whether a weight is that of all experts of a mixture, fused."""
    return weight.dim() == 3 and ".experts." in name and f".{ADAPTER_PART}." not in name


def _maker_of(path: Path) -> str:
    """Return the command that makes this folder, where it is one of ours."""
    if path.name not in STARTERS:
        return ""
    target, options = STARTERS[path.name]
    return f"; this one is made by `make {target}`, or by `python examples/make_starter.py --out {path}{options}`"


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelFolderError(f"{path}: expected at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}")
    given = json.loads(read_plain_text(path))
    if not isinstance(given, dict):
        raise ModelFolderError(f"{path}: expected a JSON object, got {type(given).__name__}")
    return given


def _check_sizes(given: Mapping[str, Any], where: str) -> None:
    """Check the numbers of a config: libraries believe every number, and build what it says or divide by it."""
    for name, value in given.items():
        if isinstance(value, dict):
            _check_sizes(value, f"{where}: {name}")
        limit = LIMITS.get(name)
        if limit is None or value is None:
            continue
        sizes = value if isinstance(value, list) and value else [value]
        if any(isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= limit for size in sizes):
            raise ModelFolderError(
                f"{where}: {name}: expected a whole number from 1 to {limit}, got {shorten(repr(value))}"
            )


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by Hugging Face name; tied ones once, under their first name. Adapters
    are left out."""
    seen: set[int] = set()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) not in seen and f".{ADAPTER_PART}." not in name:
            seen.add(id(weight))
            yield name, weight


def build_meta_model(folder: str | Path) -> PreTrainedModel:
    """Return the model of a folder in float32 and evaluation mode; its parameters are on the meta device.

    Raises:
        ModelFolderError: the folder is missing or unreadable, or its config describes no causal language model.
    """
    config = load_model_config(folder)
    what = f"model folder {str(folder)!r}: {CONFIG_FILE} of {config.model_type!r} describes no causal language model"
    with boundary(ModelFolderError, what), _parameters_on_meta():
        model: PreTrainedModel = model_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
        if (Path(folder) / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    fit_experts(model, torch.float32)
    model.eval()
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move the parameters: each moves as soon as its module has it, so that no more than one is ever held."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            kept: Any = self._parameters[name]
            self._parameters[name] = torch.nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


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
