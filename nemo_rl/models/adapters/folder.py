"""Folders with an adapter, in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

Written by checkpoints of both workers and `nemo-rl export`, read by resumes, `policy.lora.adapter` and evaluation. Not
collective: one rank writes, every rank reads. Invariant: a folder is read only where its rank, scale, layers and, if it
names one, its base are those of the run; nothing of it is ignored. `nemo_rl_base.json` beside peft's files names the
base by a digest of its weights, so that an adapter is never put on other weights of the same shapes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from nemo_rl.config.backends import ALL_LINEAR, LoraConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.tokenizer import GENERATION_CONFIG
from nemo_rl.errors import CheckpointError, ModelFolderError, boundary, name_some, shorten
from nemo_rl.models.adapters.lora import (
    A_SUFFIX,
    B_SUFFIX,
    adapted_layers,
    adapter_infos,
    attach_adapters,
    folded,
    is_tied_head,
    means_experts,
    merged,
    named_adapters,
)
from nemo_rl.models.hf.folder import WeightSource, open_weights
from nemo_rl.models.hf.loading import CONFIG_FILE as MODEL_CONFIG
from nemo_rl.models.hf.loading import (
    decoder_sizes,
    load_causal_lm,
    load_model_config,
    model_without_weights,
    named_weights,
)
from nemo_rl.models.hf.writing import ModelDescription, kept_in_float32, write_folder
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints
from nemo_rl.utils.files import MOST_BYTES, open_plain, read_plain

__all__ = [
    "CONFIG_FILE",
    "HONOURED",
    "REFUSED",
    "WEIGHTS_FILE",
    "WITHOUT_EFFECT",
    "base_folder_of",
    "base_identity",
    "base_of",
    "is_adapter_folder",
    "load_model_at",
    "lora_of",
    "merge_folder",
    "policy_at",
    "problem_of",
    "read_adapter",
    "served_adapter",
    "write_adapter",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_FILE = "nemo_rl_base.json"
PREFIX = "base_model.model."
EXPERTS = ".experts."
INNER = "base_layer."
"""peft wraps a module of experts once for each of its weights: all but the last lie inside another wrapper."""
WEIGHT = ".weight"
OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Ends of names which peft takes, in a mixture, for experts of earlier releases, also where a layer is dense: it would
load the adapter of such a layer without a word into nothing."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
PLAIN_STARTS = ("gaussian", "orthogonal")
"""Words of `init_lora_weights` which leave the base as it is, besides true and false."""
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields that leave out some of the layers which `target_modules` names."""
HONOURED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "peft_type", "base_model_name_or_path", "target_modules"),
        *("target_parameters", *NARROWING),
    }
)
"""Fields of peft's config of an adapter that are read, or whose choice of layers the stored tensors show."""
WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout"),
        *("runtime_config", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "qalora_group_size"),
    }
)
"""Fields that change no number of a trained adapter by themselves."""
REFUSED: Mapping[str, str] = {
    "use_dora": "it is a DoRA adapter, whose magnitudes are not served",
    "modules_to_save": "it brings whole modules besides its matrices",
    "rank_pattern": "its layers have different ranks",
    "alpha_pattern": "its layers have different scales",
    "lora_bias": "its matrices have biases",
    "bias": "it brings biases of the base",
    "ensure_weight_tying": "it may change the embedding together with the head",
    "trainable_token_indices": "it trains rows of the embedding",
    "layer_replication": "it repeats layers of the base",
    "fan_in_fan_out": "its matrices belong to layers that hold their weights transposed",
    "init_lora_weights": "its start has changed the weights of the base, which it does not bring",
    "alora_invocation_tokens": "it is switched on by tokens of a prompt",
    "use_qalora": "it pools the inputs of quantized layers",
    "velora_config": "its gradients were compressed by modules of its own",
    "monteclora_config": "its matrices are drawn at random",
    "use_bdlora": "its matrices are in blocks",
    "arrow_config": "it chooses among several adapters",
    "kasa_config": "it changes the base and has singular values of its own",
}
"""Fields that say more than A, B and one scale -> what that is."""


