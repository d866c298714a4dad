"""Tokenizers: loading one from a folder, and building the small one of the starter checkpoint.

Called by the driver, the generation engines and the starter. Invariant: tokenizers come from local folders only;
nothing is looked up on a network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.data.thinking import THINK_END, THINK_START
from nemo_rl.errors import ModelFolderError, boundary, shorten
from nemo_rl.utils.files import read_plain_text

__all__ = [
    "CHATML_TEMPLATE",
    "END_OF_TURN",
    "TOOLS_TEMPLATE",
    "build_tokenizer",
    "load_tokenizer",
    "stop_token_ids",
    "tokenizer_identity",
]

PAD = "<|pad|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN, THINK_START, THINK_END, "<answer>", "</answer>")
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t['function']['name'] }}"
    "({{ t['function']['parameters']['properties'] | join(', ') }})\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{% if m['content'] or not loop.first %}\n{% endif %}<tool_call>\n"
    "{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML whose system message lists the tools by name and parameters, with calls in the form `hermes`."""
# Any one of these makes a folder a tokenizer folder.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
TEXT_MODELS = ("text_config", "decoder", "generator", "llm_config", "language_config")
"""Keys of config.json below which the text model of a larger one is described."""
MAX_LENGTH = 4096


def build_tokenizer(
    corpus: Iterable[str],
    *,
    max_vocab_size: int = 512,
    chat_template: str = CHATML_TEMPLATE,
    more_special: Sequence[str] = (),
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer with ChatML; digits are tokens of their own, every byte can be written."""
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
        special_tokens=[*SPECIAL_TOKENS, *more_special],
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
    fast.chat_template = chat_template
    return fast


def load_tokenizer(folder: str | Path, *, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder; `chat_template` replaces its own.

    Raises:
        ModelFolderError: the folder is missing, holds no tokenizer, or one without an end-of-sequence token. One
            without a padding token pads with that: what is padded is masked.
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
    with boundary(ModelFolderError, f"tokenizer folder {str(path)!r}: cannot be read"):
        # Code in the folder is never run; unless this is said, transformers asks on the terminal.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if end is None:
            raise ModelFolderError(f"tokenizer folder {str(path)!r}: expected an end-of-sequence token, got none")
        if pad is None:
            tokenizer.pad_token_id = end
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def stop_token_ids(model_folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's end-of-sequence token, then those that the model's
    generation_config.json and its config.json list (chat models have two: end of turn and end of text).

    Raises:
        ModelFolderError: a file cannot be read, or names what is no token.
    """
    found = [int(tokenizer.eos_token_id)]
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        path = Path(model_folder) / name
        if path.is_file():
            with boundary(ModelFolderError, f"{path}: cannot be read"):
                config = json.loads(read_plain_text(path))
                if not isinstance(config, dict):
                    raise ModelFolderError(f"{path}: expected a JSON object, got {shorten(repr(config))}")
                found += _end_tokens(config, where=str(path))
    return tuple(dict.fromkeys(found))


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase, *, stop_ids: Iterable[int]) -> dict[str, str]:
    """Return the digests of the tokenizer, with the tokens that end a response, and of its chat template."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        # These are set by every call.
        settings.pop("truncation"), settings.pop("padding")
    else:
        settings = tokenizer.get_vocab()
    about = [settings, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}, list(stop_ids)]
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return {"tokenizer": _digest(json.dumps(about, sort_keys=True)), "template": _digest(template)}


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _end_tokens(config: object, *, where: str) -> list[int]:
    """Return `eos_token_id` of a config and of its text model."""
    if not isinstance(config, dict):
        return []
    given = config.get("eos_token_id")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise ModelFolderError(
                f"{where}: eos_token_id: expected the id of a token or a list of ids, got {shorten(repr(given))}"
            )
    return listed + [token for name in TEXT_MODELS for token in _end_tokens(config.get(name), where=f"{where}: {name}")]
