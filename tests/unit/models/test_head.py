"""Head and log-probabilities as one operation: gradients, memory, and heads that are no plain product."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, Qwen2Config

from nemo_rl.models.dtensor.parallelize import PlainHead
from nemo_rl.models.head.logits import CHUNK_ELEMENTS, KeptSets, LazyLogits
from nemo_rl.models.head.logprobs import NO_MORE, Sampling, WantedLines, filter_logits, token_lines

PLAIN = Sampling()
M, D, V, RANK = 5, 4, 11, 2
DRAW = torch.Generator().manual_seed(0)
TARGETS = torch.randint(0, V, (M,), generator=DRAW)
KEPT_MV = (torch.rand(M, V, generator=DRAW) < 0.5).scatter(1, TARGETS[:, None], True)
IS_DROPPED = torch.tensor([False, True, False, True, False])
PLACES, TOKENS = (IS_DROPPED[:, None] != KEPT_MV).nonzero(as_tuple=True)
RECORDED = KeptSets(place_E=PLACES, token_E=TOKENS, is_dropped_m=IS_DROPPED)
IDS = torch.rand(M, V, generator=DRAW).argsort(-1)[:, :3]
MIXED_VM = torch.randn(V, M, generator=DRAW, dtype=torch.float64)
EVERY_LINE = WantedLines(entropy=True, unfiltered=True, ids_MK=IDS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of head, a distribution, and what is asked of it."""

    sampling: Sampling = PLAIN
    kept: KeptSets | None = None
    lines: WantedLines = NO_MORE
    has_bias: bool = False
    has_adapter: bool = False
    is_tied: bool = False
    scale: float = 1.0
    cap: float | None = None


CASES = {
    "plain": Case(),
    "temperature and entropy": Case(sampling=Sampling(temperature=0.7), lines=WantedLines(entropy=True)),
    "a tied head with a filter": Case(sampling=Sampling(top_k=5, top_p=0.8), is_tied=True),
    "every line of a filter": Case(sampling=Sampling(temperature=1.3, top_p=0.7), lines=EVERY_LINE),
    "recorded sets": Case(sampling=Sampling(top_k=5), kept=RECORDED),
    "every line of recorded sets": Case(sampling=Sampling(top_k=5), kept=RECORDED, lines=EVERY_LINE, has_bias=True),
    "a set": Case(lines=WantedLines(ids_MK=IDS), has_bias=True),
    "an adapter with a bias": Case(has_adapter=True, has_bias=True, scale=0.5),
    "a cap": Case(has_adapter=True, scale=0.7, cap=3.0, sampling=Sampling(temperature=0.7)),
    "every line of a capped head": Case(has_adapter=True, has_bias=True, scale=0.7, cap=3.0, lines=EVERY_LINE),
}


def lazy_logits(case: Case, tensors: list[torch.Tensor]) -> LazyLogits:
    rest = iter(tensors)
    hidden = next(rest)
    weight = MIXED_VM @ hidden if case.is_tied else next(rest)
    bias = next(rest) if case.has_bias else None
    narrow, wide = (next(rest), next(rest)) if case.has_adapter else (None, None)
    return LazyLogits(
        hidden_MD=hidden, weight_VD=weight, bias_V=bias, narrow_Mr=narrow, wide_Vr=wide, scale=case.scale, cap=case.cap
    )


def by_definition(case: Case, logits: LazyLogits) -> torch.Tensor:
    """Return the lines from whole logits."""
    z = logits.hidden_MD @ logits.weight_VD.T
    z = z if logits.bias_V is None else z + logits.bias_V
    z = (z if logits.narrow_Mr is None else z + logits.narrow_Mr @ logits.wide_Vr.T) * case.scale
    scores = (z if case.cap is None else case.cap * torch.tanh(z / case.cap)) / case.sampling.temperature
    found = filter_logits(scores.detach(), top_k=case.sampling.top_k, top_p=case.sampling.top_p, keep_M=TARGETS)
    is_out = found.isneginf() if case.kept is None else ~KEPT_MV
    cut, whole = scores.masked_fill(is_out, float("-inf")).log_softmax(-1), scores.log_softmax(-1)
    lines = [cut.gather(1, TARGETS[:, None])[:, 0]]
    if case.lines.entropy:
        lines.append(-(cut.exp() * cut.masked_fill(is_out, 0.0)).sum(-1))
    if case.lines.unfiltered:
        lines.append(whole.gather(1, TARGETS[:, None])[:, 0])
    if case.lines.ids_MK is not None:
        lines += [*whole.gather(1, IDS).T, whole.scatter(1, IDS, float("-inf")).logsumexp(-1)]
    return torch.stack(lines)