def is_adapter_folder(folder: str | Path) -> bool:
    """Return whether a folder holds an adapter and not a whole model."""
    return (Path(folder) / CONFIG_FILE).is_file()


def base_identity(source: WeightSource) -> str:
    """Return a digest of all weights of a model, read one at a time: the same for the same weights, however they are
    cut into files."""
    prints = Fingerprints()
    for name in sorted(source.names()):
        prints.add(name, source.get(name))
    text = "\n".join(f"{name} {print_}" for name, print_ in prints.result().items())
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_adapter(
    folder: Path, adapter: Mapping[str, torch.Tensor], config: LoraConfig, *, model_name: str, base: str
) -> None:
    """Write an adapter into a folder that exists.

    Args:
        adapter: A and B without scale, by the names of `lora.adapter_infos`.
        model_name: folder of the base, which peft loads it from.
        base: `base_identity` of its weights.

    Raises:
        OSError: a file cannot be written.
    """
    save_file(_to_peft(adapter), str(folder / WEIGHTS_FILE), metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(_peft_config(adapter, config, model_name), indent=2) + "\n")
    (folder / BASE_FILE).write_text(json.dumps({"weights": base, "model_name": model_name}, indent=2) + "\n")


def read_adapter(
    folder: Path, infos: Mapping[str, TensorInfo], config: LoraConfig, *, base: str | None
) -> dict[str, torch.Tensor]:
    """Return A and B of every layer in float32, by the names of `infos`.

    Args:
        base: `base_identity` of the run's model; None: not compared.

    Raises:
        CheckpointError: the folder is missing, unreadable, or has another rank, scale, base or other layers.
    """
    where = f"adapter {str(folder)!r}"
    found = lora_of(folder)
    for key, ours, theirs in (
        ("rank", config.rank, found.rank),
        ("alpha", config.alpha, found.alpha),
        ("rslora", config.rslora, found.rslora),
    ):
        if ours != theirs:
            raise CheckpointError(f"{where}: expected {key} {ours}, got {theirs}; set policy.lora.{key}={theirs}")
    if base is not None:
        _check_base(folder, base)
    with boundary(CheckpointError, f"{where}: {WEIGHTS_FILE} cannot be read"):
        open_plain(folder / WEIGHTS_FILE).close()
        stored = load_file(str(folder / WEIGHTS_FILE))
    expected = _names_in_peft(infos)
    missing, unknown = sorted(expected.values() - stored.keys()), sorted(stored.keys() - expected.values())
    if missing or unknown:
        lacks = f"lacks {name_some(missing)}" if missing else f"has {name_some(unknown)}, which this run does not train"
        raise CheckpointError(f"{where}: {lacks}; set policy.lora.targets to the layers that it was trained with")
    values = {name: _from_peft(stored[expected[name]], name, info, where) for name, info in infos.items()}
    for name, weight in folded(values.items(), config.scale):
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{where}: {name}: has numbers that are not finite, or not with the scale {config.scale}; take an "
                "adapter of an earlier step, or train it again"
            )
    return values


def policy_at(policy: PolicyConfig, folder: Path) -> PolicyConfig:
    """Return the policy whose engines begin with the weights of a folder: those of a whole model, or an adapter beside
    the weights of `policy.model_name`.

    Raises:
        CheckpointError: `policy.model_name` is a folder with other weights than those that the adapter was trained on.
    """
    if not is_adapter_folder(folder):
        return policy.model_copy(update={"model_name": str(folder), "lora": LoraConfig()})
    if Path(policy.model_name).is_dir():
        _check_base(folder, _identity_at(policy.model_name))
    return policy.model_copy(update={"lora": lora_of(folder).model_copy(update={"adapter": str(folder)})})


