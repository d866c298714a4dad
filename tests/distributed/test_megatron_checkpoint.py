"""Optimizer checkpoints of a Megatron job: exact in every other layout, whole or absent, and safe to read."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import CheckpointError
from nemo_rl.models.megatron.checkpoint import OptimizerSnapshot, load_optimizer
from nemo_rl.models.megatron.mcore import get_cuda_rng_tracker
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel
from tests.helpers.gloo import run_ranks
from tests.helpers.megatron_models import alone, build, gradients, hf_model, policy_config, state_of, step

pytestmark = pytest.mark.slow

State = dict[str, dict[str, torch.Tensor]]
LR = 0.01
DIFFERENCE = 2e-7
"""Of float32 weights below 1, whose updates are clipped by a norm that is summed in another order."""
ALONE: dict[str, object] = {}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
UNEVEN = {**PIPELINE, "num_layers_in_first_pipeline_stage": 1}
"""In a GLM the first stage has no experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job of two ranks that is saved, and how other two ranks share it afterwards; one rank loads it, too."""

    family: str
    saved: dict[str, object]
    loaded: dict[str, object]
    precision: str = "float32"
    section: dict[str, object] = field(default_factory=dict)

    def policy(self, layout: dict[str, object]) -> PolicyConfig:
        section = {"lr": LR, "weight_decay": 0.1, **self.section}
        schedule = {"lr_decay_style": "linear", "lr_decay_iters": 5}
        return policy_config(precision=self.precision, **layout, optimizer=section, scheduler=schedule)


CASES = {
    "dense tp2 to pp2": Case(family="qwen3", saved=TENSOR, loaded=PIPELINE),
    "dense dp2 to tp2, bfloat16": Case(family="llama", saved=ALONE, loaded=TENSOR, precision="bfloat16"),
    "experts ep2 to tp2": Case(family="qwen3_moe", saved=EXPERT, loaded=TENSOR),
    "experts pp2 to ep2": Case(
        family="glm4_moe", saved=UNEVEN, loaded=EXPERT, section={"decay_norms_and_biases": False}
    ),
    "experts tp2 ep2 to pp2": Case(
        family="mixtral", saved={**TENSOR, **EXPERT, "expert_tensor_parallel_size": 1}, loaded=PIPELINE
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a job saw; tensors are whole, in Hugging Face names."""

    norms: list[float]
    restored: State
    """At the checkpoint."""
    next_weights: dict[str, torch.Tensor]
    """After one step from there, in float32."""
    counts: tuple[int, int]
    """Training calls and updates at the checkpoint."""
    draws: list[float]
    """Of this rank right after the checkpoint: torch's, then megatron-core's."""


def save_optimizer(
    model: MegatronModel, optimizer: PolicyOptimizer, trainer_state: dict[str, float], folder: Path
) -> None:
    snapshot = OptimizerSnapshot.of(model, optimizer, trainer_state, copies=False)
    snapshot.write(folder, group=dist.group.WORLD)


def _save(case: Case, folder: Path) -> Run:
    model, optimizer = build(case.family, case.policy(case.saved))
    norms = [step(model, optimizer, number) for number in range(2)]
    save_optimizer(model, optimizer, optimizer.state_dict(), folder)
    return _continue(model, optimizer, norms)


def _load(case: Case, layout: dict[str, object], folder: Path) -> Run:
    model, optimizer = build(case.family, case.policy(layout))
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.zero_()
    optimizer.load_state_dict(load_optimizer(model, optimizer, folder))
    return _continue(model, optimizer, [])


