"""`FaultyExtension`: the extension of vLLM's workers, with `FaultyRank`; importing it takes vLLM."""

from __future__ import annotations

from nemo_rl.models.generation.vllm.extension import RefitExtension
from tests.helpers.shard_vllm import FaultyRank


class FaultyExtension(FaultyRank, RefitExtension):
    pass
