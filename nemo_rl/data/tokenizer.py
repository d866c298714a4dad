"""Tokenizers: loading one from a folder, and building the small one of the starter checkpoint.

Called by the driver, the generation engines and the starter. Invariant: tokenizers come from local folders only;
nothing is looked up on a network.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.data.thinking import THINK_END, THINK_START
from nemo_rl.errors import ModelFolderError

__all__ = ["CHATML_TEMPLATE", "END_OF_TURN", "build_tokenizer", "load_tokenizer"]

PAD = "<|pad|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN, THINK_START, THINK_END, "<answer>", "</answer>")
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Any one of these makes a folder a tokenizer folder.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MAX_LENGTH = 4096


def build_tokenizer(corpus: Iterable[str], *, max_vocab_size: int = 512) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with ChatML; digits are tokens of their own, every byte can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


def load_tokenizer(folder: str | Path, *, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; `chat_template` replaces its own.

    Raises:
        ModelFolderError: the folder is missing, holds no tokenizer, or one without an end-of-sequence token.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelFolderError(
            f"tokenizer folder {str(path)!r}: no such folder; set policy.tokenizer.name or policy.model_name to a "
            "folder with a Hugging Face tokenizer"
        )
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(
            f"tokenizer folder {str(path)!r}: expected one of {', '.join(TOKENIZER_FILES)}, got none"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(f"tokenizer folder {str(path)!r}: cannot be read: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelFolderError(f"tokenizer folder {str(path)!r}: expected an end-of-sequence token, got none")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
