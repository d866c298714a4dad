"""Makes a trait vector out of texts with a trait and texts without: what `project(NAME)` of the tracer projects on.

Usage: python examples/make_trait_vector.py --with A.txt --without B.txt --model FOLDER --out vectors/NAME.safetensors
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import DatasetError, NemoRLError, UserError, boundary
from nemo_rl.models.hf.loading import load_causal_lm
from nemo_rl.tracer.reducer import VECTOR
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import give_usual_mode, replace_file

USER_ERROR = 2
SUFFIX = ".safetensors"
TENSOR = "vector"
logger = logging.getLogger("make_trait_vector")


class Tokens(StrEnum):
    """Whose hidden states stand for a text."""

    LAST = "last"
    ALL = "all"


def main(  # noqa: PLR0917 - the command line
    with_file: Annotated[Path, typer.Option("--with", help="Texts with the trait, one per line.")],
    without_file: Annotated[Path, typer.Option("--without", help="Texts without it, one per line.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder of model and tokenizer.")],
    out: Annotated[Path, typer.Option(help="File to write, such as vectors/NAME.safetensors for project(NAME).")],
    tokens: Annotated[Tokens, typer.Option(help="The last token of each text, or the mean over all.")] = Tokens.LAST,
    batch: Annotated[int, typer.Option(min=1, help="Texts that go through the model at a time.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
) -> None:
    """Writes `vector`, [layers, hidden size]: for each layer the difference of the mean outputs, of length 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(threads)
    try:
        make_trait_vector(with_file, without_file, model, out, tokens=tokens, batch=batch)
    except (NemoRLError, OSError) as error:
        logger.error("error: %s", error if isinstance(error, NemoRLError) else machine_problem(error) or error)
        sys.exit(USER_ERROR)


def make_trait_vector(
    with_file: Path, without_file: Path, model: Path, out: Path, *, tokens: Tokens, batch: int
) -> None:
    """Reads both files, runs the model on the CPU and writes the vector.

    Raises:
        UserError: a file, the folder or the name of the vector cannot be used, or both sets give the same.
    """
    if out.suffix != SUFFIX or VECTOR.fullmatch(out.stem) is None:
        raise UserError(
            f"--out: expected a name of letters, digits, '_' and '-' that ends with {SUFFIX}, got {out.name!r}"
        )
    texts = {"with": read_texts(with_file), "without": read_texts(without_file)}
    tokenizer, network = load_tokenizer(model), load_causal_lm(model)
    means = {
        name: mean_outputs(network, tokenizer, lines, tokens=tokens, batch=batch, what=name)
        for name, lines in texts.items()
    }
    difference_Lh = means["with"] - means["without"]
    lengths_L = difference_Lh.norm(dim=-1, keepdim=True)
    if not bool(torch.isfinite(lengths_L).all()) or not bool((lengths_L > 0).all()):
        bad = [layer for layer, length in enumerate(lengths_L.flatten().tolist()) if not 0 < length < float("inf")]
        raise UserError(
            f"expected outputs that differ between the texts with and without the trait, got a difference that is 0 or "
            f"not finite in layers {bad}; are the texts the same?"
        )
    vector = (difference_Lh / lengths_L).float().contiguous()
    counts = {f"num_{name}": str(len(lines)) for name, lines in texts.items()}
    metadata = {"model": str(model), "tokens": tokens.value, **counts}
    replace_file(out, lambda path: save_file({TENSOR: vector}, path, metadata=metadata))
    give_usual_mode(out)
    logger.info("wrote %s: %d layers of %d; watch it as 'layer.out | project(%s)'", out, *vector.shape, out.stem)


def read_texts(path: Path) -> list[str]:
    """Lines that are not empty.

    Raises:
        DatasetError: the file cannot be read, or has none.
    """
    with boundary(DatasetError, f"{path}: expected a file with one text per line"):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [line for line in lines if line]
    if not texts:
        raise DatasetError(f"{path}: expected at least one line of text, got none")
    return texts


def mean_outputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    tokens: Tokens,
    batch: int,
    what: str,
) -> torch.Tensor:
    """`[L, h]` float64: the mean over the texts of what each layer adds up to.

    Raises:
        DatasetError: a text is no token at all, or longer than the model takes.
    """
    rows = [tokenizer(text)["input_ids"] for text in texts]
    limit = model.config.get_text_config().max_position_embeddings
    for text, row in zip(texts, rows, strict=True):
        if not 0 < len(row) <= limit:
            raise DatasetError(f"{text[:80]!r}: expected 1 to {limit} tokens, got {len(row)}")
    total_Lh: torch.Tensor | float = 0.0
    with torch.inference_mode(), layer_outputs(model) as outputs:
        for start in range(0, len(rows), batch):
            total_Lh = total_Lh + _sum_of_batch(model, outputs, rows[start : start + batch], tokens=tokens)
            logger.info("%s the trait: %d of %d texts", what, min(start + batch, len(rows)), len(rows))
    assert isinstance(total_Lh, torch.Tensor), "there is a text"
    return total_Lh / len(rows)


@contextmanager
def layer_outputs(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """The residual stream out of each layer of the last pass, `[B, S, h]` each; before the final norm."""
    layers = model.get_decoder().layers
    found: list[torch.Tensor] = [torch.empty(0)] * len(layers)

    def keep(layer: int, output: Any) -> None:
        found[layer] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for number, module in enumerate(layers):
            handle = module.register_forward_hook(lambda _, __, output, number=number: keep(number, output))
            hooks.callback(handle.remove)
        yield found


def _sum_of_batch(
    model: PreTrainedModel, outputs: list[torch.Tensor], rows: Sequence[Sequence[int]], *, tokens: Tokens
) -> torch.Tensor:
    length = max(map(len, rows))
    ids_BS = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    lengths_B = torch.tensor([len(row) for row in rows])
    is_token_BS = torch.arange(length) < lengths_B[:, None]
    model(input_ids=ids_BS, attention_mask=is_token_BS.long(), use_cache=False)
    if tokens is Tokens.LAST:
        weights_BS = (torch.arange(length) == lengths_B[:, None] - 1).double()
    else:
        weights_BS = is_token_BS / lengths_B[:, None].double()
    # Padding counts nothing, whatever it holds.
    return torch.stack(
        [
            (output.double().masked_fill(~is_token_BS[..., None], 0.0) * weights_BS[..., None]).sum((0, 1))
            for output in outputs
        ]
    )


if __name__ == "__main__":
    typer.run(main)
