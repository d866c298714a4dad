"""Rotary angles at given positions are those of Hugging Face, and the scaling of yarn reaches the scores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator

import pytest
import torch
from transformers import PretrainedConfig

from nemo_rl.models.hf.folder import ModelWeights
from nemo_rl.models.megatron.architecture import rotary_frequencies, rotary_problems
from nemo_rl.models.megatron.attention import Rotary
from nemo_rl.models.megatron.convert import load_weights
from nemo_rl.models.megatron.setup import MegatronModel, build_model, initialize_parallel
from tests.helpers.megatron_models import (
    FAMILIES,
    LLAMA3_ROPE,
    TIMEOUT_S,
    alone,
    config_of,
    forward,
    hf_model,
    policy_config,
    tokens,
)

LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
WITH_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
GIVEN_FACTOR = YARN | {"attention_factor": 1.5, "truncate": False, "beta_fast": 16, "beta_slow": 2}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {
    "default": DEFAULT,
    "linear": LINEAR,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn, mscale": WITH_MSCALE,
    "yarn, factor": GIVEN_FACTOR,
}
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 31, 32, 100, 255])
"""Of two sequences in a row, and beyond the original length of yarn."""
SINE_ERROR = 255 * 2.0**-23
"""Both sides round the angle, at most 255, to float32; sine and cosine are taken in float64 here."""
LOGIT_ERROR = 5e-6
"""Of float32 logits of about 2, in another order of sums."""


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    with alone():
        initialize_parallel(policy_config(), timeout_s=TIMEOUT_S, seed=1)
        yield


def of_hugging_face(config: PretrainedConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[s, D]` of the model's own module."""
    name = config.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    [kind] = [value for key, value in vars(module).items() if key.endswith("RotaryEmbedding")]
    cosine, sine = kind(config)(torch.zeros(1), POSITIONS[None])
    return cosine[0], sine[0]


def built(family: str, **changes: object) -> tuple[MegatronModel, torch.nn.Module]:
    hf = hf_model(family, num_hidden_layers=2, **changes)
    model = build_model(hf.config, policy_config(), device=torch.device("cpu"))
    load_weights(model, ModelWeights(hf, where="memory"))
    return model, hf


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_angles_of_every_kind_are_those_of_hugging_face(family: str, name: str) -> None:
    config = config_of(family, rope_parameters=KINDS[name])
    assert rotary_problems(config) == []
    rotary = Rotary(config)
    angles = rotary(POSITIONS)[:, 0, 0].double()
    cosine, sine = of_hugging_face(config)
    factor = rotary.attention_scaling
    assert (factor != 1.0) == name.startswith("yarn")
    torch.testing.assert_close(angles.cos() * factor, cosine.double(), atol=SINE_ERROR, rtol=0)
    torch.testing.assert_close(angles.sin() * factor, sine.double(), atol=SINE_ERROR, rtol=0)


@pytest.mark.parametrize("kind", [DEFAULT, LINEAR], ids=["default", "linear"])
@pytest.mark.parametrize("part", [0.5, 0.25])
def test_angles_of_a_part_of_each_head_are_those_of_hugging_face(part: float, kind: dict[str, object]) -> None:
    config = config_of("glm4_moe", rope_parameters=kind | {"partial_rotary_factor": part})
    angles = Rotary(config)(POSITIONS)[:, 0, 0].double()
    assert angles.shape == (len(POSITIONS), int(8 * part))
    torch.testing.assert_close(angles.cos(), of_hugging_face(config)[0].double(), atol=SINE_ERROR, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_of_every_family_are_known(family: str) -> None:
    frequencies, factor = rotary_frequencies(config_of(family))
    assert frequencies.dtype is torch.float32 and frequencies[0] == 1.0 and factor == 1.0


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", YARN),
        ("qwen3", GIVEN_FACTOR),
        ("mistral", LINEAR),
        ("glm4_moe", LINEAR | {"partial_rotary_factor": 0.5}),
    ],
)
def test_logits_with_scaled_positions_are_those_of_hugging_face(family: str, rope: dict[str, object]) -> None:
    # Positions beyond the original length, where the kinds differ most.
    token_NS = tokens(2, 80)
    model, hf = built(family, rope_parameters=rope)
    with torch.no_grad():
        found, expected = forward(model, token_NS), hf(token_NS).logits
        assert float((found - expected).abs().max()) < LOGIT_ERROR
        # The comparison sees the scale of the scores where there is one, and the positions.
        model.module.rotary_pos_emb.inverse_frequencies = rotary_frequencies(
            config_of(
                family, rope_parameters={**DEFAULT, "partial_rotary_factor": rope.get("partial_rotary_factor", 1)}
            )
        )[0]
        assert float((forward(model, token_NS) - expected).abs().max()) > 1e-3


def test_without_its_scale_yarn_has_other_logits() -> None:
    model, hf = built("llama", rope_parameters=YARN)
    layer = model.module.decoder.layers[0].self_attention.core_attention
    factor = 0.1 * math.log(8.0) + 1
    assert layer.scaling == pytest.approx(8**-0.5 * factor**2)
    for layer in model.module.decoder.layers:
        layer.self_attention.core_attention.scaling = 8**-0.5
    with torch.no_grad():
        difference = forward(model, tokens()) - hf(tokens()).logits
    assert float(difference.abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_rows_restart_their_positions(family: str) -> None:
    rotary = Rotary(config_of(family))
    again = rotary(torch.tensor([0, 1, 2, 0, 1]))
    assert torch.equal(again[:2], again[3:])
