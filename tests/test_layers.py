"""The direction of imports, read from the source with `ast`.

A module belongs to a part, a part to a layer. An import may go to a lower layer, or stay inside its
part; inside the pure layer parts may also import one another, as long as they form no cycle.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

GROUND, INTERFACES, PURE, PART, ORCHESTRATOR, COMMAND = range(6)

# (prefix, layer, part); the longest prefix that fits wins, so that a pure module of a package that
# is a part (the loss, the layout table) can be told from the rest of it.
MODULES: list[tuple[str, int, str]] = [
    ("kernels", GROUND, "kernels"),
    ("telescope_jax.types", GROUND, "types"),
    ("telescope_jax.config", GROUND, "config"),
    ("telescope_jax.config_rules", GROUND, "config"),
    ("telescope_jax.config_tree", GROUND, "config"),
    ("telescope_jax.flags", GROUND, "config"),
    ("telescope_jax.extras", GROUND, "extras"),
    ("telescope_jax.interfaces", INTERFACES, "interfaces"),
    ("telescope_jax.staleness", PURE, "staleness"),
    ("telescope_jax.ledger", PURE, "ledger"),
    ("telescope_jax.chat", PURE, "chat"),
    ("telescope_jax.hf_tokenizer", PURE, "chat"),
    ("telescope_jax.scoring", PURE, "scoring"),
    ("telescope_jax.packing", PURE, "packing"),
    ("telescope_jax.assembly", PURE, "assembly"),
    ("telescope_jax.sharding", PURE, "sharding"),
    ("telescope_jax.log_lines", PURE, "log_lines"),
    ("telescope_jax.orbax_saves", PURE, "orbax_saves"),
    ("telescope_jax.tensorstore_json", PURE, "orbax_saves"),
    ("telescope_jax.model", PURE, "model"),
    ("telescope_jax.learner.loss", PURE, "loss"),
    ("telescope_jax.learner.objectives", PURE, "loss"),
    ("telescope_jax.learner.settings", PURE, "loss"),
    ("telescope_jax.weights.hf_layout", PURE, "hf_layout"),
    ("telescope_jax.envs", PART, "envs"),
    ("telescope_jax.prompts", PART, "prompts"),
    ("telescope_jax.rollouts", PART, "rollouts"),
    ("telescope_jax.learner", PART, "learner"),
    ("telescope_jax.weights", PART, "store"),
    ("telescope_jax.inference", PART, "inference"),
    # Runs in vLLM's processes, where it is what main is in ours.
    ("telescope_jax.inference.vllm_plugin", COMMAND, "vllm_plugin"),
    ("telescope_jax.evals", PART, "evals"),
    ("telescope_jax.metrics", PART, "metrics"),
    ("telescope_jax.console", PART, "metrics"),
    ("telescope_jax.plots", PART, "metrics"),
    ("telescope_jax.timeline", PART, "metrics"),
    ("telescope_jax.dashboard", PART, "metrics"),
    ("telescope_jax.attempts", ORCHESTRATOR, "orchestrator"),
    ("telescope_jax.due_evals", PURE, "due_evals"),
    ("telescope_jax.changed", PURE, "changed"),
    ("telescope_jax.spans", PURE, "spans"),
    ("telescope_jax.watchdog", PURE, "watchdog"),
    ("telescope_jax.loop_guard", PURE, "watchdog"),
    ("telescope_jax.allocator", PURE, "watchdog"),
    ("telescope_jax.signals", PURE, "signals"),
    ("telescope_jax.orchestrator", ORCHESTRATOR, "orchestrator"),
    ("telescope_jax.workdir", PART, "workdir"),
    ("telescope_jax.main", COMMAND, "main"),
    ("telescope_jax.run", COMMAND, "main"),
    ("telescope_jax.run_checkpoints", COMMAND, "main"),
    ("telescope_jax.report", COMMAND, "main"),
    ("telescope_jax.setup", COMMAND, "main"),
    ("telescope_jax.pretrained", COMMAND, "main"),
    ("telescope_jax.hosts", COMMAND, "main"),
    ("telescope_jax.serve", COMMAND, "main"),
    ("telescope_jax.eval", COMMAND, "eval"),
    ("telescope_jax.export", COMMAND, "export"),
    ("telescope_jax.plan", COMMAND, "main"),
    ("telescope_jax.hlo", GROUND, "hlo"),
    ("telescope_jax.grid", GROUND, "grid"),
    ("telescope_jax.sweep", COMMAND, "sweep"),
    ("telescope_jax.sweep_points", COMMAND, "sweep"),
    ("telescope_jax.sweep_table", COMMAND, "sweep"),
]

HOUSE = ("telescope_jax", "kernels", "experiments", "tests")
KERNELS_MAY_IMPORT = {"jax", "numpy", "jaxtyping", "kernels"}
HOST_ONLY = ("telescope_jax.envs", "telescope_jax.attempts", "telescope_jax.orchestrator")
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "vllm", "torch"}
KNOW_VLLM = {"telescope_jax.inference.vllm_server", "telescope_jax.inference.vllm_plugin"}
BANNED_STEMS = {"utils", "util", "helpers", "helper", "managers", "manager", "common", "misc"}


class Import(NamedTuple):
    module: str
    line: int


class Place(NamedTuple):
    layer: int
    part: str


def imports(source: str, module: str, *, is_package: bool, known: set[str]) -> Iterator[Import]:
    """Every module that `source` imports, wherever in the file, relative names resolved."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                # `from package import module` imports the module, not an attribute.
                whole = f"{base}.{alias.name}"
                yield Import(whole if whole in known else base, node.lineno)