def load_model_at(folder: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model of a folder on the CPU: a whole one, or the one that an adapter names, with the adapter.

    Raises:
        CheckpointError: as `read_adapter`.
    """
    if not is_adapter_folder(folder):
        return load_causal_lm(folder, dtype=dtype)
    base, config = base_folder_of(folder), lora_of(folder)
    model = load_causal_lm(base, dtype=dtype)
    layers = adapted_layers(model, config)
    identity = _identity_at(base) if Path(base).is_dir() else None
    values = read_adapter(folder, adapter_infos(layers, config), config, base=identity)
    attach_adapters(model, layers, config)
    with torch.no_grad():
        for name, parameter in named_adapters(model):
            parameter.copy_(values[name])
    return model.to(dtype)  # type: ignore[arg-type, no-any-return]


def served_adapter(lora: LoraConfig, known: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return A and s B of `policy.lora.adapter` for an engine that begins with it.

    Args:
        known: name -> shape of the tensors that the engine takes.

    Raises:
        CheckpointError: as `read_adapter`.
    """
    assert lora.adapter is not None, "the engine is to begin with an adapter"
    infos = {name: TensorInfo(shape=shape, dtype="float32") for name, shape in known.items()}
    return dict(folded(read_adapter(Path(lora.adapter), infos, lora, base=None).items(), lora.scale))


def base_folder_of(folder: Path) -> str:
    """Return the folder, or name on the hub, of the model that an adapter says it was trained on; empty where it does
    not say."""
    return str(_read_config(folder).get("base_model_name_or_path") or "")


def base_of(folder: Path) -> str | None:
    """Return `base_identity` of the base of an adapter; None where its folder does not say."""
    path = folder / BASE_FILE
    if not path.is_file():
        return None
    with boundary(CheckpointError, f"adapter {str(folder)!r}: {BASE_FILE} cannot be read"):
        return str(json.loads(path.read_text())["weights"])


def lora_of(folder: Path) -> LoraConfig:
    """Return the settings of an adapter folder, which are those of a run that goes on with it.

    Raises:
        CheckpointError: the folder is missing or unreadable, or holds another kind of adapter.
    """
    given, where = _read_config(folder), f"adapter {str(folder)!r}: {CONFIG_FILE}"
    if given.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: expected peft_type LORA, got {shorten(repr(given.get('peft_type')))}")
    for key, value in given.items():
        problem = problem_of(key, value)
        if problem is not None:
            raise CheckpointError(
                f"{where}: {key}: {shorten(repr(value))}: {problem}; expected A and B of one rank and scale: merge the "
                "adapter into its base with peft (merge_and_unload), and give that as policy.model_name"
            )
    with boundary(CheckpointError, f"{where}: cannot be read"):
        return LoraConfig(
            enabled=True,
            rank=given["r"],
            alpha=given["lora_alpha"],
            rslora=bool(given.get("use_rslora")),
            targets=_targets_of(folder, given),
        )


def problem_of(key: str, value: object) -> str | None:
    """Return why an adapter with this field of its config is not A and B of one scale; None where it may be one."""
    if key in HONOURED or key in WITHOUT_EFFECT:
        return None
    if key == "init_lora_weights":
        return None if isinstance(value, bool | None) or value in PLAIN_STARTS else REFUSED[key]
    is_given = bool(value) and (key, value) != ("bias", "none")
    return REFUSED.get(key, "this field is not known here") if is_given else None


def merge_folder(folder: Path, *, base: Path, dtype: torch.dtype) -> float:
    """Turn a folder with an adapter into one with the whole model, W + s B A in place of adapted weights.

    Args:
        folder: loses its adapter; a tokenizer in it stays.
        base: folder of the model that the adapter was trained on.

    Returns:
        The share of the update that rounding to `dtype` has lost, |round(W + D) - W - D| / |D| over all adapted
        weights; 0 where it has lost nothing.

    Raises:
        CheckpointError: the base has other weights than those that the adapter was trained on. ModelFolderError: it
            cannot be read, or a weight is too large for the dtype.
    """
    config, model_config = lora_of(folder), load_model_config(base)
    model, source = model_without_weights(model_config, base), open_weights(base, model_config)
    layers = adapted_layers(model, config)
    infos = adapter_infos(layers, config)
    adapter = read_adapter(folder, infos, config, base=None if base_of(folder) is None else base_identity(source))
    keeps = kept_in_float32(model, dtype)
    head = next((layer.name for layer in layers if not layer.num_experts and is_tied_head(model, layer.name)), None)
    stored_as = dict[str, str]()
    if head is not None:
        # The head changes and the embedding does not: both are stored from here on.
        embedding = next(name for name, weight in named_weights(model) if weight is model.get_input_embeddings().weight)
        stored_as[f"{head}.weight"] = embedding
        model_config.tie_word_embeddings = False
        model = model_without_weights(model_config, base)
    names = [name for name, _ in named_weights(model)]

    def stored(name: str) -> str:
        return stored_as.get(name, name)

    def stored_dtype(name: str) -> torch.dtype:
        given = source.get(stored(name), rows=slice(0, 1)).dtype
        return given if not given.is_floating_point or keeps(name) else dtype

    described = {
        name: TensorInfo(shape=source.shape(stored(name)), dtype=str(stored_dtype(name)).removeprefix("torch."))
        for name in names
    }
    lost, moved = 0.0, 0.0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal lost, moved
        for name in names:
            before = source.get(stored(name))
            [(_, exact)] = merged([(name, before)], adapter, config.scale)
            rounded = exact.to(getattr(torch, described[name].dtype))
            if rounded.is_floating_point() and rounded.isfinite().sum() < exact.isfinite().sum():
                raise ModelFolderError(f"{base}: {name}: has values too large for {dtype}; take another dtype")
            if exact is not before:
                lost += float((rounded.double() - exact.double()).square().sum())
                moved += float((exact.double() - before.double()).square().sum())
            yield name, rounded

    model_config.dtype = dtype
    generation = None
    if (base / GENERATION_CONFIG).is_file():
        generation = GenerationConfig.from_pretrained(str(base), local_files_only=True)
    description = ModelDescription(config=model_config, infos=described, generation_config=generation)
    write_folder(folder, description, weights())
    for name in (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE):
        (folder / name).unlink(missing_ok=True)
    return math.sqrt(lost / moved) if moved else 0.0


def _check_base(folder: Path, base: str) -> None:
    """Raise CheckpointError where an adapter names another base than this one."""
    its_base = base_of(folder)
    if its_base is not None and its_base != base:
        raise CheckpointError(
            f"adapter {str(folder)!r}: it was trained on a base with other weights (digest {its_base[:12]}, this one "
            f"has {base[:12]}); set policy.model_name to the model that it was trained from"
        )


@functools.cache
def _identity_at(folder: str) -> str:
    """Return `base_identity` of a model's folder, which is read once: it is asked for at each of many checkpoints."""
    return base_identity(open_weights(Path(folder), load_model_config(folder)))


def _targets_of(folder: Path, given: Mapping[str, Any]) -> Any:
    """Return `policy.lora.targets` of an adapter: as its config names them, or, where that leaves some layers of these
    names out, the layers whose tensors it has."""
    modules, parameters = given.get("target_modules") or [], given.get("target_parameters") or []
    if modules == ALL_LINEAR:
        return ALL_LINEAR
    layers = [name.removesuffix(WEIGHT) for name in parameters]
    if isinstance(modules, list) and not any(given.get(key) for key in NARROWING):
        return [*modules, *layers]
    with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as stored:
        names = [name for name in stored.keys() if name.endswith(A_SUFFIX) and EXPERTS not in name]  # noqa: SIM118
    return [*(name.removeprefix(PREFIX).removesuffix(A_SUFFIX) for name in names), *layers]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"adapter {str(folder)!r}: expected {CONFIG_FILE}, which is missing")
    with boundary(CheckpointError, f"adapter {str(folder)!r}: {CONFIG_FILE} cannot be read"):
        found = json.loads(read_plain(path, most_bytes=MOST_BYTES))
        if not isinstance(found, dict):
            raise ValueError("expected a JSON object")
        return found


