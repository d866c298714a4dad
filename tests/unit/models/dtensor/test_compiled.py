"""Decoder layers that are compiled one by one: their numbers, how many graphs they take, and when they are left out."""

from __future__ import annotations

import copy
import logging
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.packing import PackPlan
from nemo_rl.distributed.worker_pass import WorkerPass
from nemo_rl.errors import ConfigError
from nemo_rl.models.attention.varlen import ATTENTION_NAME, Segments
from nemo_rl.models.dtensor import layers as compiled
from nemo_rl.models.dtensor import parallelize
from nemo_rl.models.dtensor.layers import CompiledLayers, chooses_compiled, compile_problem
from nemo_rl.models.hf.loading import load_causal_lm, load_model_config
from nemo_rl.models.policy.observer import Capture, HookObserver
from nemo_rl.utils.metrics import merge_metrics, values
from tests.helpers.tiny_model import tiny_batch, tiny_policy, tiny_worker

LOSS = PolicyLoss(config=LossConfig())
PACKINGS = ((5, 9, 7), (3, 11), (20,), (8, 8, 8, 8), (2, 31, 6, 1, 4))
PLANS = [
    PackPlan(microbatches=(((6, 1, 3), (0,), (7, 2, 5, 4)),), steps=(3,), pad_to=24, packed=True),
    PackPlan(microbatches=(((6, 1), (0, 3), (7, 2), (5, 4)),), steps=(4,), pad_to=24, packed=True),
]