def place(module: str) -> Place | None:
    fitting = [row for row in MODULES if module == row[0] or module.startswith(row[0] + ".")]
    if not fitting:
        return None
    _, layer, part = max(fitting, key=lambda row: len(row[0]))
    return Place(layer, part)


def complaints(sources: dict[str, tuple[str, bool]]) -> list[str]:
    """What is wrong with these modules: name -> (source, is it a package's __init__)."""
    found: list[str] = []
    known = set(sources)
    pure_edges: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        found_here = imports(source, module, is_package=is_package, known=known)
        for target, line in dict.fromkeys(found_here):
            where, top = f"{module}:{line}", target.split(".")[0]
            if module.startswith("kernels") and not (
                top in KERNELS_MAY_IMPORT or top in sys.stdlib_module_names
            ):
                found.append(f"{where} imports {target}; kernels import jax only")
            if module.startswith(HOST_ONLY) and top in DEVICE_LIBRARIES:
                found.append(f"{where} imports {target}; this module runs without an accelerator")
            if top == "vllm" and module not in KNOW_VLLM:
                found.append(f"{where} imports {target}; only {sorted(KNOW_VLLM)} know vLLM")
            if top in ("experiments", "tests"):
                found.append(f"{where} imports {target}; the product knows no {top}")
            source_place, target_place = place(module), place(target)
            if source_place is None or target_place is None:
                if top in HOUSE and target not in ("telescope_jax", "kernels"):
                    found.append(f"{where} imports {target}; add both to MODULES of this test")
                continue
            if source_place.part == target_place.part or target_place.layer < source_place.layer:
                continue
            if target_place.layer == source_place.layer == PURE:
                pure_edges.setdefault(source_place.part, set()).add(target_place.part)
                continue
            way = "upward" if target_place.layer > source_place.layer else "sideways"
            found.append(f"{where} imports {target}: {way} ({source_place} -> {target_place})")
    return found + [f"pure parts import in a cycle: {' -> '.join(c)}" for c in cycles(pure_edges)]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """One path for each node from which a walk comes back to it."""
    found = []
    for start in edges:
        stack = [[start]]
        seen: set[str] = set()
        while stack:
            path = stack.pop()
            for target in edges.get(path[-1], ()):
                if target == start:
                    found.append([*path, target])
                elif target not in seen:
                    seen.add(target)
                    stack.append([*path, target])
    return found


def read(*packages: str) -> dict[str, tuple[str, bool]]:
    modules = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = (path.read_text(encoding="utf-8"), is_package)
    return modules


def test_every_import_goes_downward():
    assert complaints(read("telescope_jax", "kernels")) == []


