"""Kept steps whose rows come from an engine that is wrong on purpose, and what `explain_mismatch` says of them.

A tiny run keeps its steps and a checkpoint after each; a case replaces the rows of the last one by rows that were
really sampled from an engine with one fault, and the trainer's log-probabilities by those of a trainer without it (or
with it, where the fault is the trainer's). `python -m tests.helpers.mismatch_causes` runs every cause with five seeds.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl.algorithms.kept_steps.folder import (
    ROLLOUT_FILE,
    STEP_FILE,
    UPDATE_FILE,
    StepsFolder,
    StepSnapshot,
    record_text,
)
from nemo_rl.algorithms.run import run
from nemo_rl.data_plane.column_io import write_column_file
from nemo_rl.jagged import nest
from nemo_rl.models.generation.interfaces import GenerationRequest, RecordedRoutes, SamplingParams
from nemo_rl.models.generation.torch_engine import TorchEngine
from nemo_rl.models.head.logits import SUPPORT, decode_support
from nemo_rl.models.head.logprobs import Sampling, token_logprobs
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.models.hf.modules import ROUTER_KINDS
from nemo_rl.routes.columns import encode_routes
from nemo_rl.routes.shape import MISSING
from nemo_rl.utils.checkpoint import MANIFEST_FILE, Manifest
from nemo_rl_tools.mismatch.explain import MismatchReport, explain_mismatch
from nemo_rl_tools.mismatch.scorer import scaled_rope
from nemo_rl_tools.step_replay.chain import ReplayRequest
from tests.helpers.hf_reference import logprobs_from_logits
from tests.helpers.model_families import write_with_tokenizer
from tests.helpers.runs import LOCAL, load_recipe, write_recipe
from tests.helpers.tiny_model import VOCAB, write_tiny_folder

STEP = 3
NUM_ROWS, NEW_TOKENS = 64, 16
KEEPS = {
    "diagnostics.keep_steps.enabled": "true",
    "checkpointing.enabled": "true",
    "checkpointing.save_period": "1",
    "checkpointing.keep_top_k": "null",
    "grpo.max_num_steps": "3",
    "grpo.num_prompts_per_step": "8",
    "policy.max_total_sequence_length": "48",
    "policy.generation.max_new_tokens": str(NEW_TOKENS),
}
REPLAYS = {"policy.router_replay.enabled": "true"}
SEEDS = range(5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows that an engine has sampled."""

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[torch.Tensor, ...]
    """Log-probabilities of the responses' tokens."""
    routes: RecordedRoutes | None = None
    support: tuple[torch.Tensor, ...] | None = None
    """Recorded sets; None: the trainer has none."""

    @property
    def ids(self) -> list[list[int]]:
        return [[*prompt, *response] for prompt, response in zip(self.prompts, self.responses, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A run with kept steps."""

    log_dir: Path
    seed: int
    routes: bool = False

    def model(self, version: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """Load the model of the run after `version` steps."""
        folder = self.log_dir / "checkpoints" / f"step_{version}" / "policy" / "weights"
        return load_causal_lm(folder, dtype=dtype)

    def sample(self, model: PreTrainedModel, *, with_support: bool = False, **sampling: object) -> Rows:
        """Rows to the run's prompts from a model."""
        prompts = _prompts(self.log_dir)
        params = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": (2,), **sampling}
        group = NUM_ROWS // len(prompts)
        engine = TorchEngine(model, tokenizer=None, max_total_length=48, weight_version=STEP - 1)
        output = engine.generate(
            GenerationRequest(
                prompt_ids=prompts,
                seeds=tuple(range(1000 * self.seed, 1000 * self.seed + group * len(prompts))),
                sampling=SamplingParams(**params),  # type: ignore[arg-type]
                with_routes=self.routes,
                with_support=with_support,
            )
        )
        lengths = output.lengths.tolist()
        return Rows(
            prompts=tuple(prompt for prompt in prompts for _ in range(group)),
            responses=tuple(tuple(part.tolist()) for part in output.token_ids.split(lengths)),
            logprobs=tuple(output.logprobs.split(lengths)),
            routes=output.routes,
            support=output.support,
        )

    def keep(self, folder: Path, rows: Rows, *, trainer: Sampling | None = None, tag: int = STEP - 1) -> Path:
        """Copy the run with these rows in its last step, scored by a trainer with its own weights.

        Args:
            tag: the rows' weight version.
        """
        log_dir = Path(shutil.copytree(self.log_dir, folder))
        kept = StepsFolder(log_dir).all()[-1]
        step = kept.read()
        model = self.model(STEP - 1)
        support = rows.support or (None,) * len(rows.ids)
        scored = [
            _score(model, ids, trainer or Sampling(), sets, num_prompt=len(prompt))
            for ids, prompt, sets in zip(rows.ids, rows.prompts, support, strict=True)
        ]
        _write(kept.path, step, rows, scored, tag=tag)
        return log_dir


def make_base(folder: Path, *, seed: int = 0, experts: bool = False) -> Base:
    """Trains three steps."""
    model = folder / "model"
    if experts:
        _write_experts(model, seed=seed)
    else:
        write_tiny_folder(model, seed=seed)
    changes = {**LOCAL, **KEEPS, **(REPLAYS if experts else {})}
    config = load_recipe(write_recipe(folder, model), changes)
    run(config, console=Console(file=io.StringIO()))
    return Base(log_dir=config.logger.log_dir, seed=seed, routes=experts)


# ---- the causes; each gives the folder of a run


def one_version_behind(base: Base, folder: Path) -> Path:
    """Sample from an engine that has missed the last refit, and says it has not."""
    return base.keep(folder, base.sample(base.model(STEP - 2)))


def bf16_engine(base: Base, folder: Path) -> Path:
    """Sample from an engine that computes in half precision, against the config."""
    return base.keep(folder, base.sample(base.model(STEP - 1, torch.bfloat16)))


def routes_off(base: Base, folder: Path) -> Path:
    """Sample from an engine that takes other experts than the trainer, which does not replay them."""
    model = base.model(STEP - 1)
    generator = torch.Generator().manual_seed(base.seed)

    def reroute(router: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...]) -> object:
        logits, _weights, own = output
        noisy = logits + torch.randn(logits.shape, generator=generator) * 0.3 * logits.std()
        ids = noisy.topk(own.shape[1], dim=-1).indices
        return logits, ROUTER_KINDS[type(router).__name__](router, logits, ids), ids

    for module in model.modules():
        if type(module).__name__ in ROUTER_KINDS:
            module.register_forward_hook(reroute)
    return base.keep(folder, base.sample(model))


def wrong_temperature(base: Base, folder: Path) -> Path:
    """Score at another temperature than the rows were sampled at."""
    temperature = (0.7, 0.85, 1.2, 1.1, 1.5)[base.seed % 5]
    return base.keep(folder, base.sample(base.model(STEP - 1)), trainer=Sampling(temperature=temperature))


def top_p_without_support(base: Base, folder: Path) -> Path:
    """Sample from a cut distribution, and score under all of it."""
    top_p = (0.95, 0.9, 0.83, 0.7, 0.98)[base.seed % 5]
    return base.keep(folder, base.sample(base.model(STEP - 1), top_p=top_p))


def perturbed_layer(base: Base, folder: Path) -> Path:
    """Sample from an engine with other weights in one layer."""
    model = base.model(STEP - 1)
    layers = model.model.layers
    layer = layers[base.seed % len(layers)]
    torch.manual_seed(base.seed)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std() if weight.numel() > 64 else 0.0)
    return base.keep(folder, base.sample(model))