def _passes(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return logits of every packing, then the gradients of all."""
    found = []
    for lengths in PACKINGS:
        ids = torch.arange(sum(lengths))[None] % 50
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        assert list(accumulate(lengths))[-1] == ids.shape[1]
        given = {"attention_mask": None, "use_cache": False, "segments": Segments(lengths=lengths)}
        logits = model(ids, position_ids=places, **given).logits
        logits.square().mean().backward()
        found.append(logits.detach())
    return [*found, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def _whole_norms(model: torch.nn.Module) -> None:
    """Let norms compute in the dtype of the model: those of Hugging Face do so in float32, where order matters."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=child.weight.dtype)
                norm.weight = child.weight
                setattr(module, name, norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        # Graphs forward and backward as inductor gets them, which takes half a minute for its kernels.
        ("aot_eager", torch.float64),
        *(pytest.param("inductor", dtype, marks=pytest.mark.full) for dtype in (torch.float64, torch.float32)),
    ],
)
def test_compiled_layers_have_the_numbers_of_eager_ones_in_one_graph(backend, dtype, folder):
    model = load_causal_lm(folder, dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    if dtype == torch.float64:
        _whole_norms(model)
    other = copy.deepcopy(model)
    layers = CompiledLayers(other.model.layers, backend=backend)
    atol = 1e-12 if dtype == torch.float64 else 2e-5
    for mine, expected in zip(_passes(other), _passes(model), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=atol)
    assert layers.num_graphs == 1


class _Looker(HookObserver):
    """An observer of training passes that keeps nothing."""

    def begin_call(self, phase: WorkerPass) -> _Looker | None:
        return self if phase is WorkerPass.TRAIN else None

    def end_call(self, phase: WorkerPass) -> None:
        """Nothing was opened."""

    def wants(self, *_: object) -> bool:
        return True

    takes = wants

    def see(self, capture: Capture) -> None:
        """Drop it."""


@pytest.mark.slow
def test_a_worker_compiles_its_passes_but_those_that_are_watched(folder, monkeypatch, caplog):
    monkeypatch.setattr(parallelize, "CompiledLayers", partial(CompiledLayers, backend="eager"))
    found, metrics = {}, {}
    for mode in ("off", "on"):
        worker = tiny_worker(tiny_policy(folder, dtensor_cfg=DTensorConfig(compile=mode)))
        try:
            for step in range(4):
                batch = tiny_batch(8, seed=step, width=24 + step)
                worker.get_logprobs(batch, plan=PLANS[(step + 1) % 2])
                metrics[mode] = values(merge_metrics(worker.train(batch, LOSS, gbs=8, plan=PLANS[step % 2]).metrics))
            found[mode] = dict(worker.export_weights())
        finally:
            worker.shutdown()
    # A backend that runs the graph as it was traced changes no bit.
    assert all(torch.equal(weight, found["on"][name]) for name, weight in found["off"].items())
    assert "compile_s" not in metrics["off"]
    counted = (metrics["on"]["compiled_graphs"], metrics["on"]["recompilations"], metrics["on"]["compile_s"])
    assert counted == (2.0, 0.0, 0.0), "one graph with gradients and one without, none after the first step"

    with caplog.at_level(logging.INFO, logger=compiled.__name__):
        watched = DTensorConfig(compile="on")
        worker = tiny_worker(tiny_policy(folder, dtensor_cfg=watched), hook_observers=(_Looker(),))
        try:
            for _ in range(2):
                worker.train(tiny_batch(8), LOSS, gbs=8, plan=PLANS[0])
            assert worker.engine.model.compiled.num_graphs == 0
        finally:
            worker.shutdown()
    assert caplog.text.count("where a pass is recorded or watched") == 1


class _Counting(torch.nn.Module):
    """A layer that torch compiles again for every value of its number."""

    kind: str = ""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + len(self.kind)


def test_a_run_that_recompiles_says_so_once_and_makes_no_more_graphs(caplog: pytest.LogCaptureFixture) -> None:
    layer = _Counting()
    layers = CompiledLayers([layer], backend="eager")

    def run(kind: str) -> float:
        layer.kind = kind
        with layers.pass_of(None):
            return float(layer(torch.zeros(3))[0])

    assert [run("") for _ in range(compiled.WARM_PASSES)] == [0.0] * compiled.WARM_PASSES
    assert layers.num_graphs == 1
    assert [run("x" * length) for length in range(1, 8)] == [float(length) for length in range(1, 8)]
    assert (layers.num_graphs, layers.recompilations) == (5, compiled.MOST_RECOMPILATIONS + 1)
    assert caplog.text.count("no more graphs are made") == 1


@pytest.mark.slow
def test_a_small_model_tells_whether_layers_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, state = load_model_config(folder), torch.random.get_rng_state()
    assert compile_problem(model, dtype=torch.float32, device="cpu") is None
    assert torch.equal(torch.random.get_rng_state(), state)

    class Looking(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value if value.sum() > 0 else -value

    layer = Looking()
    CompiledLayers([layer], backend="eager")
    monkeypatch.setattr(compiled, "CompiledLayers", lambda *_, **__: layer(torch.ones(2)))
    problem = compile_problem(model, dtype=torch.float32, device="cpu")
    assert problem == "Data-dependent branching"
    with pytest.raises(
        ConfigError, match=r"policy.dtensor_cfg.compile: 'on', and layers of 'qwen3' cannot be compiled: Data-dep"
    ):
        chooses_compiled(model, tiny_policy(folder, dtensor_cfg=DTensorConfig(compile="on")), "cpu")


def test_auto_compiles_on_cuda_what_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model_config(folder)

    def is_compiled(device: str, **sizes: object) -> bool:
        policy = PolicyConfig(model_name=str(folder), dtensor_cfg=DTensorConfig(**sizes))
        return chooses_compiled(model, policy, device)

    assert not is_compiled("cpu")
    monkeypatch.setattr(compiled, "compile_problem", lambda *_, **__: None)
    assert is_compiled("cuda")
    for refused in ({"compile": "off"}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}):
        assert not is_compiled("cuda", **refused)
    assert not chooses_compiled(model, PolicyConfig(model_name=str(folder), deterministic=True), "cuda")
    monkeypatch.setattr(compiled, "compile_problem", lambda *_, **__: "a graph break")
    assert not is_compiled("cuda")