def test_every_module_has_a_place():
    homeless = [
        name
        for name in read("telescope_jax", "kernels")
        if name != "telescope_jax" and place(name) is None
    ]
    assert homeless == [], "add these to MODULES"


def test_experiments_know_the_config_and_nothing_deeper():
    studies = {
        name: text
        for name, text in read("experiments").items()
        if name.count(".") == 1  # benchmarks/ and launch/ drive the parts themselves
    }
    assert studies
    for name, (source, is_package) in studies.items():
        for target, line in imports(source, name, is_package=is_package, known=set()):
            if target.split(".")[0] in HOUSE:
                assert target == "telescope_jax.config", f"{name}:{line} imports {target}"


def test_oracles_import_neither_package():
    for name, (source, is_package) in read("tests/oracles").items():
        for target, line in imports(source, name, is_package=is_package, known=set()):
            assert target.split(".")[0] not in ("telescope_jax", "kernels"), (
                f"{name}:{line} imports {target}: an oracle that shares code proves nothing"
            )


def test_no_module_is_called_utils():
    names = [name for name in read("telescope_jax", "kernels", "experiments", "tests")]
    assert [name for name in names if name.rpartition(".")[2] in BANNED_STEMS] == []


def test_no_class_is_a_manager():
    banned = ("Manager", "Helper", "Helpers", "Base", "Utils")
    found = []
    for name, (source, _) in read("telescope_jax", "kernels").items():
        classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
        found += [f"{name}.{c.name}" for c in classes if c.name.endswith(banned)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("telescope_jax.envs.sums", "from telescope_jax.rollouts import group", "sideways"),
        ("telescope_jax.envs.sums", "from ..rollouts import group", "sideways"),
        ("telescope_jax.packing", "import telescope_jax.orchestrator", "upward"),
        ("telescope_jax.types", "from telescope_jax.interfaces import Engine", "upward"),
        ("telescope_jax.types", "from telescope_jax.config import Config", "sideways"),
        ("telescope_jax.learner.loss", "from telescope_jax.learner import step", "upward"),
        ("telescope_jax.weights.hf_layout", "from . import store", "upward"),
        ("telescope_jax.envs.sums", "def f():\n    import jax.numpy", "without an accelerator"),
        ("telescope_jax.orchestrator", "from vllm import LLM", "without an accelerator"),
        ("telescope_jax.inference.pool", "import vllm", "know vLLM"),
        ("kernels.logprob.api", "import flax", "jax only"),
        ("kernels.logprob.api", "from telescope_jax import types", "jax only"),
        ("telescope_jax.evals", "from tests.oracles import loss", "knows no tests"),
        ("telescope_jax.evals", "from telescope_jax.novelty import x", "MODULES"),
    ],
)
def test_a_wrong_import_is_reported(module: str, source: str, words: str):
    others = dict.fromkeys(
        (
            "telescope_jax.rollouts.group",
            "telescope_jax.learner.step",
            "telescope_jax.weights.store",
        ),
        ("", False),
    )
    (complaint, *_) = complaints({module: (source, False), **others})
    assert words in complaint and module in complaint


def test_downward_imports_are_not_reported():
    sources = {
        "telescope_jax.learner.step": ("from telescope_jax.learner.loss import policy", False),
        "telescope_jax.learner.loss": ("import jax\nfrom kernels.logprob import api", False),
        "telescope_jax.orchestrator": ("from telescope_jax import evals, staleness", False),
        "telescope_jax.model.decoder": ("from telescope_jax.sharding import rules", False),
        "kernels.logprob.api": ("import functools\nimport jax\nfrom . import reference", False),
        "telescope_jax.inference.vllm_server": ("import vllm", False),
    }
    assert complaints(sources) == []


def test_a_cycle_of_pure_parts_is_reported():
    sources = {
        "telescope_jax.packing": ("from telescope_jax import scoring", False),
        "telescope_jax.scoring": ("from telescope_jax.chat import render", True),
        "telescope_jax.chat": ("from telescope_jax.packing import pack", False),
    }
    assert any("cycle" in complaint for complaint in complaints(sources))
