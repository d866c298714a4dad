"""About three hundred inputs that are malformed, hostile or only strange, by the boundary that must answer for them.

Each table maps a name to what a user might give. All of them must end as a `UserError` with a place in it, but those
that `LEGAL` names: they look odd and are fine. `tests/property/test_bad_inputs.py` gives each to the code that the
command line gives it to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

LEGAL = frozenset(
    {
        *("yaml: the recipe itself", "yaml: a byte order mark", "yaml: empty sections", "yaml: merged sections"),
        *("yaml: windows line ends", "yaml: an alias that is used twice", "yaml: numbers with underscores"),
        *(
            "override: the same twice",
            "override: 1e-4 is a number",
            "override: a sum",
            "override: a chain of references",
        ),
        *("row: a byte order mark", "row: columns nobody asked for", "row: blank lines between", "row: an emoji"),
        *("row: a prompt of 50 MB among others", "row: an answer of any kind", "row: windows line ends"),
        *("config: a window that is null", "config: unknown keys", "tokenizer: no padding token"),
        *("tokenizer: a class nobody has", "tokenizer: code of its own"),
        *("tokenizer: no chat template", "tokenizer: generation config without an end", "override: largest integer"),
        *("tokenizer: its own chat template file", "weights: in shards", "row: numbers that are no JSON"),
        *("override: negative seed", "yaml: a tag that says what it is"),
        *("row: a conversation for input", "row: 1e999"),
    }
)


def _bomb(levels: int, width: int, item: str = "x") -> str:
    lines = [f"a0: &a0 [{', '.join([item] * width)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines)


def _merge_bomb(levels: int, width: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * width)}], k{i}: 1}}" for i in range(1, levels)]
    return "\n".join(lines)


def _reference_bomb(levels: int, form: str = "${.a%d}${.a%d}") -> str:
    options = ["a0: xxxxxxxx", *(f"a{i}: '{form.replace('%d', str(i - 1))}'" for i in range(1, levels))]
    return f"data: {{train: {{options: {{{', '.join(options)}}}}}}}"


YAML: Mapping[str, str | bytes] = {
    # What is written over the demo's recipe.
    "the recipe itself": "",
    "no mapping but a list": "- 1\n- 2",
    "no mapping but a text": "just words",
    "no mapping but a number": "17",
    "two documents": "grpo: {}\n---\ngrpo: {}",
    "an open bracket": "grpo: {seed: 1",
    "an open quote": "grpo: {seed: '1}",
    "a stray closing bracket": "grpo: ]",
    "a tab for indentation": "grpo:\n\tseed: 1",
    "indentation that jumps": "grpo:\n   seed: 1\n  val_period: 2",
    "a colon too many": "grpo: seed: 1",
    "an unknown alias": "grpo: *nowhere",
    "an anchor on nothing": "grpo: {seed: &a }",
    "a duplicate key": "grpo: {seed: 1, seed: 2}",
    "a duplicate section": "grpo: {seed: 1}\ngrpo: {seed: 2}",
    "a list as key": "? [a, b]\n: 1",
    "a section as key": "? {a: b}\n: 1",
    "a null key": "~: 1",
    "an empty key": "'': 1",
    "a number as key": "grpo: {1: 2}",
    "a key of spaces": "grpo: {' ': 1}",
    "a key with a dot": "grpo.seed: 3",
    "a key of 200 thousand characters": f"{'k' * 100}{'y' * 200_000}: 1",
    "UTF-16": "grpo: {seed: 1}".encode("utf-16"),
    "Latin-1": "grpo: {seed: 'é'}".encode("latin-1"),
    "bytes of nothing": bytes(range(256)),
    "NUL bytes": b"\0" * 100,
    "a NUL in a text": 'logger: {log_dir: "a\\0b"}',
    "a control character": b"logger: {log_dir: a\x07b}",
    "half a surrogate pair": 'logger: {log_dir: "\\ud800"}',
    "half a pair in a key": '"\\udfff": 1',
    "half a pair as bytes": b"logger: {log_dir: \xed\xa0\x80}",
    "an unknown escape": 'logger: {log_dir: "\\q"}',
    "an escape beyond Unicode": 'logger: {log_dir: "\\UFFFFFFFF"}',
    "bytes by tag": "grpo: !!binary aGVsbG8=",
    "bytes by tag that are none": "grpo: !!binary '*'",
    "a date by tag": "grpo: {seed: !!timestamp 2001-01-01}",
    "a date": "grpo: {seed: 2001-01-01}",
    "a time": "grpo: {seed: 12:30:45}",
    "a set": "grpo: !!set {a, b}",
    "an ordered mapping": "grpo: !!omap [a: 1]",
    "pairs": "grpo: !!pairs [a: 1]",
    "an object": "grpo: !!python/object/apply:os.system [ls]",
    "a Python name": "grpo: !!python/name:os.system ''",
    "a Python tuple": "grpo: {seed: !!python/tuple [1]}",
    "an unknown tag": "grpo: {seed: !nobody 1}",
    "an integer by tag that is none": "grpo: {seed: !!int abc}",
    "a float by tag that is none": "grpo: {seed: !!float abc}",
    "a list by tag that is a text": "grpo: !!seq abc",
    "a section by tag that is a text": "grpo: !!map abc",
    "a tag that says what it is": "grpo: {seed: !!int 7}",
    "5,000 digits": f"grpo: {{seed: {'9' * 5000}}}",
    "5,000 digits after a sign": f"grpo: {{seed: -{'9' * 5000}}}",
    "5,000 hexadecimal digits": f"grpo: {{seed: 0x{'f' * 5000}}}",
    "5,000 digits after the point": f"grpo: {{seed: 1.{'3' * 5000}}}",
    "65 bits": f"grpo: {{seed: {2**64}}}",
    "an octal": "grpo: {seed: 017}",
    "sixty to the thousand": f"grpo: {{seed: {':'.join(['59'] * 1000)}}}",
    "1e999": "policy: {optimizer: {kwargs: {lr: 1.0e+999}}}",
    "minus infinity": "policy: {optimizer: {kwargs: {lr: -.inf}}}",
    "not a number": "policy: {optimizer: {kwargs: {lr: .nan}}}",
    "not a number in a list": "policy: {optimizer: {kwargs: {betas: [0.9, .nan]}}}",
    "a number with two points": "policy: {optimizer: {kwargs: {lr: 1.2.3}}}",
    "numbers with underscores": "grpo: {max_num_steps: 1_000}",
    "lists in lists": f"grpo: {'[' * 200}{']' * 200}",
    "100 thousand open brackets": f"grpo: {'[' * 100_000}",
    "sections in sections": f"grpo: {'{a: ' * 200}1{'}' * 200}",
    "sections in sections by indentation": "\n".join(f"{' ' * i}a:" for i in range(200)),
    "a list that contains itself": "grpo: &a [*a]",
    "a section that contains itself": "grpo: &a {seed: *a}",
    "a section that is merged into itself": "grpo: &a {<<: *a}",
    "two that contain each other": "grpo: &a {x: &b {y: *a}}\nloss_fn: *b",
    "a text that is merged": "grpo: {<<: abc}",
    "a list of texts that is merged": "grpo: {<<: [a, b]}",
    "merged sections": "grpo: &g {seed: 3}\nloss_fn: {ratio_clip_max: 0.3}",
    "an alias that is used twice": "data: {train: {options: &o {min_digits: 4}}, validation: {options: *o}}",
    "an alias bomb": _bomb(12, 9),
    "an alias bomb that is deep": _bomb(28, 2),
    "an alias bomb of merges": _merge_bomb(12, 9),
    "an alias bomb of texts": _bomb(6, 40, "x" * 500),
    "references that double": _reference_bomb(40),
    "references that double by function": _reference_bomb(40, "${add:${.a%d},1}${.a%d}"),
    "references that are relative and double": _reference_bomb(40, "${..options.a%d}${.a%d}"),
    "a chain of 200 references": _reference_bomb(200, "${.a%d}"),
    "sections that double by reference": "data: {train: {options: {a0: {x: 1, y: 2}, "
    + ", ".join(f"a{i}: {{x: '${{...a{i - 1}}}', y: '${{...a{i - 1}}}'}}" for i in range(1, 30))
    + "}}}",
    "a text of 300 thousand characters": f"grpo: {{seed: {'x' * 300_000}}}",
    "six thousand unknown keys": "\n".join(f"k{i}: 1" for i in range(6_000)),
    "four thousand wrong values": "data: {train: {options: {" + ", ".join(f"k{i}: [1]" for i in range(2_000)) + "}}}",
    "a list where a section must be": "grpo: [1, 2]",
    "a text where a section must be": "policy: fast",
    "a number where a section must be": "data: {train: 3}",
    "false where a section must be": "logger: false",
    "null where a section must be": "cluster: null",
    "a section where a number must be": "grpo: {seed: {a: 1}}",
    "a section where a text must be": "policy: {model_name: {a: 1}}",
    "a list where a path must be": "logger: {log_dir: [a]}",
    "an empty path": "logger: {log_dir: ''}",
    "an empty checkpoint folder": "checkpointing: {checkpoint_dir: ''}",
    "an empty model name": "policy: {model_name: ''}",
    "an empty stop string": "policy: {generation: {stop_strings: ['']}}",
    "a stop string that is null": "policy: {generation: {stop_strings: [null]}}",
    "a stop string that is a number": "policy: {generation: {stop_strings: [3]}}",
    "stop strings that are a text": "policy: {generation: {stop_strings: stop}}",
    "a text where a switch must be": "logger: {live_panel: maybe}",
    "a number where a switch must be": "logger: {live_panel: 2}",
    "a quoted number": "grpo: {seed: '7'}",
    "a fraction of a step": "grpo: {max_num_steps: 1.5}",
    "a negative number of steps": "grpo: {max_num_steps: -1}",
    "no steps": "grpo: {max_num_steps: 0}",
    "a group of one": "grpo: {num_generations_per_prompt: 1}",
    "ten to the fifteen prompts": "data: {train: {size: 1000000000000000}}",
    "defaults of a number": "defaults: 3",
    "defaults of numbers": "defaults: [1, 2]",
    "defaults of a section": "defaults: {a: b}",
    "defaults of nothing there": "defaults: nowhere.yaml",
    "defaults of a folder": "defaults: .",
    "defaults of itself": "defaults: recipe.yaml",
    "defaults of an endless file": "defaults: /dev/zero",
    "defaults of a name too long": f"defaults: {'x' * 5000}.yaml",
    "defaults of ten thousand files": f"defaults: [{', '.join(['once.yaml'] * 10_000)}]",
    "defaults of a file that is no text": "defaults: bytes.yaml",
    "a marker that is no marker": "grpo: {_override_: maybe}",
    "a marker in the root": "_override_: true",
    "a reference without an end": "grpo: {seed: '${'}",
    "a reference to nothing": "grpo: {seed: '${}'}",
    "a reference to itself": "grpo: {seed: '${grpo.seed}'}",
    "a reference to its section": "grpo: {seed: '${grpo}'}",
    "a reference above the root": "grpo: {seed: '${.....seed}'}",
    "a function nobody has": "grpo: {seed: '${exec:ls}'}",
    "a function of texts": "grpo: {seed: '${mul:a,1000000}'}",
    "a function that is too large": "grpo: {seed: '${mul:4000000000,4000000000}'}",
    "a function that divides by zero": "grpo: {seed: '${div:1,0}'}",
    "references in references": "grpo: {seed: '" + "${a" * 300 + "}" * 300 + "'}",
    "a variable that is not set": "grpo: {seed: '${oc.env:NOBODY_SETS_THIS}'}",
    "empty sections": "grpo: {}\nloss_fn: {}",
    "windows line ends": "grpo:\r\n  seed: 3\r\n",
    "a byte order mark": "\ufeffgrpo: {seed: 3}",
    "a value that must be set": "policy: {model_name: ???}",
    "a comment only where a value must be": "policy:\n  model_name: # later",
}

OVERRIDES: Mapping[str, list[str]] = {
    "nothing": [""],
    "no value": ["grpo.seed"],
    "no name": ["=3"],
    "a name of dots": ["...=3"],
    "a name that ends in a dot": ["grpo.=3"],
    "a space in the name": ["grpo seed=3"],
    "a flag": ["--grpo.seed=3"],
    "an unknown section": ["gpro.seed=3"],
    "an unknown key": ["grpo.sed=3"],
    "below a number": ["grpo.seed.deeper=3"],
    "a hundred names": [".".join(["a"] * 100) + "=3"],
    "a thousand names below a free section": ["+policy.optimizer.kwargs." + ".".join(["a"] * 1000) + "=3"],
    "two below a free section": ["+policy.optimizer.kwargs.a.b=3"],
    "below a free value": ["policy.optimizer.kwargs.lr.a=3"],
    "an added key that is there": ["+grpo.max_num_steps=3"],
    "a free key that is not there": ["policy.optimizer.kwargs.beta=3"],
    "a deleted key with a value": ["~grpo.seed=3"],
    "a deleted key that is not there": ["~grpo.nothing"],
    "a deleted element of a list": ["policy.generation.stop_strings=[a]", "~policy.generation.stop_strings.0"],
    "a deleted required key": ["~policy.model_name"],
    "an element of a list": ["policy.generation.stop_strings=[a]", "policy.generation.stop_strings.0=b"],
    "a section as a list, then a key of it": ["grpo=[1,2]", "grpo.seed=3"],
    "a section as a text, then a key of it": ["grpo=abc", "grpo.seed=3"],
    "a section as a number": ["policy=3"],
    "a section as null": ["grpo=null"],
    "an open bracket": ["grpo.seed=["],
    "an open quote": ["grpo.seed='"],
    "two documents": ["grpo.seed=1\n---\n2"],
    "a text": ["grpo.seed=abc"],
    "a quoted number": ["grpo.seed='3'"],
    "a switch": ["grpo.seed=true"],
    "an empty value": ["grpo.seed="],
    "an empty text": ["grpo.seed=''"],
    "an empty path": ["logger.log_dir=''"],
    "an empty model": ["policy.model_name=''"],
    "an empty stop string": ["policy.generation.stop_strings=['']"],
    "zero prompts": ["grpo.num_prompts_per_step=0"],
    "half a prompt": ["grpo.num_prompts_per_step=0.5"],
    "5,000 digits": ["grpo.seed=" + "9" * 5000],
    "5,000 hexadecimal digits": ["grpo.seed=0x" + "f" * 5000],
    "65 bits": [f"grpo.seed={2**64}"],
    "largest integer": [f"grpo.seed={2**63 - 1}"],
    "negative seed": ["grpo.seed=-1"],
    "1e999": ["policy.optimizer.kwargs.lr=1e999"],
    "infinity": ["policy.generation.temperature=.inf"],
    "not a number": ["policy.generation.temperature=.nan"],
    "not a number in a list": ["policy.optimizer.kwargs.betas=[.nan,1]"],
    "a negative temperature": ["policy.generation.temperature=-1"],
    "top_p above one": ["policy.generation.top_p=1.5"],
    "a negative stop token": ["policy.generation.stop_token_ids=[-1]"],
    "an unknown backend": ["policy.generation.backend=sglang"],
    "an unknown dataset": ["data.train.dataset_name=parquet"],
    "bytes": ["grpo.seed=!!binary aGVsbG8="],
    "an object": ["grpo.seed=!!python/object/apply:os.system [ls]"],
    "a list that contains itself": ["policy.generation.stop_strings=&a [*a]"],
    "lists in lists": ["policy.generation.stop_strings=" + "[" * 500 + "]" * 500],
    "bytes that are no text": ["logger.log_dir=a\udcff"],
    "a NUL": ['logger.log_dir="a\\0b"'],
    "half a surrogate pair": ['logger.log_dir="\\ud800"'],
    "100 thousand characters": ["logger.wandb.name=" + "x" * 300_000],
    "a name of 100 thousand characters": ["a" * 100_000 + "=3"],
    "a reference to nothing": ["grpo.seed=${grpo.nothing}"],
    "a reference to itself": ["grpo.seed=${grpo.seed}"],
    "a reference without an end": ["logger.log_dir=${"],
    "a reference that is nested": ["grpo.seed=" + "${a" * 100 + "}" * 100],
    "two that refer to each other": ["grpo.seed=${grpo.val_period}", "grpo.val_period=${grpo.seed}"],
    "a sum": ["grpo.max_val_samples=${add:1,${grpo.seed}}"],
    "a chain of references": ["grpo.max_val_samples=${grpo.max_num_steps}", "grpo.seed=${grpo.max_val_samples}"],
    "the same twice": ["grpo.seed=1", "grpo.seed=2"],
    "1e-4 is a number": ["policy.optimizer.kwargs.lr=1e-4"],
    "more digits than a sort has": ["data.train.options.max_digits=99999999999999999999"],
    "a template without a place": ["data.train.prompt_template=hello"],
}


def _row(**changes: object) -> str:
    return json.dumps({"input": "sort 321", "output": "123", **changes})


_GOOD = _row() + "\n"

ROWS: Mapping[str, str | bytes] = {
    # A JSON Lines file each.
    "an empty file": "",
    "blank lines only": "\n\n\n",
    "no JSON": "sort 321",
    "half a row": _row()[:-5],
    "a row and a half": _GOOD + _row()[:9],
    "two objects in a line": _row() + _row(),
    "a whole JSON list": f"[{_row()}]",
    "a list": "[1, 2]",
    "a text": '"abc"',
    "a number": "3",
    "null": "null",
    "an empty object": "{}",
    "no input": json.dumps({"output": "1"}),
    "no output": json.dumps({"input": "1"}),
    "an input that is null": _row(input=None),
    "an input that is a number": _row(input=3),
    "an input that is a list": _row(input=["a"]),
    "an input that is an object": _row(input={"a": 1}),
    "an empty input": _row(input=""),
    "a conversation for input": _row(input=[{"role": "user", "content": "hi"}]),
    "a single quote": "{'input': 'a', 'output': 'b'}",
    "a trailing comma": '{"input": "a", "output": "b",}',
    "a comment": '{"input": "a", "output": "b"} // why',
    "5,000 digits": '{"input": "a", "output": ' + "9" * 5000 + "}",
    "5,000 digits in another column": '{"input": "a", "output": "b", "n": -' + "9" * 5000 + "}",
    "1e999": '{"input": 1e999, "output": "b"}',
    "numbers that are no JSON": '{"input": "a", "output": NaN}',
    "lists in lists": '{"input": "a", "output": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "objects in objects": '{"input": "a", "output": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}",
    "half a surrogate pair": '{"input": "a\\ud800", "output": "b"}',
    "half a pair in the answer": '{"input": "a", "output": ["\\udfff"]}',
    "half a pair in a key": '{"input": "a", "output": "b", "\\ud800": 1}',
    "half a pair as bytes": b'{"input": "\xed\xa0\x80", "output": "b"}',
    "Latin-1": '{"input": "é", "output": "b"}'.encode("latin-1"),
    "UTF-16": _row().encode("utf-16"),
    "UTF-32": _row().encode("utf-32"),
    "gzip": b"\x1f\x8b\x08\x00" + bytes(range(256)),
    "parquet": b"PAR1" + bytes(200) + b"PAR1",
    "NUL bytes": b"\0" * 1000,
    "a control character": '{"input": "a\x01", "output": "b"}',
    "an unknown escape": '{"input": "\\q", "output": "b"}',
    "a line of 70 million characters": _GOOD + '{"input": "' + "x" * 70_000_000 + '", "output": "b"}',
    "a prompt of 50 MB": _row(input="1 " * 25_000_000),
    "a prompt of 50 MB among others": _GOOD + _row(input="7" * 50_000_000) + "\n",
    "a prompt that is too long": _row(input="3 " * 3000),
    "a byte order mark": b"\xef\xbb\xbf" + _GOOD.encode(),
    "columns nobody asked for": _row(a=1, b=[1, {"c": None}]),
    "blank lines between": f"\n{_GOOD}\n\n{_GOOD}",
    "windows line ends": _GOOD.replace("\n", "\r\n") * 2,
    "an emoji": _row(input="sort \U0001f600"),
    "an answer of any kind": _row(output={"a": [1, None, 2.5]}),
}

CONFIGS: Mapping[str, str | bytes | dict[str, object]] = {
    # The text of config.json, or what is changed in a sound one.
    "an empty file": "",
    "no JSON": "hello",
    "half a file": '{"model_type": "qwen3", "hidden',
    "a list": "[]",
    "null": "null",
    "an empty object": "{}",
    "NUL bytes": b"\0" * 100,
    "Latin-1": '{"model_type": "é"}'.encode("latin-1"),
    "lists in lists": "[" * 100_000,
    "two megabytes": '{"model_type": "qwen3", "x": "' + "x" * 2_000_000 + '"}',
    "5,000 digits": '{"model_type": "qwen3", "vocab_size": ' + "9" * 5000 + "}",
    "no model type": {"model_type": None},
    "an unknown model type": {"model_type": "no_such_model"},
    "a model type that is a list": {"model_type": ["qwen3"]},
    "a model type that is a number": {"model_type": 3},
    "a model without text": {"model_type": "vit"},
    "an encoder": {"model_type": "t5"},
    "code of its own": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
    "hidden_size of letters": {"hidden_size": "abc"},
    "hidden_size as a text": {"hidden_size": "32"},
    "hidden_size of zero": {"hidden_size": 0},
    "hidden_size below zero": {"hidden_size": -32},
    "hidden_size of a fraction": {"hidden_size": 32.5},
    "hidden_size of a list": {"hidden_size": [32]},
    "hidden_size without end": {"hidden_size": 10**30},
    "no heads": {"num_attention_heads": 0},
    "heads below zero": {"num_attention_heads": -4},
    "heads of letters": {"num_attention_heads": "four"},
    "half a head": {"num_attention_heads": 0.5},
    "no key-value heads": {"num_key_value_heads": 0},
    "heads true": {"num_attention_heads": True},
    "a vocabulary below zero": {"vocab_size": -5},
    "no vocabulary": {"vocab_size": 0},
    "a vocabulary of letters": {"vocab_size": "many"},
    "a vocabulary without end": {"vocab_size": 10**18},
    "no layers": {"num_hidden_layers": 0},
    "layers below zero": {"num_hidden_layers": -2},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers of letters": {"num_hidden_layers": "two"},
    "layers of an object": {"num_hidden_layers": {"a": 1}},
    "a head of no width": {"head_dim": 0},
    "no feed-forward layer": {"intermediate_size": 0},
    "no positions": {"max_position_embeddings": 0},
    "positions of letters": {"max_position_embeddings": "long"},
    "an activation nobody has": {"hidden_act": "swishh"},
    "an activation that is a number": {"hidden_act": 3},
    "an epsilon of letters": {"rms_norm_eps": "small"},
    "an epsilon that is a list": {"rms_norm_eps": [1e-6]},
    "a rope that is a text": {"rope_parameters": "default"},
    "a rope nobody has": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    "a rope without a base": {"rope_parameters": {"rope_type": "default", "rope_theta": "wide"}},
    "layer types of the wrong number": {"layer_types": ["full_attention"]},
    "layer types nobody has": {"layer_types": ["full", "half"]},
    "layer types that are a text": {"layer_types": "full_attention"},
    "a padding token beyond the vocabulary": {"pad_token_id": 10**9},
    "a dtype nobody has": {"dtype": "float1"},
    "a dtype that is a number": {"dtype": 3},
    "an attention bias of letters": {"attention_bias": "maybe"},
    "a quantisation nobody has": {"quantization_config": {"quant_method": "magic"}},
    "tied weights as a text": {"tie_word_embeddings": "yes"},
    "a window that is null": {"sliding_window": None},
    "unknown keys": {"made_by": "somebody", "x": [1]},
}

Change = Callable[[Path], object]


def _json_edit(name: str, **changes: object) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        given = json.loads(path.read_text()) if path.exists() else {}
        given.update(changes)
        path.write_text(json.dumps({key: value for key, value in given.items() if value != "(out)"}))

    return change


def _write(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def _both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


_TEMPLATE = "chat_template.jinja"

TOKENIZERS: Mapping[str, Change] = {
    "no files": _remove("tokenizer.json", "tokenizer_config.json", _TEMPLATE),
    "settings only": _remove("tokenizer.json"),
    "an empty tokenizer.json": _write("tokenizer.json", ""),
    "half of tokenizer.json": lambda f: (f / "tokenizer.json").write_bytes((f / "tokenizer.json").read_bytes()[:5000]),
    "a tokenizer.json that is a list": _write("tokenizer.json", "[]"),
    "a tokenizer.json of nothing": _write("tokenizer.json", "{}"),
    "a tokenizer.json of NULs": _write("tokenizer.json", b"\0" * 100),
    "a tokenizer without a model": _json_edit("tokenizer.json", model=None),
    "a model nobody has": _json_edit("tokenizer.json", model={"type": "Magic"}),
    "a vocabulary of texts": _json_edit("tokenizer.json", model={"type": "BPE", "vocab": {"a": "b"}, "merges": []}),
    "a vocabulary below zero": _json_edit("tokenizer.json", model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "merges of what is not there": _json_edit(
        "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}
    ),
    "settings that are no JSON": _write("tokenizer_config.json", "hello"),
    "settings that are a list": _write("tokenizer_config.json", "[]"),
    "a class nobody has": _json_edit("tokenizer_config.json", tokenizer_class="MagicTokenizer"),
    "code of its own": _json_edit(
        "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", None]}
    ),
    "no end of sequence": _json_edit("tokenizer_config.json", eos_token="(out)"),
    "an end of sequence that is a number": _json_edit("tokenizer_config.json", eos_token=3),
    "no padding token": _json_edit("tokenizer_config.json", pad_token="(out)"),
    "a length of letters": _json_edit("tokenizer_config.json", model_max_length="long", padding_side="up"),
    "no chat template": _remove(_TEMPLATE),
    "its own chat template file": _write(_TEMPLATE, "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    "a chat template that does not end": _write(_TEMPLATE, "{% for m in messages %}{{ m['content'] }}"),
    "a chat template with a stray end": _write(_TEMPLATE, "{{ messages }} {% endif %}"),
    "a chat template of an unknown tag": _write(_TEMPLATE, "{% frobnicate %}"),
    "a chat template of an unknown filter": _write(_TEMPLATE, "{{ messages | frobnicate }}"),
    "a chat template that calls nothing": _write(_TEMPLATE, "{{ nothing.there() }}"),
    "a chat template that divides by zero": _write(_TEMPLATE, "{{ 1 // 0 }}"),
    "a chat template that adds texts and numbers": _write(_TEMPLATE, "{{ 1 + 'a' }}"),
    "a chat template that refuses": _write(_TEMPLATE, "{{ raise_exception('users are not welcome') }}"),
    "a chat template that breaks out": _write(_TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "a chat template that counts to the end": _write(_TEMPLATE, "{% for i in range(999999999999) %}a{% endfor %}"),
    "a chat template of nested loops": _write(
        _TEMPLATE, "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a chat template that multiplies": _write(_TEMPLATE, "{{ 'a' + 9 ** 9 ** 2 ** 'x' }}"),
    "a chat template of itself": _write(_TEMPLATE, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"),
    "a chat template of Latin-1": _write(_TEMPLATE, "é".encode("latin-1")),
    "a chat template that drops the prompt": _write(_TEMPLATE, "{# nothing #}"),
    "generation config that is no JSON": _write("generation_config.json", "hello"),
    "generation config that is a list": _write("generation_config.json", "[]"),
    "generation config with a text": _json_edit("generation_config.json", eos_token_id="end"),
    "generation config with a list of texts": _json_edit("generation_config.json", eos_token_id=[2, "end"]),
    "generation config below zero": _json_edit("generation_config.json", eos_token_id=-1),
    "generation config without an end": _json_edit("generation_config.json", eos_token_id="(out)"),
}

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _cut(share: float) -> Change:
    return lambda f: (f / _WEIGHTS).write_bytes(
        (f / _WEIGHTS).read_bytes()[: int(share * (f / _WEIGHTS).stat().st_size)]
    )


def _header(length: int) -> Change:
    return lambda f: (f / _WEIGHTS).write_bytes(length.to_bytes(8, "little") + (f / _WEIGHTS).read_bytes()[8:])


def _index(weight_map: object) -> Change:
    return _both(_remove(_WEIGHTS), _write(_INDEX, json.dumps({"metadata": {}, "weight_map": weight_map})))


def _shard(folder: Path) -> None:
    (folder / _WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    from safetensors import safe_open

    with safe_open(str(folder / "model-00001-of-00001.safetensors"), framework="pt") as file:
        names = dict.fromkeys(file.keys(), "model-00001-of-00001.safetensors")
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


WEIGHTS: Mapping[str, Change] = {
    "no config": _remove("config.json"),
    "no weights": _remove(_WEIGHTS),
    "pickles only": _both(_remove(_WEIGHTS), _write("pytorch_model.bin", b"\x80\x02cos\nsystem\n")),
    "an empty file": _write(_WEIGHTS, b""),
    "seven bytes": _write(_WEIGHTS, b"\0" * 7),
    "a file of NULs": _write(_WEIGHTS, b"\0" * 1000),
    "half a file": _cut(0.5),
    "all but a byte": _cut(0.9999),
    "a header without end": _header(2**63 - 1),
    "a header of a gigabyte": _header(2**30),
    "a header that is no JSON": _header(11),
    "a page of a web server": _write(_WEIGHTS, "<html>Sign in to download</html>"),
    "a pointer of git-lfs": _write(_WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "an index that is no JSON": _both(_remove(_WEIGHTS), _write(_INDEX, "hello")),
    "an index that is a list": _both(_remove(_WEIGHTS), _write(_INDEX, "[]")),
    "an index of nothing": _index({}),
    "an index that is a text": _index("all"),
    "an index of numbers": _index({"model.norm.weight": 3}),
    "an index of lists": _index({"model.norm.weight": ["a"]}),
    "an index of files that are gone": _index({"model.norm.weight": "model-00001-of-00002.safetensors"}),
    "an index that leaves the folder": _index({"model.norm.weight": "../../etc/passwd"}),
    "in shards": _shard,
}

REWARDS: Mapping[str, str] = {
    "no colon": "my_rewards",
    "no function": "my_rewards:",
    "no module": ":brevity",
    "only a colon": ":",
    "a module that is not there": "no_such_module_anywhere:f",
    "a module in a module that is not there": "json.nowhere:f",
    "a function that is not there": "json:no_such_function",
    "a module that is no name": "../rewards.py:f",
    "a module of dots": "...:f",
    "what is no function": "json:__doc__",
    "a module that fails": "this_reward_fails:f",
    "a module that leaves": "this_reward_leaves:f",
    "a module that does not parse": "this_reward_is_no_python:f",
    "two colons": "json:loads:f",
    "a name of 10 thousand characters": "json:" + "x" * 10_000,
}

REWARD_MODULES: Mapping[str, str] = {
    "this_reward_fails.py": "raise ValueError('not today')\n",
    "this_reward_leaves.py": "import os\nos._exit(0)\n",
    "this_reward_is_no_python.py": "def f(:\n",
}
"""Files in the working directory of a test."""
