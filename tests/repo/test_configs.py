"""Every shipped recipe loads, on a machine that has neither torch nor Ray."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from nemo_rl.cli.launch import init
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import iter_fields, named_class, section_class
from nemo_rl.errors import UserError

ROOT = Path(__file__).parents[2]
FIRST_RATE = 5e-4
"""Learning rate of the first recipe: that of the sort demo."""
RECIPES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.name != "grpo_base.yaml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_recipe_loads(recipe: Path) -> None:
    load_config(recipe)


def test_every_key_is_read_somewhere() -> None:
    """A key that is accepted has an effect; this finds those that no code outside the config package reads."""
    library = texts(ROOT / "nemo_rl", ROOT / "examples", but="config")
    assert unread_keys(library, config_sources=texts(ROOT / "nemo_rl" / "config")) == set()


def test_a_key_of_another_section_with_the_same_name_is_no_reader() -> None:
    text = """
class Holder:
    def __init__(self, cfg: DataPlaneConfig | None, other: Thing) -> None:
        self._cfg, self._other = cfg, other

    def use(self) -> object:
        store = self._cfg.mooncake if self._cfg.enabled else self._other
        return store.host, self._other.lease_s, self._other.checkpointing.enabled
"""
    unread = unread_keys([text], config_sources=[])
    read = {key for key, field in iter_fields() if section_class(field.annotation) is None} - unread
    assert read == {"data_plane.enabled", "data_plane.mooncake.host"}


def test_loading_a_recipe_imports_neither_torch_nor_ray() -> None:
    script = (
        "import sys; from nemo_rl.config.load import load_config; from nemo_rl.config.yaml_text import to_yaml; "
        "to_yaml(load_config('configs/grpo_sort_cpu.yaml')); "
        "heavy = {'torch', 'ray', 'numpy', 'transformers', 'tensordict', 'transfer_queue'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


RUN_EACH = """
import contextlib, io, json, runpy, sys
ended = []
for arguments in json.loads(sys.argv[1]):
    out, sys.argv = io.StringIO(), list(arguments)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    ended.append([code, out.getvalue()])
heavy = {"torch", "ray", "transformers", "tensordict", "transfer_queue"}
print(json.dumps([ended, sorted(heavy & set(sys.modules))]))
"""
"""Runs commands one after the other: exit code and output of each, and what heavy modules they have imported."""
SCRIPT, COMMAND, RECIPE = "examples/run_grpo.py", "nemo_rl/cli/main.py", "configs/grpo_sort_cpu.yaml"
WAYS = ([SCRIPT, "--config"], [COMMAND, "train"])
CHECKS = [
    (["--validate-only"], 0, f"{RECIPE}: ok, the config only; not looked at: model folder, data"),
    (["--print-config", "grpo.seed=7"], 0, "seed: 7"),
    (["grpo.sed=7"], 2, "grpo.sed: unknown key 'sed'; did you mean 'seed'?"),
    (["policy.model_name=no/such/folder", "--validate-only"], 0, "ok"),
]
HELPS = [
    ([SCRIPT, "--help"], "--preflight"),
    ([SCRIPT, "--version"], "nemo-rl 0."),
    ([COMMAND, "--help"], "data-plane"),
    ([COMMAND, "--version"], "nemo-rl 0."),
    ([COMMAND, "inspect", "--help"], "rollouts"),
]


def test_help_and_checks_of_a_recipe_import_nothing_heavy_and_script_and_nemo_rl_train_say_the_same() -> None:
    checks = [([*how, RECIPE, *given], code, shown) for given, code, shown in CHECKS for how in WAYS]
    table = [*checks, *((command, 0, shown) for command, shown in HELPS)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, json.dumps([command for command, _, _ in table])],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    ended, imported = json.loads(done.stdout)
    assert imported == []
    for (command, code, shown), (found, said) in zip(table, ended, strict=True):
        assert found == code and shown in said and "Traceback" not in said, (command, said)
    for script, train in zip(ended[0 : len(checks) : 2], ended[1 : len(checks) : 2], strict=True):
        assert script == train


# Which keys the library reads, told from types: `section.key` counts where `section` is known to be one. Types come
# from annotations of parameters, fields and return values, and from assignments. A section that is passed on whole, or
# dumped, is followed by its class; a property of a section counts for the keys that it reads.

Classes = frozenset[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOTHING: Classes = frozenset()
WHOLE = ("model_dump", "model_copy")
"""Methods that read every key of a section."""


def unread_keys(sources: Iterable[str], *, config_sources: Iterable[str]) -> set[str]:
    """Dotted paths of keys that no line reads.

    Args:
        sources: Python text of the library without its config package.
        config_sources: text of that package, for the properties of its sections.
    """
    reads = _Reads(dict(_sections(MasterConfig)))
    config_trees, trees = [ast.parse(text) for text in config_sources], [ast.parse(text) for text in sources]
    for tree in (*config_trees, *trees):
        reads.learn(tree)
    for tree in trees:
        reads.learn_fields(tree)
    for tree in trees:
        reads.follow(tree)
    return {path for path, owner, name in _keys(MasterConfig) if (owner, name) not in reads.found}


def _sections(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield section.__name__, section
    if (named := named_class(section)) is not None:
        yield from _sections(named)
    for field in section.model_fields.values():
        if (inner := section_class(field.annotation)) is not None:
            yield from _sections(inner)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted path, class, attribute) of every plain value."""
    for name, field in section.model_fields.items():
        inner, key = section_class(field.annotation), f"{prefix}{field.alias or name}"
        if inner is None:
            yield key, _declaring(section, name), name
        else:
            yield from _keys(inner, f"{key}.")
    if (named := named_class(section)) is not None:
        yield from _keys(named, f"{prefix}NAME.")


