"""The shape of the repository: who may import whom, where private torch API lives, how long a file may be."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest
import torch
from torch import fx, nn

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "runtime", "kernels")
MAX_LINES = 400
PRIVATE_TORCH_FILES = {
    "autopar/_torch.py",
    "autopar/frontend/_torch.py",
    "autopar/frontend/_torch_export.py",
    "autopar/cache/_torch.py",
    "runtime/_torch.py",
    "runtime/module/_torch.py",
}
# Of torch's own objects: attributes and methods that its documentation does not name.
TORCH_CLASSES = (torch.Tensor, nn.Module, torch.optim.Optimizer, fx.Graph, fx.GraphModule, fx.Node)
PRIVATE_ATTRIBUTES = {name for each in TORCH_CLASSES for name in dir(each) if re.match("_[a-z]", name)} | {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_metadata",
    "_modules",
    "_non_persistent_buffers_set",
    "_parameters",
    "_schema",
}
# What sees all of ours: what users call, and the compiler behind it.
FRONT_DOOR = ("autopar/doors/", "autopar/captured.py", "autopar/compiler.py", "autopar/reused.py", "autopar/__init__.py")
# Keys of node.meta that torch writes; ours are `Key` objects (autopar/ir/keys.py).
TORCH_META_KEYS = {
    "val",
    "stack_trace",
    "nn_module_stack",
    "seq_nr",
    "tensor_meta",
    "desc",
    "from_node",
    "original_aten",
    "source_fn_stack",
    "torch_fn",
    "fwd_nn_module_stack",
    "fwd_source_fn_stack",
    "autograd_backward",
    "partitioner_tag",
    "custom",
    "val_spec",
    "example_value",
    "is_gradient_acc",
    "ac_graph_id",
}
# Packages whose module has another name.
MODULE_OF = {"PyYAML": "yaml"}
# What registers our ops with what the compiler must know of them; that is read from here.
REGISTRATION = "autopar.kernels.registration"
# What a folder may import of ours, beside that: prefixes of module names.
ALLOWED = {
    "kernels": ("autopar.kernels",),
    "passes": ("autopar", "autopar.passes", "autopar.kernels"),
    "runtime": ("autopar", "autopar.runtime"),
    "autopar": ("autopar",),
}


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Our Python files under `folders`, each once (the links inside autopar/ are not followed)."""
    found: list[Path] = []
    for folder in folders:
        for parent, names, files in os.walk(ROOT / folder):
            names[:] = sorted(name for name in names if not Path(parent, name).is_symlink() and not name.startswith((".", "__pycache__")))
            found += [Path(parent, file) for file in sorted(files) if file.endswith(".py")]
    return tuple(found)


def everything() -> tuple[Path, ...]:
    return sources("autopar", *LINKED, "examples", "benchmarks", "tests")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything `path` imports; `from a.b import c` gives `a.b` and `a.b.c`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; write the whole name"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def of_ours(module: str) -> str | None:
    """`autopar.passes.x` → "autopar.passes", `autopar.ir.mesh` → "autopar", a foreign module → None."""
    parts = module.split(".")
    if parts[0] != "autopar":
        return None
    return f"autopar.{parts[1]}" if len(parts) > 1 and parts[1] in LINKED else "autopar"


def forbidden_imports(path: Path) -> list[str]:
    folder = name_of(path).split("/")[0]
    if name_of(path).startswith(FRONT_DOOR):
        return []
    others = ((line, module) for line, module in imports(path) if not f"{module}.".startswith(f"{REGISTRATION}."))
    found = {(line, module) for line, module in others if (of_ours(module) or ALLOWED[folder][0]) not in ALLOWED[folder]}
    return [f"{name_of(path)}:{line} imports {module}" for line, module in sorted(found)]


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    found = [problem for path in sources(folder) for problem in forbidden_imports(path)]
    assert not found, "\n".join(found)


def module_of(path: Path) -> str:
    """The name by which our files import `path`: `runtime/module/guard.py` → "autopar.runtime.module.guard"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "autopar" else ("autopar", *parts)).removesuffix(".__init__")


def import_cycle(graph: networkx.DiGraph) -> str:
    """A cycle of `graph` as "a → b → a", or nothing."""
    try:
        edges = networkx.find_cycle(graph)
    except networkx.NetworkXNoCycle:
        return ""
    return " → ".join([edges[0][0], *(edge[1] for edge in edges)])


def test_imports_form_no_cycle() -> None:
    """Every import counts: at the head, inside a function, for types only."""
    paths = {module_of(path): path for path in sources("autopar", *LINKED)}
    graph = networkx.DiGraph()
    graph.add_edges_from(
        (name, module) for name, path in paths.items() for _, module in imports(path) if module in paths and module != name
    )
    assert graph.number_of_edges() > 1000
    assert not import_cycle(graph)


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    found = [
        f"{name_of(path)}:{line} {module}" for path in everything() for line, module in imports(path) if module.split(".")[0] in LINKED
    ]
    assert not found, "\n".join(found)


def is_private_torch(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def dotted(node: ast.expr) -> str:
    """`torch._C.x` of an attribute chain that starts at a name; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_torch_uses(path: Path) -> list[str]:
    uses = {(line, module) for line, module in imports(path) if is_private_torch(module)}
    for node in ast.walk(tree(path)):
        # torch.ops.aten._softmax and its kin are names of ops, which graphs hold: data, not API.
        if isinstance(node, ast.Attribute) and not dotted(node).startswith("torch.ops.") and is_private_torch(dotted(node)):
            uses.add((node.lineno, dotted(node)))
    return [f"{name_of(path)}:{line} {module}" for line, module in sorted(uses)]


