"""megatron-core sees a stand-in where there is no CUDA; everyone else in the process sees torch as it is."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from nemo_rl.errors import ConfigError
from nemo_rl.models.megatron import cpu_compat
from nemo_rl.models.megatron.mcore import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from nemo_rl.models.megatron.setup import initialize_parallel
from tests.helpers.megatron_models import LLAMA3_ROPE, alone, config_of, policy_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is adapted where there is CUDA"),
]

FRESH_PROCESS = """
import json, logging, sys
import torch
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.fit import check_policy_fits

facts = {}
section = {"model_name": sys.argv[1], "dtensor_cfg": {"enabled": False}, "megatron_cfg": {"enabled": True}}
try:
    check_policy_fits(PolicyConfig.model_validate(section))
except ConfigError as error:
    facts["refusal"] = str(error)

def ours():
    return [name for name in sys.modules if name.split(".")[0] == "megatron"]

facts["imported_by_the_driver"] = ours()
before = {owner: dict(vars(owner)) for owner in (torch, torch.cuda, torch.Tensor, torch.nn.Module)}
from nemo_rl.models.megatron import cpu_compat, mcore

facts["changed"] = [
    f"{owner.__name__}.{name}" for owner, names in before.items() for name in names
    if vars(owner).get(name) is not names[name]
]
facts["imported"] = len(ours())
facts["not_adapted"] = [name for name in ours() if vars(sys.modules[name]).get("torch") is torch]
filters = logging.getLogger("megatron.core.tensor_parallel.random").filters
once = list(filters)
facts["changed_again"] = cpu_compat.install()
facts["filters"] = [len(once), len(filters)]

graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

facts["compiled"] = torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist()
facts["graphs"] = len(graphs)
facts["has_cuda"] = torch.cuda.is_available()
try:
    torch.zeros(1, device="cuda")
    facts["device"] = "a GPU that is not there"
except (AssertionError, RuntimeError) as error:
    facts["device"] = str(error)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a process sees that checks a model folder and then imports megatron-core."""
    folder = tmp_path_factory.mktemp("model")
    config_of("llama", rope_parameters={**LLAMA3_ROPE, "rope_type": "dynamic"}).save_pretrained(str(folder))
    (folder / "model.safetensors").touch()
    root = Path(__file__).parents[4]
    command = [sys.executable, "-W", "ignore", "-c", FRESH_PROCESS, str(folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_the_driver_refuses_positions_without_megatron_core(fresh: dict[str, object]) -> None:
    assert "rope_type 'dynamic'" in str(fresh["refusal"])
    assert fresh["imported_by_the_driver"] == []


def test_torch_is_the_same_before_and_after_the_import(fresh: dict[str, object]) -> None:
    assert fresh["changed"] == []


def test_every_module_of_megatron_core_sees_the_stand_in(fresh: dict[str, object]) -> None:
    assert fresh["not_adapted"] == []
    assert isinstance(fresh["imported"], int) and fresh["imported"] > 100


def test_adapting_again_changes_nothing(fresh: dict[str, object]) -> None:
    assert fresh["changed_again"] == 0
    assert fresh["filters"] == [1, 1]


def test_others_compile_and_see_that_there_is_no_cuda(fresh: dict[str, object]) -> None:
    assert fresh["compiled"] == [2.0, 2.0]
    assert fresh["graphs"] == 1
    assert fresh["has_cuda"] is False
    # Of a build without CUDA and of one with it.
    assert any(words in str(fresh["device"]) for words in ("not compiled with CUDA", "no NVIDIA driver"))


def test_tensors_say_that_they_are_on_a_gpu_inside_the_block_only() -> None:
    asked, moved = torch.Tensor.type, torch.Tensor.cuda
    weight = torch.ones(2)
    with pytest.raises(ZeroDivisionError), cpu_compat.as_if_cuda():
        assert weight.type() == "torch.cuda.FloatTensor"
        assert weight.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        # A conversion is no question.
        assert weight.type(torch.float64).dtype is torch.float64
        assert weight.cuda() is weight
        raise ZeroDivisionError
    assert torch.Tensor.type is asked and torch.Tensor.cuda is moved
    assert weight.type() == "torch.FloatTensor"


def _late_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of megatron-core that is imported after the others."""
    late = types.ModuleType(f"{cpu_compat.PACKAGE}.late")
    late.torch = torch
    monkeypatch.setitem(sys.modules, late.__name__, late)
    return late