def _continue(model: MegatronModel, optimizer: PolicyOptimizer, norms: list[float]) -> Run:
    draws = [float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        draws.append(float(torch.rand(())))
    restored = state_of(model, optimizer)
    counts = optimizer.calls_done, optimizer.updates_done
    norms = [*norms, step(model, optimizer, 2)]
    after = state_of(model, optimizer)
    rests = after.get("rest", {})
    weights = {name: weight.float() + rests.get(name, 0.0) for name, weight in after["weights"].items()}
    return Run(norms=norms, restored=restored, next_weights=weights, counts=counts, draws=draws)


def _disk_full(folder: Path, rank: int) -> str:
    """A save of which rank 1 can write only the beginning."""
    model, optimizer = build("qwen3", policy_config(**PIPELINE))
    save_optimizer(model, optimizer, {}, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        save_optimizer(model, optimizer, {"calls_done": 1.0}, folder)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def _two_ranks(rank: int, folder: Path) -> list[object]:
    """Runs go to files: a tensor in a queue dies with its process."""
    for name, case in CASES.items():
        runs = _save(case, folder / name), _load(case, case.loaded, folder / name)
        torch.save([_plain(run) for run in runs], folder / f"{name}.rank{rank}")
    full = _disk_full(folder / "full", rank)
    try:
        model, optimizer = build("qwen3", policy_config(**TENSOR))
        load_optimizer(model, optimizer, folder / "nowhere")
    except CheckpointError as error:
        return [full, str(error)]
    return [full, "loaded"]


def _plain(run: Run) -> dict[str, object]:
    return {name: getattr(run, name) for name in Run.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Two ranks, and their checkpoints."""

    folder: Path
    messages: list[list[str]]
    """Of a full disk and of a missing folder, by rank."""

    def runs(self, name: str, *, rank: int = 0) -> tuple[Run, Run]:
        """Which saved, and which loaded in another layout of two ranks."""
        first, second = torch.load(self.folder / f"{name}.rank{rank}", weights_only=True)
        return Run(**first), Run(**second)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("megatron")
    return Job(folder=folder, messages=run_ranks(2, _two_ranks, folder))


@pytest.fixture
def one_rank() -> Iterator[None]:
    with alone():
        yield


# ---- two ranks train as one


def _reference(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after three steps of torch's AdamW on the whole model, and norms before clipping."""
    weights = {name: weight.detach().clone() for name, weight in hf_model(case.family).named_parameters()}
    decays = [name for name in weights if not case.section or weights[name].dim() > 1]
    groups = [
        {"params": [weights[name] for name in decays], "weight_decay": 0.1},
        {"params": [weights[name] for name in weights.keys() - set(decays)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    norms = []
    for number in range(3):
        for name, grad in gradients(case.family, number).items():
            weights[name].grad = grad.clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - number / 5)
        optimizer.step()
    return weights, norms


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.precision == "float32"])
def test_two_ranks_clip_and_step_as_torch_does_on_the_whole_model(job: Job, name: str) -> None:
    run, _ = job.runs(name)
    expected, norms = _reference(CASES[name])
    assert run.norms == pytest.approx(norms, rel=1e-6)
    for key, weight in expected.items():
        assert float((run.next_weights[key] - weight).abs().max()) < 5e-7, key


# ---- checkpoints


def _check_restored(saved: Run, loaded: Run, *, precision: str) -> None:
    assert loaded.counts == saved.counts == (2, 2)
    assert loaded.restored.keys() == saved.restored.keys()
    assert ("rest" in saved.restored) == (precision == "bfloat16")
    for kind, tensors in saved.restored.items():
        different = [name for name, tensor in tensors.items() if not torch.equal(tensor, loaded.restored[kind][name])]
        assert not different, f"{kind}: {different}"
    assert loaded.norms[-1] == pytest.approx(saved.norms[-1], rel=1e-6)
    for name, weight in saved.next_weights.items():
        # What a main weight has beyond its bfloat16 neighbour was put together in bfloat16, too.
        assert float((loaded.next_weights[name] - weight).abs().max()) <= (
            DIFFERENCE if precision == "float32" else 1e-5
        )


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_exact_in_another_layout_of_two_ranks(job: Job, name: str) -> None:
    _check_restored(*job.runs(name), precision=CASES[name].precision)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_two_ranks_is_exact_on_one(job: Job, one_rank: None, name: str) -> None:
    case = CASES[name]
    loaded = _load(case, ALONE, job.folder / name)
    _check_restored(job.runs(name)[0], loaded, precision=case.precision)


def test_random_numbers_continue_where_the_number_of_ranks_is_the_same(job: Job, one_rank: None) -> None:
    name = "dense tp2 to pp2"
    for rank in range(2):
        saved, loaded = job.runs(name, rank=rank)
        assert loaded.draws == saved.draws
    first, second = (job.runs(name, rank=rank)[0].draws for rank in range(2))
    assert first[1] != second[1], "tensor ranks draw different numbers inside megatron-core"
    torch.manual_seed(5)
    expected = float(torch.rand(()))
    model, optimizer = build("qwen3", CASES[name].policy(ALONE))
    torch.manual_seed(5)
    load_optimizer(model, optimizer, job.folder / name)
    assert float(torch.rand(())) == expected


def test_a_full_disk_on_one_rank_is_told_on_all_and_the_earlier_checkpoint_stays(job: Job) -> None:
    for full, _ in job.messages:
        assert "could not write it" in full
        assert "File too large" in full or "unexpected pos" in full
    assert json.loads((job.folder / "full" / "trainer_state.json").read_text())["trainer_state"] == {}
    assert not list(job.folder.glob("*.part"))


def test_a_missing_checkpoint_is_told_on_all_ranks(job: Job) -> None:
    for _, missing in job.messages:
        assert "nowhere" in missing
        assert "rank 0 could not read it" in missing


# ---- one rank


SMALL = {"num_hidden_layers": 2}


def _small(tmp_path: Path, **section: object) -> tuple[MegatronModel, PolicyOptimizer, Path]:
    """A model after one step, and its checkpoint."""
    model, optimizer = build("qwen3", policy_config(optimizer={"lr": LR, **section}), **SMALL)
    step(model, optimizer, 0)
    folder = tmp_path / "optimizer"
    save_optimizer(model, optimizer, optimizer.state_dict(), folder)
    return model, optimizer, folder


@pytest.mark.parametrize("section", [{}, {"optimizer": "sgd"}, {"optimizer": "sgd", "sgd_momentum": 0.0}])
def test_a_checkpoint_from_before_the_first_step_is_a_fresh_start(one_rank, tmp_path, section):
    policy = policy_config(optimizer={"lr": LR, **section})
    model, optimizer = build("qwen3", policy, **SMALL)
    save_optimizer(model, optimizer, optimizer.state_dict(), tmp_path / "optimizer")
    step(model, optimizer, 0)
    expected = [weight.detach().clone() for weight in model.module.parameters()]
    optimizer.load_state_dict(load_optimizer(model, optimizer, tmp_path / "optimizer"))
    assert (optimizer.calls_done, optimizer.updates_done) == (0, 0)
    step(model, optimizer, 0)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.module.parameters(), strict=True))


def test_momentum_of_sgd_is_restored(one_rank: None, tmp_path: Path) -> None:
    model, optimizer, folder = _small(tmp_path, optimizer="sgd")
    step(model, optimizer, 1)
    expected = [weight.detach().clone() for weight in model.module.parameters()]
    load_optimizer(model, optimizer, folder)
    step(model, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.module.parameters(), strict=True))