def private_attributes(module: ast.Module) -> list[tuple[int, str]]:
    """`op._schema` and `getattr(op, "_schema")`; an attribute of `self` is one of ours, one of `aten` an op."""
    found = [
        (node.lineno, node.attr)
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES and dotted(node.value).split(".")[-1] not in ("self", "aten")
    ]
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr"):
            names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            found += [(node.lineno, str(name)) for name in names if name in PRIVATE_ATTRIBUTES]
    return found


def test_private_torch_api_stays_in_the_adapters() -> None:
    ours = [path for path in sources("autopar", *LINKED, "examples", "benchmarks") if name_of(path) not in PRIVATE_TORCH_FILES]
    found = [use for path in ours for use in private_torch_uses(path)]
    found += [f"{name_of(path)}:{line} {name}" for path in ours for line, name in private_attributes(tree(path))]
    assert not found, "\n".join(found)


def test_every_pass_has_a_test_file() -> None:
    passes = [path for path in sources("passes") if path.parent.name in ("forward", "global_", "local", "schedule")]
    names = [(name_of(path), name_of(path.parent), path.name) for path in passes if path.name != "__init__.py"]
    missing = [name for name, folder, file in names if not (ROOT / "tests" / folder / f"test_{file}").exists()]
    assert len(names) > 40 and not missing, "\n".join(missing)


def test_every_pass_says_what_it_reads_writes_and_ensures() -> None:
    for path in sorted((ROOT / "passes").glob("*/*.py")):
        for each in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.ClassDef) and any(isinstance(part, ast.FunctionDef) and part.name == "apply" for part in each.body):
                text = ast.get_docstring(each) or ""
                missing = [word for word in ("Reads: ", "Writes: ", "Ensures: ") if word not in text]
                assert not missing, f"the docstring of {each.name} in {path.relative_to(ROOT)} lacks {', '.join(missing)}"


def test_no_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in everything()}
    long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert not long, f"files over {MAX_LINES} lines: {long}"


@pytest.mark.parametrize("name", LINKED)
def test_links_are_intact(name: str) -> None:
    link = ROOT / "autopar" / name
    assert link.is_symlink(), f"autopar/{name} must be a link to ../{name} (git config core.symlinks true, then check out again)"
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def meta_key(node: ast.AST) -> ast.expr | None:
    """The key of `x.meta[key]`, `x.meta.get(key)` or `key in x.meta`."""
    if isinstance(node, ast.Subscript) and is_meta(node.value):
        return node.slice
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value) and node.args:
        return node.args[0]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)) and is_meta(node.comparators[0]):
        return node.left
    return None


def string_meta_keys(module: ast.Module) -> list[tuple[int, str]]:
    keys = ((node, meta_key(node)) for node in ast.walk(module))
    return [
        (getattr(node, "lineno", 0), key.value)
        for node, key in keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value not in TORCH_META_KEYS
    ]


def test_no_string_keys_of_ours_in_node_meta() -> None:
    found = [f"{name_of(path)}:{line} {key!r}" for path in sources("autopar", *LINKED) for line, key in string_meta_keys(tree(path))]
    assert not found, "use a Key from autopar/ir/keys.py:\n" + "\n".join(found)


def packages(requirements: list[str]) -> set[str]:
    """The modules that these requirements install."""
    names = (re.split(r"[^\w-]", text)[0] for text in requirements)
    return {MODULE_OF.get(name, name) for name in names}


def foreign_imports(*folders: str) -> set[str]:
    used = {module.split(".")[0] for path in sources(*folders) for _, module in imports(path)}
    return used - set(sys.stdlib_module_names) - {"autopar"}


def test_every_dependency_is_declared() -> None:
    """What the package imports is in `dependencies`, and all of that is imported; what the examples import besides is an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared, extra = packages(project["dependencies"]), packages(project["optional-dependencies"]["examples"])
    optional = packages(project["optional-dependencies"]["plan"])  # for `autopar plan --model config.json`
    used = foreign_imports("autopar", *LINKED) - {"triton"} - optional  # triton comes with torch's CUDA builds
    assert used == declared, f"imported or declared alone: {sorted(used ^ declared)}"
    own = {path.stem for path in sources("examples")}
    of_examples = foreign_imports("examples") - declared - own - {"transformers"}  # `make test` installs it, the README says
    assert of_examples == extra, f"imported or declared alone by the examples: {sorted(of_examples ^ extra)}"


def test_the_checks_see_what_they_look_for() -> None:
    bad = 'node.meta["ours"] = 1\nnode.meta.get("also_ours")\nif "third" in node.meta: pass\nnode.meta["val"]\nnode.meta[KEY]\n'
    assert string_meta_keys(ast.parse(bad)) == [(1, "ours"), (2, "also_ours"), (3, "third")]
    private = 'op._schema\nself._buffers\ngetattr(op, "_version", 0)\nstate.metadata\nmade[0]._is_view()\ntorch.ops.aten._conj.default\n'
    assert private_attributes(ast.parse(private)) == [(1, "_schema"), (5, "_is_view"), (3, "_version")]
    assert is_private_torch("torch._dynamo.backends") and is_private_torch("torch.fx._pytree")
    assert not is_private_torch("torch.fx.node") and not is_private_torch("numpy._core")
    assert import_cycle(networkx.DiGraph(["ab", "bc", "cb"])) == "b → c → b" and not import_cycle(networkx.DiGraph(["ab", "bc", "ac"]))
    assert of_ours("autopar.passes.cse") == "autopar.passes" and of_ours("autopar.ir.mesh") == "autopar" and of_ours("torch") is None