def wrong_rope_base(base: Base, folder: Path) -> Path:
    """Sample from an engine whose rotary embeddings have another base."""
    model = base.model(STEP - 1)
    with torch.inference_mode(), scaled_rope(model, (0.1, 10.0, 3.0, 100.0, 0.01)[base.seed % 5]):
        return base.keep(folder, base.sample(model))


def shifted_by_one(base: Base, folder: Path) -> Path:
    """Give each token the log-probability of its neighbour."""
    rows = base.sample(base.model(STEP - 1))
    by = 1 if base.seed % 2 else -1
    return base.keep(folder, replace(rows, logprobs=tuple(part.roll(by) for part in rows.logprobs)))


def no_fault(base: Base, folder: Path) -> Path:
    """Sample from the embedded engine as it is."""
    return base.keep(folder, base.sample(base.model(STEP - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A planted cause."""

    plant: Callable[[Base, Path], Path]
    expected: str
    experts: bool = field(default=False)


CASES = {
    "one version behind": Case(plant=one_version_behind, expected="weights"),
    "bf16 engine": Case(plant=bf16_engine, expected="precision"),
    "routes off": Case(plant=routes_off, expected="routes", experts=True),
    "wrong temperature": Case(plant=wrong_temperature, expected="temperature"),
    "top-p without support": Case(plant=top_p_without_support, expected="top_p"),
    "perturbed layer": Case(plant=perturbed_layer, expected="engine"),
    "wrong rope base": Case(plant=wrong_rope_base, expected="rope"),
    "token shift by one": Case(plant=shifted_by_one, expected="shift"),
}


def explain(base: Base, case: Case, folder: Path) -> MismatchReport:
    """Plants and explains."""
    return explain_mismatch(ReplayRequest(run=case.plant(base, folder), step=STEP))


# ---- private parts


def _write_experts(folder: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    write_with_tokenizer(folder, Qwen3MoeForCausalLM(config))


def _prompts(log_dir: Path) -> tuple[tuple[int, ...], ...]:
    rollout, _ = StepsFolder(log_dir).all()[-1].columns()
    rows = zip(rollout["input_ids"].unbind(), rollout["token_mask"].unbind(), strict=True)
    found = dict.fromkeys(tuple(ids[: int(mask.int().argmax())].tolist()) for ids, mask in rows)
    return tuple(found)


@torch.inference_mode()
def _score(
    model: PreTrainedModel, ids: list[int], sampling: Sampling, sets: torch.Tensor | None, *, num_prompt: int
) -> torch.Tensor:
    row = torch.tensor([ids])
    logits = model(row, use_cache=False).logits
    if sets is None:
        return logprobs_from_logits(logits, row, sampling=sampling)[0]
    is_response = torch.arange(len(ids)) >= num_prompt
    [places] = is_response.nonzero(as_tuple=True)
    kept = decode_support(sets[None], row, is_response[None], torch.zeros_like(places), places)
    scored = token_logprobs(logits[0, places - 1], row[0, places], sampling=sampling, kept=kept)
    return torch.zeros(len(ids)).index_put((places,), scored)


def _write(folder: Path, step: StepSnapshot, rows: Rows, scored: list[torch.Tensor], *, tag: int) -> None:
    lengths = torch.tensor([len(ids) for ids in rows.ids])
    is_response = [torch.arange(len(ids)) >= len(p) for ids, p in zip(rows.ids, rows.prompts, strict=True)]
    given = [
        torch.cat([torch.zeros(len(prompt)), part]) for prompt, part in zip(rows.prompts, rows.logprobs, strict=True)
    ]
    rollout = {
        "input_ids": nest(torch.cat([torch.tensor(ids, dtype=torch.int32) for ids in rows.ids]), lengths),
        "input_lengths": lengths.int(),
        "token_mask": nest(torch.cat(is_response), lengths),
        "generation_logprobs": nest(torch.cat(given), lengths),
    }
    if rows.routes is not None:
        rollout |= _routes(rows.routes, lengths)
    if rows.support is not None:
        sizes = torch.tensor([len(sets) for sets in rows.support])
        rollout[SUPPORT] = nest(torch.cat(rows.support), sizes)
    masked = [torch.where(mask, one, 0.0) for mask, one in zip(is_response, scored, strict=True)]
    write_column_file(folder / ROLLOUT_FILE, rollout)
    write_column_file(folder / UPDATE_FILE, {"prev_logprobs": nest(torch.cat(masked), lengths)})
    assert step.rows is not None
    count = len(rows.prompts)
    kept_rows = replace(
        step.rows,
        keys=tuple(f"row{row}_g0" for row in range(count)),
        lengths=tuple(lengths.tolist()),
        tags={"weight_version": (tag,) * count},
        rewards=(0.0,) * count,
        truncated=(False,) * count,
        response_lengths=tuple(len(response) for response in rows.responses),
        components={},
    )
    changed = replace(step, rows=kept_rows, keys=kept_rows.keys, trained=tuple(range(count)))
    (folder / STEP_FILE).write_text(record_text(changed))
    (folder / MANIFEST_FILE).unlink()
    Manifest.write(folder)


def _routes(routes: RecordedRoutes, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Encode the routes; the last token of a row was never fed and has none."""
    parts = []
    for ids, length in zip(routes.ids.split(routes.lengths.tolist()), lengths.tolist(), strict=True):
        row = torch.full((length, *ids.shape[1:]), MISSING, dtype=torch.int16)
        row[: len(ids)] = ids.to(torch.int16)
        parts.append(row)
    return encode_routes(nest(torch.cat(parts), lengths), routes.shape)


@contextmanager
def _bases() -> Iterator[Callable[[int, bool], Base]]:
    """Runs, made when they are first wanted."""
    with tempfile.TemporaryDirectory(prefix="mismatch_cases_") as folder:
        made: dict[tuple[int, bool], Base] = {}

        def base(seed: int, experts: bool) -> Base:
            if (seed, experts) not in made:
                made[seed, experts] = make_base(Path(folder) / f"{seed}_{experts}", seed=seed, experts=experts)
            return made[seed, experts]

        yield base


def main() -> int:
    """Run every cause with every seed; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(CASES), help="one cause")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--show", action="store_true", help="whole reports")
    arguments = parser.parse_args()
    out, hits, count, started = sys.stdout, 0, 0, time.perf_counter()
    with _bases() as base, tempfile.TemporaryDirectory(prefix="mismatch_runs_") as runs:
        for name, case in CASES.items():
            if arguments.only not in (None, name):
                continue
            for seed in range(arguments.seeds):
                report = explain(base(seed, case.experts), case, Path(runs) / f"{case.expected}_{seed}")
                first = report.first
                is_hit = first is not None and first.cause == case.expected
                hits, count = hits + is_hit, count + 1
                parts = {part.cause: round(part.share, 3) for part in report.parts}
                found = "none" if first is None else f"{first.cause} {first.share:.0%}: {first.what}"
                out.write(
                    f"{'ok' if is_hit else 'MISS':<5}{name:<22} seed {seed}  KL {report.total.kl:.3g}  "
                    f"{report.seconds:.1f} s  {found}  {json.dumps(parts)}\n"
                )
                if arguments.show:
                    out.write("\n".join(report.lines()) + "\n")
                out.flush()
    out.write(f"{hits} of {count} named first, {time.perf_counter() - started:.0f} s\n")
    return 0 if hits == count else 1


if __name__ == "__main__":
    sys.exit(main())
