"""What records say of the model that they are of, so that those of two models are not compared."""

from __future__ import annotations

from pathlib import Path

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.loading import load_model_config
from nemo_rl.models.policy.recording.recording import RecordSpec

__all__ = ["model_identity", "record_spec"]

IDENTITY = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
)
"""Settings that must agree between two models whose tensors are compared."""


def model_identity(policy: PolicyConfig) -> dict[str, object]:
    """Raises:
    ModelFolderError: the folder cannot be read.
    """
    settings = load_model_config(policy.model_name).get_text_config().to_dict()
    return {name: settings[name] for name in IDENTITY if settings.get(name) is not None}


def record_spec(
    policy: PolicyConfig,
    *,
    folder: Path,
    sites: str,
    phases: tuple[str, ...],
    weights: str,
    must_succeed: bool,
    has_backward: bool = True,
    settings: dict[str, object] | None = None,
) -> RecordSpec:
    """What the workers of a policy need to know to record its sites."""
    return RecordSpec(
        folder=folder,
        sites=sites,
        phases=phases,
        must_succeed=must_succeed,
        has_backward=has_backward,
        model=model_identity(policy),
        settings=settings or {},
        tokenizer=str(Path(policy.tokenizer.name or policy.model_name).absolute()),
        weights=weights,
        engine="megatron" if policy.megatron_cfg.enabled else "dtensor",
        precision=policy.precision,
    )