@pytest.mark.parametrize("name", CASES)
def test_every_line_and_its_gradients_equal_the_definition_over_tiles(name, monkeypatch):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 30)
    case, draw = CASES[name], torch.Generator().manual_seed(1)
    shapes = [(M, D), *([] if case.is_tied else [(V, D)]), *([(V,)] if case.has_bias else [])]
    shapes += [(M, RANK), (V, RANK)] if case.has_adapter else []
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]

    def found(*given: torch.Tensor) -> torch.Tensor:
        logits = lazy_logits(case, list(given))
        return token_lines(logits, TARGETS, sampling=case.sampling, kept=case.kept, lines=case.lines)

    expected = by_definition(case, lazy_logits(case, tensors))
    torch.testing.assert_close(found(*tensors), expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    for ours, exact in zip(torch.autograd.grad((found(*tensors) * weights).sum(), tensors), theirs, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-11)
    assert torch.autograd.gradcheck(found, tensors)


class Memory(TorchDispatchMode):
    """Bytes of the storages that operations make: those that are alive, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            storage = leaf.untyped_storage() if torch.is_tensor(leaf) else None
            if storage is not None and storage._cdata not in given | self._seen:
                self._seen.add(storage._cdata)
                self.alive += storage.nbytes()
                self.most = max(self.most, self.alive)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, key: int, count: int) -> None:
        self._seen.discard(key)
        self.alive -= count


def run_pass(count: int, vocab: int, sampling: Sampling = PLAIN) -> tuple[int, int]:
    """Return bytes that are saved for the backward pass besides weights, and the most that both passes make."""
    hidden, weight = (torch.randn(rows, 16, dtype=torch.bfloat16).requires_grad_() for rows in (count, vocab))
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != weight.data_ptr():
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with Memory() as memory:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            lines = token_lines(
                LazyLogits(hidden_MD=hidden, weight_VD=weight), torch.arange(count) % vocab, sampling=sampling
            )
        lines.sum().backward()
    return sum(saved.values()), memory.most


def test_what_is_kept_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    few, many = run_pass(64, 1_000)[0], run_pass(64, 19_000)[0]
    assert few == many <= 64 * (16 * 2 + 24)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5)])
def test_memory_does_not_grow_with_logits(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 64 * 1_000)
    few, many = (run_pass(count, 1_000, sampling)[1] for count in (256, 1_024))
    assert (many - few) / (1_024 - 256) / 1_000 < 0.5, "bytes for each element of the logits"


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"num_hidden_layers": 1, "intermediate_size": 16, "pad_token_id": 0}
FAMILIES: dict[str, tuple[Callable, dict, tuple[float, float | None]]] = {
    "qwen2": (Qwen2Config, {}, (1.0, None)),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 5.0, "head_dim": 8}, (1.0, 5.0)),
    "cohere": (CohereConfig, {"logit_scale": 0.25}, (0.25, None)),
    "granite": (GraniteConfig, {"logits_scaling": 8.0}, (0.125, None)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_taken_with_its_factor_and_cap(family: str) -> None:
    config, own, (scale, cap) = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SMALL, **own)).double().eval()
    ids = torch.arange(6)[None]
    expected = model(ids).logits[0].log_softmax(-1)[:, 3]
    taken = PlainHead.of(model)
    assert taken is not None and (taken.scale, taken.cap) == (scale, cap)
    with taken.taking():
        model(ids)
    logits = taken.taken()
    lazy = logits.of((logits.hidden_MD[0], *logits.tensors[1:]))
    found = token_lines(lazy, torch.full((6,), 3), sampling=Sampling())[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(ids).logits[0].log_softmax(-1)[:, 3], expected, rtol=0, atol=0)


def test_a_model_that_does_more_than_scale_keeps_its_logits(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL))
    before = model.forward

    def shifted(**inputs: object) -> object:
        output = before(**inputs)
        output.logits = output.logits.abs()
        return output

    model.forward = shifted
    with caplog.at_level("INFO"):
        assert PlainHead.of(model) is None
    assert "Qwen2ForCausalLM keeps its logits whole" in caplog.text
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.base_model)