def _peft_config(adapter: Mapping[str, torch.Tensor], config: LoraConfig, model_name: str) -> dict[str, Any]:
    if config.targets == ALL_LINEAR:
        # By name: peft's own all-linear also means routers.
        layers = {name.removesuffix(A_SUFFIX).rpartition(".")[2] for name in adapter if name.endswith(A_SUFFIX)}
        modules, experts = sorted(layers), list[str]()
    else:
        modules = [target for target in config.targets if not means_experts(target)]
        experts = [target for target in config.targets if means_experts(target)]
    # A weight by name is the same to peft as its layer.
    mistaken = [target for target in modules if target.rpartition(".")[2] in OF_EXPERTS and _is_mixture(model_name)]
    modules = [target for target in modules if target not in mistaken]
    parameters = [*experts, *(f"{target}{WEIGHT}" for target in mistaken)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # Of parameters peft drops no inputs, and an adapter that is loaded drops none.
        "lora_dropout": 0.0 if parameters else config.dropout,
        "use_rslora": config.rslora,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "init_lora_weights": True if config.init == "kaiming" else "gaussian",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _is_mixture(model_name: str) -> bool:
    """Return whether a folder holds a model with experts; False where there is none."""
    if not (Path(model_name) / MODEL_CONFIG).is_file():
        return False
    sizes = decoder_sizes(load_model_config(model_name))
    return any(isinstance(sizes.get(name), int) for name in EXPERT_COUNTS)


def _names_in_peft(names: Iterable[str]) -> dict[str, str]:
    """Return name of a tensor -> its name in a file of peft."""
    layers = dict.fromkeys(name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in names)
    of_module: dict[str, list[str]] = {}
    for layer in layers:
        if EXPERTS in layer:
            of_module.setdefault(layer.rpartition(".")[0], []).append(layer)
    found = {}
    for layer in layers:
        stem = layer
        if EXPERTS in layer:
            module = layer.rpartition(".")[0]
            depth = len(of_module[module]) - 1 - of_module[module].index(layer)
            stem = f"{module}.{INNER * depth}".rstrip(".")
        for suffix in (A_SUFFIX, B_SUFFIX):
            found[f"{layer}{suffix}"] = f"{PREFIX}{stem}{suffix}"
    return found


def _to_peft(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as peft stores them: of E experts A `[E r, in]`, and B `[out, r E]`, experts innermost."""
    names, found = _names_in_peft(adapter), dict[str, torch.Tensor]()
    for name, tensor in adapter.items():
        weight = tensor.detach().to("cpu", torch.float32)
        if weight.dim() == 3 and name.endswith(A_SUFFIX):
            weight = weight.flatten(0, 1)
        elif weight.dim() == 3:
            weight = weight.permute(1, 2, 0).flatten(1)
        found[names[name]] = weight.contiguous()
    return found


def _from_peft(stored: torch.Tensor, name: str, info: TensorInfo, where: str) -> torch.Tensor:
    shape = info.shape
    flat = shape if len(shape) == 2 else _flat_shape(name, shape)
    if tuple(stored.shape) != flat:
        raise CheckpointError(
            f"{where}: {name}: expected shape {flat}, got {tuple(stored.shape)}; set policy.model_name to the model "
            "that it was trained from"
        )
    weight = stored.to(torch.float32)
    if len(shape) == 3 and name.endswith(A_SUFFIX):
        weight = weight.view(shape)
    elif len(shape) == 3:
        count, rows, rank = shape
        weight = weight.view(rows, rank, count).permute(2, 0, 1)
    return weight.contiguous()


def _flat_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    count, rows, columns = shape
    return (count * rows, columns) if name.endswith(A_SUFFIX) else (rows, columns * count)