def test_a_module_that_comes_late_is_adapted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    late = _late_module(monkeypatch)
    assert cpu_compat.install() == 1
    assert late.torch is not torch
    assert late.torch.nn is torch.nn and late.torch.Tensor is torch.Tensor
    assert late.torch.zeros(2, device="cuda").device.type == "cpu"
    assert late.torch.full((1,), 3.0, device=torch.device("cuda"), pin_memory=True).tolist() == [3.0]
    assert late.torch.empty(1, device="meta").device.type == "meta"
    assert late.torch.cuda.current_device() == "cpu"
    late.torch.cuda.Stream().wait_stream(late.torch.cuda.current_stream())
    event = late.torch.cuda.current_stream().record_event()
    assert event.query() and event.elapsed_time(event) == 0.0


def test_the_random_state_of_the_stand_in_is_that_of_the_process() -> None:
    with alone():
        initialize_parallel(policy_config(), timeout_s=60.0, seed=3)
        outside = torch.get_rng_state()
        with get_cuda_rng_tracker().fork():
            first = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), outside)
        with get_cuda_rng_tracker().fork():
            assert not torch.equal(torch.rand(4), first)
        model_parallel_cuda_manual_seed(3)
        with get_cuda_rng_tracker().fork():
            assert torch.equal(torch.rand(4), first)


def test_a_dropped_output_is_filled_again_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    random = importlib.import_module(f"{cpu_compat.PACKAGE}.tensor_parallel.random")
    # With it 0.19 compiles an extension; 0.16 has none.
    monkeypatch.delattr(random, "load_inline", raising=False)
    values = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with alone():
        initialize_parallel(policy_config(), timeout_s=60.0, seed=3)
        part = random.CheckpointWithoutOutput()
        dropped = part.checkpoint(torch.exp, values)
        result = dropped.square()
        part.discard_output_and_register_recompute(result)
        assert dropped.untyped_storage().size() == 0
        result.sum().backward()
    torch.testing.assert_close(values.grad, 2 * (2 * values).exp())


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "SUPPORTED_VERSIONS", ("0.14.0", "0.15.0"))
    fitting = "0.14.0" if sys.version_info < (3, 12) else "0.15.0"
    message = rf"expected megatron-core 0\.14\.0 or 0\.15\.0, got 0\.1[69]\.\d; install megatron-core=={fitting}"
    with pytest.raises(ConfigError, match=message), cpu_compat.importing():
        pass


def test_the_revision_of_a_checkout_makes_no_other_release(monkeypatch: pytest.MonkeyPatch) -> None:
    package_info = importlib.import_module(f"{cpu_compat.PACKAGE}.package_info")
    release = package_info.__version__.partition("+")[0]
    monkeypatch.setattr(package_info, "__version__", f"{release}+956ae32")
    with cpu_compat.importing():
        pass


def test_decorators_are_plain_during_the_import_only() -> None:
    compiler = torch.compile

    def double(x: float) -> float:
        return 2 * x

    with pytest.raises(ZeroDivisionError), cpu_compat.importing():
        assert torch.compile(double) is double
        assert torch.compile(mode="max-autotune")(double) is double
        assert functools.partial(torch.compile, dynamic=True)(double) is double
        raise ZeroDivisionError
    assert torch.compile is compiler


def test_with_cuda_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compat, "has_cuda", lambda: True)
    monkeypatch.setattr(cpu_compat, "SUPPORTED_VERSIONS", ("0.15.0",))
    late, compiler, asked = _late_module(monkeypatch), torch.compile, torch.Tensor.type
    with cpu_compat.importing():
        assert torch.compile is compiler
    with cpu_compat.as_if_cuda():
        assert torch.Tensor.type is asked
    assert cpu_compat.install() == 0
    assert late.torch is torch