def _declaring(section: type[BaseModel], name: str) -> str:
    """Return the class in which a key is declared: readers of that one read it of all below."""
    return next(base.__name__ for base in reversed(section.__mro__) if name in vars(base).get("__annotations__", {}))


class _Reads:
    """Keys that were read, as (class of a section, key)."""

    def __init__(self, sections: dict[str, type[BaseModel]]) -> None:
        self.found: set[tuple[str, str]] = set()
        self._sections = sections
        self._attributes: defaultdict[str, dict[str, str]] = defaultdict(dict)
        """Class -> attribute or property -> annotation."""
        self._assigned: defaultdict[str, dict[str, Classes]] = defaultdict(dict)
        """The same for attributes without one, from what a method assigns."""
        self._bases: dict[str, list[str]] = {
            name: [base.__name__ for base in of.__mro__] for name, of in sections.items()
        }
        self._bodies: dict[tuple[str, str], Function] = {}
        """Properties and methods of sections that nothing has read so far."""
        self._returns: dict[str, str] = {}
        """Function -> annotation of what it returns."""
        self._classes: set[str] = set(sections)

    def learn(self, tree: ast.Module) -> None:
        """Annotations of a module."""
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                self._returns.setdefault(node.name, _text(node.returns))
            if not isinstance(node, ast.ClassDef):
                continue
            self._classes.add(node.name)
            self._bases.setdefault(node.name, [_text(base) for base in node.bases])
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    self._attributes[node.name][item.target.id] = _text(item.annotation)
                if isinstance(item, FUNCTIONS):
                    if any("property" in _text(mark) for mark in item.decorator_list):
                        self._attributes[node.name][item.name] = _text(item.returns)
                    if node.name in self._sections:
                        self._bodies[node.name, item.name] = item

    def learn_fields(self, tree: ast.Module) -> None:
        """Learn from `self.x = parameter`, also from `self.x = parameter.section`."""
        for owner, function in _functions(tree):
            types = self._parameters(owner, function) if owner else {}
            for target, value in _assignments(_own_nodes(function)) if owner else ():
                is_own = isinstance(target, ast.Attribute) and _text(target.value) == "self"
                if is_own and (found := self._type(value, types)):
                    self._assigned[owner].setdefault(target.attr, found)

    def follow(self, tree: ast.Module) -> None:
        """Reads in a module."""
        for owner, function in _functions(tree):
            self._follow_function(function, owner, {})

    def _follow_function(self, function: Function, owner: str, known: dict[str, Classes]) -> None:
        types, nodes = {**known, **self._parameters(owner, function)}, _own_nodes(function)
        for target, value in _assignments(nodes):
            if isinstance(target, ast.Name) and (found := self._type(value, types)):
                types[target.id] = types.get(target.id, NOTHING) | found
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self._type(node, types)
            if isinstance(node, FUNCTIONS) and node is not function:
                self._follow_function(node, "", types)

    def _parameters(self, owner: str, function: Function) -> dict[str, Classes]:
        args = function.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        types = {arg.arg: self._classes_in(_text(arg.annotation)) for arg in named}
        return {**types, "self": frozenset([owner])} if owner else types

    def _type(self, node: ast.expr, types: dict[str, Classes]) -> Classes:
        """Return the classes that an expression may have, and note the keys of sections that it reads."""
        if isinstance(node, ast.Name):
            return types.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return _union(self._read(owner, node.attr) for owner in self._type(node.value, types))
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if isinstance(node.func, ast.Attribute):
                name = node.func.attr
                self._type(node.func, types)
            return frozenset([name]) if name in self._classes else self._classes_in(self._returns.get(name, ""))
        if isinstance(node, ast.IfExp):
            return self._type(node.body, types) | self._type(node.orelse, types)
        return _union(self._type(value, types) for value in node.values) if isinstance(node, ast.BoolOp) else NOTHING

    def _read(self, owner: str, name: str) -> Classes:
        section = self._sections.get(owner)
        if section is not None and name in WHOLE:
            self.found |= {(owner, field) for field in section.model_fields}
        if section is not None and name in section.model_fields:
            self.found.add((owner, name))
            inner = section_class(section.model_fields[name].annotation)
            return NOTHING if inner is None else frozenset([inner.__name__])
        return self._of_class(owner, owner, name)

    def _of_class(self, owner: str, holder: str, name: str) -> Classes:
        """Return the classes of an attribute of an `owner` that `holder`, the owner or a base of it, may define."""
        if (body := self._bodies.pop((holder, name), None)) is not None:
            self._follow_function(body, owner, {})
        if name in self._attributes[holder]:
            return self._classes_in(self._attributes[holder][name])
        if name in self._assigned[holder]:
            return self._assigned[holder][name]
        above = (base for base in self._bases.get(holder, ()) if base != holder)
        return _union(self._of_class(owner, base, name) for base in above)

    @functools.cache  # noqa: B019  (of one call of `unread_keys`)
    def _classes_in(self, annotation: str) -> Classes:
        return frozenset(re.findall(r"\w+", annotation)) & self._classes


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """(class or nothing, function) of those that stand in no other function."""
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            yield "", node
        if isinstance(node, ast.ClassDef):
            yield from ((node.name, item) for item in node.body if isinstance(item, FUNCTIONS))


