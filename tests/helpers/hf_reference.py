"""The slow reference of the policy worker: a plain Hugging Face model, one row at a time, no padding, no FSDP."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.head.logprobs import Sampling, token_logprobs
from nemo_rl.models.hf.loading import load_causal_lm, named_weights
from nemo_rl.models.policy.interfaces import LossFunction, LossScale


def logprobs_from_logits(logits_NTV: torch.Tensor, input_ids_NT: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
    """Return `[N, T]` float32: log pi(token t | tokens < t) at position t; position 0 is 0."""
    rows, width = input_ids_NT.shape
    flat = token_logprobs(logits_NTV[:, :-1].flatten(0, 1), input_ids_NT[:, 1:].flatten(), sampling=sampling)
    return torch.nn.functional.pad(flat.view(rows, width - 1), (1, 0))


def hf_logprobs(model: torch.nn.Module, batch: BatchedDataDict, *, temperature: float = 1.0) -> torch.Tensor:
    """Return `[N, T]` log-probabilities, differentiable; 0 at position 0 and in the padding."""
    ids, lengths = batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist()
    rows = []
    for i, length in enumerate(lengths):
        logits = model(input_ids=ids[i : i + 1, :length], use_cache=False).logits[0] / temperature
        picked = logits[:-1].log_softmax(-1).gather(-1, ids[i, 1:length, None])[:, 0]
        rows.append(torch.nn.functional.pad(picked, (1, ids.shape[1] - length)))
    return torch.stack(rows)


def hf_entropies(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Return the `[N, T]` entropy of the distribution that each token was drawn from, differentiable."""
    ids, lengths = batch.tensor("input_ids").long(), batch.tensor("input_lengths").tolist()
    rows = []
    for i, length in enumerate(lengths):
        logprobs = model(input_ids=ids[i : i + 1, :length], use_cache=False).logits[0, :-1].log_softmax(-1)
        rows.append(torch.nn.functional.pad(-(logprobs.exp() * logprobs).sum(-1), (1, ids.shape[1] - length)))
    return torch.stack(rows)


def global_scale(batch: BatchedDataDict) -> LossScale:
    """Weighted counts over all rows of the batch."""
    tokens, weights = batch.tensor("token_mask").sum(1).double(), batch.tensor("sample_mask").double()
    return LossScale(valid_tokens=float((tokens * weights).sum()), valid_sequences=float(weights[tokens > 0].sum()))


def hf_train_step(
    folder: Path, batch: BatchedDataDict, loss_fn: LossFunction, optimizer: dict[str, object], *, max_norm: float
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, gradient norm and the weights after one step of AdamW."""
    model = load_causal_lm(folder)
    adam = torch.optim.AdamW(model.parameters(), **optimizer)
    loss = loss_fn(hf_logprobs(model, batch), batch, scale=global_scale(batch)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    adam.step()
    return loss.item(), norm.item(), {name: weight.detach() for name, weight in named_weights(model)}
