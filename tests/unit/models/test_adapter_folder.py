"""Adapter folders: peft reads what is written here with the same numbers, and the other way round."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nemo_rl.config.backends import LoraConfig
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.adapters.folder import (
    CONFIG_FILE,
    HONOURED,
    REFUSED,
    WEIGHTS_FILE,
    WITHOUT_EFFECT,
    base_identity,
    base_of,
    is_adapter_folder,
    load_model_at,
    lora_of,
    merge_folder,
    policy_at,
    problem_of,
    read_adapter,
    served_adapter,
    write_adapter,
)
from nemo_rl.models.adapters.lora import (
    B_SUFFIX,
    adapted_layers,
    adapter_infos,
    initial_adapter,
    merged,
    named_adapters,
)
from nemo_rl.models.hf.folder import ModelWeights, open_weights
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.policy.interfaces import TensorInfo
from tests.helpers.model_families import write_family
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder

EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def _adapter(folder: Path, config: LoraConfig) -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor]]:
    """An adapter whose B is not zero."""
    infos = adapter_infos(adapted_layers(load_causal_lm(folder), config), config)
    values = dict(initial_adapter(infos, config, seed=3))
    generator = torch.Generator().manual_seed(5)
    return infos, {
        name: value if value.any() else 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in values.items()
    }


def _logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(2, 22).view(2, 10)
    with torch.no_grad():
        return model(input_ids=ids).logits


def _with_weights(model: PreTrainedModel, adapter: dict[str, torch.Tensor], scale: float) -> PreTrainedModel:
    changed = dict(merged(model.state_dict().items(), adapter, scale))
    model.load_state_dict(changed)
    return model


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["layers.1.self_attn.v_proj"]])
def test_peft_computes_the_merged_weights_from_a_written_folder(dense, tmp_path, targets, rslora):
    config = LoraConfig(enabled=True, rank=4, alpha=6, rslora=rslora, targets=targets)
    _, adapter = _adapter(dense, config)
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of keys that are missing or left over
        loaded = PeftModel.from_pretrained(load_causal_lm(dense).double(), str(tmp_path)).double()
    expected = _with_weights(load_causal_lm(dense).double(), adapter, config.scale)
    torch.testing.assert_close(_logits(loaded), _logits(expected), rtol=0, atol=1e-10)
    assert (_logits(loaded) - _logits(load_causal_lm(dense).double())).abs().max() > 1e-3


@pytest.mark.parametrize("targets", [EXPERTS, ["experts.down_proj"]])
def test_peft_computes_the_merged_experts_from_a_written_folder(mixture, tmp_path, targets):
    config = LoraConfig(enabled=True, rank=4, alpha=8, targets=targets)
    infos, adapter = _adapter(mixture, config)
    write_adapter(tmp_path, adapter, config, model_name=str(mixture), base="x")
    model = load_causal_lm(mixture).double()
    model.set_experts_implementation("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded = PeftModel.from_pretrained(model, str(tmp_path)).double()
    plain = load_causal_lm(mixture).double()
    plain.set_experts_implementation("eager")
    expected = plain
    weights = dict(plain.state_dict())
    for name, info in infos.items():
        if name.endswith(".lora_A.weight") and len(info.shape) == 3:
            layer = name.removesuffix(".lora_A.weight")
            delta = adapter[f"{layer}.lora_B.weight"].double() @ adapter[name].double() * config.scale
            weights[layer] = weights[layer] + delta
    linear = {name: value for name, value in adapter.items() if value.dim() == 2}
    expected.load_state_dict(dict(merged(weights.items(), linear, config.scale)))
    torch.testing.assert_close(_logits(loaded), _logits(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("targets", [["q_proj", "o_proj"], EXPERTS])
def test_a_folder_of_peft_is_read_with_every_value(mixture: Path, tmp_path: Path, targets: list[str]) -> None:
    experts = [target for target in targets if "experts" in target]
    model = get_peft_model(
        load_causal_lm(mixture),
        PeftConfig(
            r=3,
            lora_alpha=9,
            use_rslora=True,
            init_lora_weights=False,
            target_modules=[target for target in targets if target not in experts],
            target_parameters=experts or None,
        ),
    )
    model.save_pretrained(str(tmp_path))
    config = lora_of(tmp_path)
    assert (config.rank, config.alpha, config.rslora) == (3, 9, True)
    infos = adapter_infos(adapted_layers(load_causal_lm(mixture), config), config)
    adapter = read_adapter(tmp_path, infos, config, base=None)
    again = tmp_path / "again"
    again.mkdir()
    write_adapter(again, adapter, config, model_name=str(mixture), base="x")
    theirs, ours = load_file(str(tmp_path / WEIGHTS_FILE)), load_file(str(again / WEIGHTS_FILE))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert is_adapter_folder(again) and not is_adapter_folder(mixture)


def test_what_is_written_is_read_to_the_last_bit(dense: Path, tmp_path: Path) -> None:
    config = LoraConfig(enabled=True, rank=4)
    infos, adapter = _adapter(dense, config)
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="abc")
    found = read_adapter(tmp_path, infos, config, base="abc")
    assert list(found) == list(infos) and all(torch.equal(found[name], adapter[name]) for name in infos)
    assert base_of(tmp_path) == "abc"


def test_another_rank_scale_base_or_layers_are_refused_with_what_to_set(dense: Path, tmp_path: Path) -> None:
    config = LoraConfig(enabled=True, rank=4)
    infos, adapter = _adapter(dense, config)
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="abc")

    def refusal(other: LoraConfig, base: str | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path, infos, other, base=base)
        return str(caught.value)

    assert "set policy.lora.rank=4" in refusal(LoraConfig(enabled=True, rank=8))
    assert "set policy.lora.alpha=32.0" in refusal(LoraConfig(enabled=True, rank=4, alpha=8))
    assert "set policy.lora.rslora=False" in refusal(LoraConfig(enabled=True, rank=4, rslora=True))
    assert "base with other weights" in refusal(config, base="other")
    fewer = {name: info for name, info in infos.items() if ".v_proj." not in name}
    with pytest.raises(CheckpointError, match="v_proj.*which this run does not train"):
        read_adapter(tmp_path, fewer, config, base=None)
    tensors = load_file(str(tmp_path / WEIGHTS_FILE))
    del tensors[next(iter(tensors))]
    save_file(tensors, str(tmp_path / WEIGHTS_FILE))
    assert "lacks" in refusal(config)


CHANGED: dict[str, object] = {
    "bias": "all",
    "init_lora_weights": "pissa_niter_4",
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "trainable_token_indices": [1],
    "layer_replication": [[0, 2]],
    "alora_invocation_tokens": [9],
}
"""Values of refused fields; of the others they are true, or their own section."""
TURNED_ON = {key: CHANGED.get(key, {"rank": 2} if key.endswith("_config") else True) for key in REFUSED}


@pytest.mark.parametrize(("key", "value"), [*TURNED_ON.items(), ("a_field_of_next_year", 0.5)])
def test_what_is_more_than_two_matrices_is_refused(dense: Path, tmp_path: Path, key: str, value: object) -> None:
    config = LoraConfig(enabled=True, rank=4)
    infos, adapter = _adapter(dense, config)
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="abc")
    given = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**given, key: value}))
    for read in (lambda: lora_of(tmp_path), lambda: read_adapter(tmp_path, infos, config, base=None)):
        with pytest.raises(CheckpointError, match=rf"{key}: .*merge_and_unload.*policy\.model_name"):
            read()


def test_every_field_of_pefts_config_is_read_refused_or_without_effect() -> None:
    known = [*HONOURED, *WITHOUT_EFFECT, *REFUSED]
    assert sorted(known) == sorted({field.name for field in dataclasses.fields(PeftConfig)})
    given = {key: value for key, value in PeftConfig(r=4).to_dict().items() if key in REFUSED}
    assert given.keys() == REFUSED.keys() and not [key for key in given if problem_of(key, given[key])]
    starts = (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "corda", "loftq", "eva", "mica")
    assert [start for start in starts if not problem_of("init_lora_weights", start)] == list(starts[:4])


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.1\..*(q|down)_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers", "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "orthogonal", "lora_alpha": 3},
    ],
    ids=["expression", "excluded", "one layer", "pattern", "orthogonal"],
)
def test_layers_and_scales_of_others_give_pefts_logits(dense: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    theirs = get_peft_model(load_causal_lm(dense), PeftConfig(**{"r": 4, "task_type": "CAUSAL_LM", **fields}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_B" in name:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    theirs.save_pretrained(str(tmp_path))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, plain = theirs.eval()(ids).logits, load_causal_lm(dense).eval()(ids).logits
        found = load_model_at(tmp_path, dtype=torch.float32).eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize(("number", "alpha"), [(math.nan, 32.0), (math.inf, 32.0), (3e38, 3200.0)])
def test_numbers_that_are_not_finite_are_refused(dense: Path, tmp_path: Path, number: float, alpha: float) -> None:
    config = LoraConfig(enabled=True, rank=4, alpha=alpha)
    infos, adapter = _adapter(dense, config)
    name = next(name for name in adapter if name.endswith(B_SUFFIX))
    adapter[name][0, 0] = number
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="abc")
    with pytest.raises(CheckpointError, match=rf"{name}: .*not finite"):
        read_adapter(tmp_path, infos, config, base=None)


@pytest.mark.parametrize("text", ["", "[]", '{"peft_type": "LOHA"}', '{"peft_type": "LORA", "r": "x"}'])
def test_a_broken_config_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=CONFIG_FILE):
        lora_of(tmp_path)


def test_a_base_is_known_by_its_weights_however_they_are_cut(dense: Path, tmp_path: Path) -> None:
    model = load_causal_lm(dense)
    whole = base_identity(open_weights(dense, model.config))
    model.save_pretrained(str(tmp_path), max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert base_identity(open_weights(tmp_path, model.config)) == whole == base_identity(ModelWeights(model, where=""))
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-6
    assert base_identity(ModelWeights(model, where="")) != whole


def test_targets_that_match_nothing_are_refused_with_the_layers_that_there_are(dense: Path) -> None:
    with pytest.raises(ConfigError, match=r"query_key_value match no linear layer.*q_proj"):
        adapted_layers(load_causal_lm(dense), LoraConfig(enabled=True, targets=["q_proj", "query_key_value"]))
    assert not list(named_adapters(load_causal_lm(dense)))


def test_an_end_of_a_name_means_linear_layers_and_experts_only_by_their_own_name(mixture: Path) -> None:
    dense_layers = adapted_layers(load_causal_lm(mixture), LoraConfig(enabled=True, targets=["down_proj"]))
    assert [layer.name for layer in dense_layers] == ["model.layers.0.mlp.down_proj"]
    layers = adapted_layers(load_causal_lm(mixture), LoraConfig(enabled=True, targets=EXPERTS))
    assert {layer.num_experts > 0 for layer in layers if "experts" in layer.name} == {True}
    every = adapted_layers(load_causal_lm(mixture), LoraConfig(enabled=True))
    assert not any(layer.name.rpartition(".")[2] == "gate" or "experts" in layer.name for layer in every)


EXPERT_SIZES = {
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
ROUTERS = {
    "hunyuan_v1_moe": {"mlp.gate.wg"},
    "jetmoe": {"mlp.router.layer", "self_attention.experts.router.layer"},
    "llama4_text": {"feed_forward.router"},
    "phimoe": {"mlp.router"},
    "mamba": set(),
    "qwen3_next": set(),
}
"""Model type -> ends of the names of its routers that are linear layers."""


@pytest.mark.parametrize("model_type", ROUTERS)
def test_all_linear_leaves_out_what_scores_experts_whatever_its_name(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, moe_topk=2, vocab_size=999, **EXPERT_SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    adapted = {layer.name for layer in adapted_layers(model, LoraConfig(enabled=True))}
    left_out = {name.partition("layers.")[2].partition(".")[2] for name in linear - adapted}
    assert left_out == ROUTERS[model_type] | {""}, "routers, and the head"


def test_a_head_that_is_tied_is_adapted_alone_and_untied_by_a_merge(tmp_path: Path) -> None:
    tied = write_tiny_folder(tmp_path / "tied")
    config = LoraConfig(enabled=True, rank=4, alpha=8, targets=["q_proj", "lm_head"])
    _, adapter = _adapter(tied, config)
    base = base_identity(open_weights(tied, load_causal_lm(tied).config))
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_adapter(folder, adapter, config, model_name=str(tied), base=base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that one end of the tie is adapted
        theirs = _logits(PeftModel.from_pretrained(load_causal_lm(tied), str(folder)))
    ours = _logits(load_model_at(folder, dtype=torch.float32))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    merge_folder(folder, base=tied, dtype=torch.float32)
    whole = load_causal_lm(folder)
    assert not whole.config.tie_word_embeddings
    assert torch.equal(whole.get_input_embeddings().weight, load_causal_lm(tied).get_input_embeddings().weight)
    torch.testing.assert_close(_logits(whole), theirs, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="shares its weight with the embedding"):
        adapted_layers(load_causal_lm(tied), config.model_copy(update={"serve": "merged"}))


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], EXPERTS])
def test_a_merged_folder_is_the_model_with_its_adapter(mixture: Path, tmp_path: Path, targets: list[str]) -> None:
    config = LoraConfig(enabled=True, rank=4, alpha=8, targets=targets)
    _, adapter = _adapter(mixture, config)
    base = base_identity(open_weights(mixture, load_causal_lm(mixture).config))
    write_adapter(tmp_path, adapter, config, model_name=str(mixture), base=base)
    lost = merge_folder(tmp_path, base=mixture, dtype=torch.float32)
    assert lost == 0 and not is_adapter_folder(tmp_path)
    expected = _with_weights(load_causal_lm(mixture), adapter, config.scale)
    torch.testing.assert_close(_logits(load_causal_lm(tmp_path)), _logits(expected), rtol=0, atol=0)


def test_merging_in_16_bit_says_how_much_of_the_update_it_loses(dense: Path, tmp_path: Path) -> None:
    config = LoraConfig(enabled=True, rank=4, alpha=8)
    infos, adapter = _adapter(dense, config)
    model = load_causal_lm(dense)
    half = tmp_path / "half"
    model.to(torch.bfloat16).save_pretrained(str(half))
    lost = {}
    for size in (1e-5, 1e-1):
        folder = tmp_path / f"{size}"
        folder.mkdir()
        small = {name: v if name.endswith("A.weight") else v / v.abs().max() * size for name, v in adapter.items()}
        write_adapter(folder, small, config, model_name=str(half), base="")
        (folder / "nemo_rl_base.json").unlink()
        lost[size] = merge_folder(folder, base=half, dtype=torch.bfloat16)
    assert lost[1e-5] > 0.9 and lost[1e-1] < 0.1 and len(infos) == 28


def test_an_adapter_is_not_merged_into_another_base(dense: Path, tmp_path: Path) -> None:
    config = LoraConfig(enabled=True, rank=4)
    _, adapter = _adapter(dense, config)
    write_adapter(tmp_path, adapter, config, model_name=str(dense), base="of other weights")
    with pytest.raises(CheckpointError, match="base with other weights"):
        merge_folder(tmp_path, base=dense, dtype=torch.float32)
    assert is_adapter_folder(tmp_path)


def _written(folder: Path, model: Path, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Write an adapter whose B is not zero, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _, adapter = _adapter(model, config)
    base = base_identity(open_weights(model, load_causal_lm(model).config))
    write_adapter(folder, adapter, config, model_name=str(model), base=base)
    return adapter


def test_a_policy_at_an_adapter_keeps_its_base_and_starts_from_the_folder(dense: Path, tmp_path: Path) -> None:
    given = LoraConfig(enabled=True, rank=4, alpha=6, rslora=True, targets=["q_proj"])
    _written(tmp_path, dense, given)
    policy = policy_at(tiny_policy(Path("base"), lora=LoraConfig(enabled=True, rank=16, serve="merged")), tmp_path)
    assert policy.model_name == "base" and policy.lora.adapter == str(tmp_path) and policy.lora.is_native
    assert (policy.lora.rank, policy.lora.alpha, policy.lora.rslora) == (4, 6, True)
    [layer, other] = adapted_layers(load_causal_lm(dense), policy.lora)
    assert (layer.name, other.name) == tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))


def test_a_policy_at_a_whole_model_has_no_adapter(dense: Path) -> None:
    policy = policy_at(tiny_policy(Path("base"), lora=LoraConfig(enabled=True, rank=4)), dense)
    assert policy.model_name == str(dense) and policy.lora == LoraConfig()


@pytest.mark.parametrize("family", ["dense", "mixture"])
def test_a_model_at_an_adapter_computes_the_merged_weights(family, tmp_path, request):
    folder = request.getfixturevalue(family)
    config = LoraConfig(enabled=True, rank=4, alpha=8, targets=EXPERTS if family == "mixture" else "all-linear")
    _written(tmp_path / "adapter", folder, config)
    shutil.copytree(tmp_path / "adapter", tmp_path / "merged")
    merge_folder(tmp_path / "merged", base=folder, dtype=torch.float32)
    found = _logits(load_model_at(tmp_path / "adapter", dtype=torch.float32))
    torch.testing.assert_close(
        found, _logits(load_model_at(tmp_path / "merged", dtype=torch.float32)), rtol=0, atol=2e-5
    )
    assert (found - _logits(load_model_at(folder, dtype=torch.float32))).abs().max() > 1e-2


def test_a_model_at_an_adapter_has_the_dtype_that_was_asked_for(dense: Path, tmp_path: Path) -> None:
    adapter = _written(tmp_path, dense, LoraConfig(enabled=True, rank=4))
    model = load_model_at(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    held = dict(named_adapters(model))
    assert held.keys() == adapter.keys()
    assert all(torch.equal(held[name], adapter[name].bfloat16()) for name in adapter)


def test_a_served_adapter_is_a_and_the_scaled_b(dense: Path, tmp_path: Path) -> None:
    given = LoraConfig(enabled=True, rank=4, alpha=6, rslora=True)
    adapter = _written(tmp_path, dense, given)
    lora = given.model_copy(update={"adapter": str(tmp_path)})
    known = {name: tuple(value.shape) for name, value in adapter.items()}
    found = served_adapter(lora, known)
    assert found.keys() == adapter.keys()
    for name, value in adapter.items():
        assert torch.equal(found[name], value * 3.0 if name.endswith("B.weight") else value)
    fewer = {name: shape for name, shape in known.items() if ".v_proj." not in name}
    with pytest.raises(CheckpointError, match="v_proj"):
        served_adapter(lora, fewer)


def test_an_adapter_is_not_put_on_a_base_of_other_weights(dense: Path, tmp_path: Path) -> None:
    base, folder = Path(shutil.copytree(dense, tmp_path / "base")), tmp_path / "adapter"
    folder.mkdir()
    config = LoraConfig(enabled=True, rank=4)
    identity = base_identity(open_weights(base, load_causal_lm(base).config))
    write_adapter(folder, _adapter(base, config)[1], config, model_name=str(base), base=identity)
    assert policy_at(tiny_policy(base), folder).lora.adapter == str(folder)
    load_model_at(folder, dtype=torch.float32)
    other = write_tiny_folder(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="base with other weights"):
        policy_at(tiny_policy(other), folder)
    (folder / CONFIG_FILE).write_text((folder / CONFIG_FILE).read_text().replace(str(base), str(other)))
    with pytest.raises(CheckpointError, match="base with other weights"):
        load_model_at(folder, dtype=torch.float32)