@functools.cache
def _own_nodes(function: Function) -> list[ast.AST]:
    """Return the nodes of a function, without those of the functions inside it."""
    found: list[ast.AST] = []
    waiting = deque(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.popleft()
        found.append(node)
        if not isinstance(node, FUNCTIONS):
            waiting += ast.iter_child_nodes(node)
    return found


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.NamedExpr):
            yield node.target, node.value
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
            yield from ((node.target, value) for value in node.iter.elts)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                yield from zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]


def _union(found: Iterable[Classes]) -> Classes:
    return NOTHING.union(*found)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def texts(*folders: Path, but: str = "") -> list[str]:
    """Return the text of the Python files of folders."""
    return [
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not but or but not in path.parts
    ]


def test_the_first_recipe_is_what_init_writes_and_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init(Path("examples/first"), model="checkpoints/starter_sort", rate=FIRST_RATE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("recipe.yaml", "reward.py", "prompts.jsonl"):
        text = (tmp_path / "examples" / "first" / name).read_text(encoding="utf-8")
        assert (ROOT / "examples" / "first" / name).read_text(encoding="utf-8") == text
        assert (text if name != "prompts.jsonl" else text.splitlines()[0]) in readme
    with pytest.raises(UserError, match=r"examples/first/recipe.yaml, .* there already, and not written over"):
        init(Path("examples/first"), model="m", rate=1.0)
    load_config("examples/first/recipe.yaml")