def test_settings_follow_the_run_that_resumes(one_rank: None, tmp_path: Path) -> None:
    _, _, folder = _small(tmp_path)
    model, optimizer = build("qwen3", policy_config(optimizer={"lr": 0.5, "weight_decay": 0.3}), **SMALL)
    load_optimizer(model, optimizer, folder)
    before = [weight.detach().clone() for weight in model.module.parameters()]
    for tensor in optimizer.moments("exp_avg").values():
        tensor.zero_()
    assert optimizer.apply() == 0.5
    optimizer.finish()
    for weight, old in zip(model.module.parameters(), before, strict=True):
        torch.testing.assert_close(weight.detach(), old * (1 - 0.5 * 0.3))


def test_a_copy_is_of_its_moment(one_rank: None, tmp_path: Path) -> None:
    model, optimizer, _ = _small(tmp_path)
    expected = state_of(model, optimizer)
    snapshot = OptimizerSnapshot.of(model, optimizer, optimizer.state_dict(), copies=True)
    step(model, optimizer, 1)
    snapshot.write(tmp_path / "later", group=dist.group.WORLD)
    load_optimizer(model, optimizer, tmp_path / "later")
    restored = state_of(model, optimizer)
    assert all(torch.equal(expected[kind][name], restored[kind][name]) for kind in expected for name in expected[kind])


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("place", ["index", "object", "common", "random state"])
def test_code_in_a_checkpoint_is_not_run(one_rank: None, tmp_path: Path, place: str) -> None:
    model, optimizer, folder = _small(tmp_path)
    bomb, trace = Bomb(tmp_path / "trace"), tmp_path / "trace"
    index_file = folder / ".metadata"
    if place == "index":
        index_file.write_bytes(pickle.dumps(bomb))
    elif place == "object":
        index = pickle.loads(index_file.read_bytes())
        key, where = next(iter(index.storage_data.items()))
        index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
        torch.save(bomb, folder / "object.pt")
        size = (folder / "object.pt").stat().st_size
        index.storage_data[key] = replace(where, relative_path="object.pt", offset=0, length=size)
        index_file.write_bytes(pickle.dumps(index))
    else:
        torch.save(bomb, folder / ("common.pt" if place == "common" else "random_state_0.pt"))
    with pytest.raises(CheckpointError, match="rank 0 could not read it"):
        load_optimizer(model, optimizer, folder)
    assert not trace.exists()


@pytest.mark.parametrize("fault", ["torn index", "torn tensors", "other model", "other optimizer", "no state"])
def test_a_checkpoint_that_cannot_be_read_says_so(one_rank: None, tmp_path: Path, fault: str) -> None:
    model, optimizer, folder = _small(tmp_path)
    if fault == "torn index":
        (folder / ".metadata").write_bytes(b"torn")
    elif fault == "torn tensors":
        next(folder.glob("*.distcp")).write_bytes(b"torn")
    elif fault == "no state":
        (folder / "trainer_state.json").unlink()
    elif fault == "other model":
        model, optimizer = build("qwen3", policy_config(), num_hidden_layers=2, intermediate_size=64)
    else:
        model, optimizer = build("qwen3", policy_config(optimizer={"optimizer": "sgd"}), **SMALL)
    with pytest.raises(CheckpointError, match="rank 0 could not read it: .*resume from another checkpoint"):
        load_optimizer(model, optimizer, folder)
