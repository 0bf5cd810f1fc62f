"""How the source is laid out: what a stranger meets, in numbers, before and after a rebuild.

python -m benchmarks.structure                                   this tree
python -m benchmarks.structure --before CHECKOUT --docs docs/structure.md   beside another one, as a table
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

import networkx as nx

FOLDERS = ("autopar", "passes", "runtime", "kernels")
ROOT = Path(__file__).resolve().parent.parent
# What there should be one of: a class or function by its name.
ONE_OF = {
    "definitions of SEND": r"class Send\b",
    "definitions of RECV": r"class Receive\b",
    "parsers of instructions": r"def parse(?:_instruction)?\(text",
    "provers of rendezvous": r"def check_rendezvous\(",
    "simulators": r"def simulate\(",
    "memory walks": r"(?m)^def (?:rank_memory|peak_bytes|schedule_memory|grid_memory)\(",
}
# Asking whether there is a pipeline at all.
FORKS = r"\border is (?:not )?None|\bis_pipelined\b|\bis_single\b"
FORMS = (
    "passes/fuse/",
    "passes/attention_forms/",
    "passes/norm_forms/",
    "passes/gate_forms/",
    "passes/rotary_forms/",
    "passes/dropout_forms/",
)
PASSES_OF_FORMS = re.compile(r"passes/(?:forward/)?(?:fuse_(?:attention|norms|gates|rotary|dropout)|unify_attention)\.py$")
# Attributes of torch's own objects that no public page names.
PRIVATE = re.compile(
    r"^_(?:schema|op|opname|forward_(?:pre_)?hooks\w*|backward_(?:pre_)?hooks|version|parameters|buffers|modules|qualified_op_name)$"
)


@dataclass(frozen=True)
class Tree:
    """The sources of a checkout, tests and examples aside."""

    root: Path

    @cached_property
    def files(self) -> dict[str, str]:
        """By path within the checkout the text; the links inside autopar/ are not followed."""
        found: dict[str, str] = {}
        for folder in FOLDERS:
            for parent, names, files in os.walk(self.root / folder):
                names[:] = [name for name in names if not Path(parent, name).is_symlink() and name != "__pycache__"]
                paths = [Path(parent, file) for file in files if file.endswith(".py")]
                found |= {path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        return dict(sorted(found.items()))

    @cached_property
    def modules(self) -> dict[str, str]:
        """By dotted name the path."""
        found: dict[str, str] = {}
        for path in self.files:
            parts = list(Path(path).with_suffix("").parts)
            parts = parts if parts[0] == "autopar" else ["autopar", *parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    def imports(self) -> nx.DiGraph[str]:
        """Who imports whom, wherever the import stands, be it inside a function or for types only, be it by a string."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.modules)
        for name, path in self.modules.items():
            graph.add_edges_from((name, other) for other in _imported(self.files[path]) if other in self.modules and other != name)
        return graph

    def lines(self, path: str) -> int:
        return len(self.files[path].splitlines())


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


def _function(text: str, *names: str) -> int:
    """Lines of the first of these functions that there is, its docstring included, and of those that it was cut into."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name in names]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in found)


def _private(tree: Tree) -> dict[str, int]:
    """By file how often private names of torch are used: imported, dotted, or reached through an attribute."""
    found: dict[str, int] = {}
    for path, text in tree.files.items():
        names = 0
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and re.match(r"torch\b.*\._", f"{node.module}."):
                names += len(node.names)
            elif isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                is_ours = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                is_dotted = re.match(r"torch(\.\w+)*\._[a-z]\w*$", dotted) is not None and not dotted.startswith("torch.ops.")
                names += is_dotted or (PRIVATE.match(node.attr) is not None and not is_ours)
        if names:
            found[path] = names
    return found


def measure(tree: Tree) -> dict[str, str]:
    lengths = {path: tree.lines(path) for path in tree.files}
    longest = max(lengths, key=lambda path: lengths[path])
    circles = [each for each in nx.strongly_connected_components(tree.imports()) if len(each) > 1]
    forms = [path for path in lengths if path.startswith(FORMS) or PASSES_OF_FORMS.match(path)]
    compiler = tree.files["autopar/compiler.py"]
    private = _private(tree)
    adapters = {path for path in private if path.endswith("_torch.py")}
    outside = {path: number for path, number in private.items() if path not in adapters}
    everything = "\n".join(tree.files.values())
    return {
        "modules at the root of `autopar/`": str(sum(path.count("/") == 1 and path.startswith("autopar/") for path in lengths)),
        "modules, lines": f"{len(lengths)}, {sum(lengths.values()):,}",
        "median and largest file": f"{sorted(lengths.values())[len(lengths) // 2]}, {lengths[longest]} (`{longest}`)",
        "files over 300 lines": str(sum(length > 300 for length in lengths.values())),
        "the compiler as a function: lines from capture to schedule": str(_function(compiler, "compile_call", "compile_once")),
        "forks between one stage and a pipeline": str(len(re.findall(FORKS, everything))),
        **{what: str(len(re.findall(pattern, everything))) for what, pattern in ONE_OF.items()},
        "import circles": ", ".join(f"one of {len(each)} modules" for each in circles) or "none",
        "lines that read written-out forms": f"{sum(lengths[path] for path in forms):,}",
        "private torch names in the adapters": str(sum(private[path] for path in adapters)),
        "private torch names elsewhere, attributes included": ", ".join(f"`{p}` {n}" for p, n in outside.items()) or "none",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier state")
    parser.add_argument("--docs", type=Path, help="write the table there")
    options = parser.parse_args()
    now = measure(Tree(ROOT))
    before = measure(Tree(options.before)) if options.before else {}
    head = ["| | before | now |", "|---|---|---|"] if before else ["| | |", "|---|---|"]
    rows = [f"| {what} | {before[what]} | {value} |" if before else f"| {what} | {value} |" for what, value in now.items()]
    table = "\n".join([*head, *rows])
    print(table)
    if options.docs:
        text = "# The structure of the source, measured\n\n`python -m benchmarks.structure --before CHECKOUT --docs docs/structure.md`"
        # What people wrote below the table stays.
        notes = re.search(r"\n## .*", options.docs.read_text(encoding="utf-8"), re.DOTALL) if options.docs.exists() else None
        options.docs.write_text(f"{text}, {date.today()}\n\n{table}\n{notes[0] if notes else ''}", encoding="utf-8")


if __name__ == "__main__":
    main()
