"""What a refit is built of: its transport by name, and how it is proved."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.generation import RefitTransport
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.weight_sync.base import RefitParties, WeightSync
from nemo_rl.models.weight_sync.collective import BroadcastWeightSync
from nemo_rl.models.weight_sync.colocated import IpcWeightSync, PayloadWeightSync
from nemo_rl.models.weight_sync.receipt.probe import make_probe
from nemo_rl.models.weight_sync.receipt.records import ReceiptSpec
from nemo_rl.utils.flops import TransformerShape

__all__ = ["build_weight_sync", "receipt_spec"]

FULL = "float32"


def build_weight_sync(transport: RefitTransport, parties: RefitParties, *, address: str) -> WeightSync:
    """The chosen transport between `parties`.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """
    if transport == "broadcast":
        return BroadcastWeightSync(parties, address=address)
    return IpcWeightSync(parties) if transport == "ipc" else PayloadWeightSync(parties)


def receipt_spec(config: PolicyConfig, model: Mapping[str, object]) -> ReceiptSpec | None:
    """How refits of this policy are proved; None: not at all.

    Args:
        model: the dictionary of its Hugging Face config.
    """
    section, engines = config.generation.receipt, config.generation.precision or config.precision
    if not section.enabled:
        return None
    text = model.get("text_config")
    decoder = text if isinstance(text, Mapping) else model
    shape = TransformerShape.from_config(decoder)
    numbers = {**model, **decoder}
    return ReceiptSpec(
        probe=make_probe(
            vocab_size=shape.vocab_size,
            max_length=config.max_total_sequence_length,
            num_tokens=section.num_tokens,
            left_out={value for key, value in numbers.items() if key.endswith("token_id") and isinstance(value, int)},
        ),
        every=section.every,
        tolerance=section.tolerance,
        precision=config.precision if engines == FULL else engines,
        has_experts=shape.num_experts > 0,
    )
