"""The shape of the code base: direction of imports, sizes, and the README's map of the tree."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("backend", "kernels", "build", "client_examples", "tests", "model_repository")
MAX_FILE_LINES = 400
MAX_DEVICE_FILE_LINES = 800  # a kernel reads better whole than in ten headers
DEVICE_SUFFIXES = {".cu", ".cuh"}
MAX_FUNCTION_LINES = 60
MAX_KERNEL_OR_TEST_LINES = 150

# package prefix -> project packages that it may import
ALLOWED = {
    "slipstream.core": {"slipstream.core"},
    "slipstream.nn": {"slipstream.core", "slipstream.nn", "slipstream_kernels"},
    "slipstream.tokenizer": {"slipstream.core", "slipstream.tokenizer"},
    "slipstream.protocol": {"slipstream.core", "slipstream.protocol"},
    "slipstream.worker": {f"slipstream.{name}" for name in ("core", "tokenizer", "nn", "worker")}
    | {"slipstream_kernels"},
    "slipstream.engine": {
        f"slipstream.{name}" for name in ("core", "protocol", "tokenizer", "tracing", "nn", "worker", "engine")
    }
    | {"slipstream_kernels"},
    "slipstream.processors": {"slipstream.worker", "slipstream.processors"},
    "slipstream.tracing": {"slipstream.core", "slipstream.tracing"},
    "slipstream.server": {f"slipstream.{name}" for name in ("core", "tokenizer", "tracing", "server")},
    "slipstream.encoders": {"slipstream.core", "slipstream.encoders"},
    "slipstream_kernels": {"slipstream_kernels"},
}
HEAVY = {"torch", "transformers"}  # of which the gateway knows nothing
STDLIB_ONLY = "slipstream.core"
CLIENT_PACKAGES = {"tritonclient", "numpy", "google", "grpc"}


@functools.cache
def python_files() -> list[Path]:
    return sorted(path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return ".".join(relative.with_suffix("").parts[1:]).removesuffix(".__init__")


@functools.cache
def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or "slipstream_kernels" in str(path), f"{path}: relative import"
            if node.level == 0 and node.module:
                names.add(node.module)
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def package_files(prefix: str) -> list[Path]:
    return [
        p
        for p in python_files()
        if p.parts[len(ROOT.parts)] in ("backend", "kernels") and (module_name(p) + ".").startswith(prefix + ".")
    ]


@pytest.mark.parametrize("prefix", ALLOWED)
def test_imports_go_one_way(prefix: str) -> None:
    files = package_files(prefix)
    assert files, f"no files under {prefix}"
    for path in files:
        ours = {name for name in imports_of(path) if name.split(".")[0] in ("slipstream", "slipstream_kernels")}
        bad = {n for n in ours if n != "slipstream" and not any((n + ".").startswith(a + ".") for a in ALLOWED[prefix])}
        assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def imported_to_run(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """The imports of a module and of its functions, but those for types alone and those of its own command."""
    for node in ast.iter_child_nodes(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.ImportFrom):
            yield node
        elif not is_for_types and getattr(node, "name", "") != "_main":
            yield from imported_to_run(node)


def test_imports_make_no_circle() -> None:
    """What a module needs to run can be read before it. moe.kernels: a product by weights that it has written out is
    one of these products again."""
    paths = {module_name(path): path for path in [*package_files("slipstream"), *package_files("slipstream_kernels")]}
    needs: dict[str, set[str]] = {}
    for name, path in paths.items():
        nodes = [node for node in imported_to_run(ast.parse(path.read_text())) if node.module]
        named = {(str(node.module), f"{node.module}.{alias.name}") for node in nodes for alias in node.names}
        needs[name] = {inner if inner in paths else outer for outer, inner in named} & (paths.keys() - {name})
    needs["slipstream_kernels.moe.kernels"].remove("slipstream_kernels.moe.grouped_mm")
    while free := {name for name, others in needs.items() if not others & needs.keys()}:
        needs = {name: others for name, others in needs.items() if name not in free}
    assert not {name: sorted(others & needs.keys()) for name, others in needs.items()}


def test_kernels_are_imported_by_one_door() -> None:
    """Sums over ranks are no op; `doctor` looks at what builds kernels."""
    exceptions = {"slipstream.worker.symmetric_memory", "slipstream.commands.examinations"}
    for path in package_files("slipstream"):
        if module_name(path) not in exceptions:
            inside = {name for name in imports_of(path) if name.startswith("slipstream_kernels.")}
            bad = {name for name in inside if not f"{name}.".startswith("slipstream_kernels.ops.")}
            assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def test_core_is_standard_library_only() -> None:
    import sys

    for path in package_files(STDLIB_ONLY):
        foreign = {n.split(".")[0] for n in imports_of(path)} - set(sys.stdlib_module_names) - {"slipstream"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_the_gateway_stands_alone() -> None:
    """It runs where there is no PyTorch, and only the command line starts it."""
    for path in package_files("slipstream.server"):
        foreign = {name.split(".")[0] for name in imports_of(path)} & HEAVY
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"
    for path in package_files("slipstream"):
        if not module_name(path).startswith(("slipstream.server", "slipstream.commands")):
            assert not {n for n in imports_of(path) if n.startswith("slipstream.server")}, path.relative_to(ROOT)


def test_nothing_of_the_package_imports_the_encoders() -> None:
    for path in package_files("slipstream"):
        if not module_name(path).startswith("slipstream.encoders"):
            assert not {n for n in imports_of(path) if n.startswith("slipstream.encoders")}, path.relative_to(ROOT)


def test_only_the_grammar_processes_import_xgrammar() -> None:
    """They are started by name (engine/grammar_link.py), so that nothing that the engine imports leads there."""
    names = ("structural_tags", "grammar_compiler", "grammar_worker", "grammar_process")
    inside = {f"slipstream.engine.{name}" for name in names}
    for path in [*package_files("slipstream"), *package_files("slipstream_kernels")]:
        if module_name(path) not in inside:
            bad = {name for name in imports_of(path) if name in inside or name.split(".")[0] == "xgrammar"}
            assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def test_client_examples_import_only_tritonclient() -> None:
    import sys

    for path in sorted((ROOT / "client_examples").glob("*.py")):
        foreign = {n.split(".")[0] for n in imports_of(path)} - set(sys.stdlib_module_names) - CLIENT_PACKAGES
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_nothing_imports_tests_or_build() -> None:
    for path in python_files():
        if path.relative_to(ROOT).parts[0] in ("backend", "kernels", "client_examples"):
            bad = {n for n in imports_of(path) if n.split(".")[0] in ("tests", "build")}
            assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}"


def test_files_are_short() -> None:
    suffixes = {".py", ".cc", ".h", *DEVICE_SUFFIXES}
    files = [p for folder in SOURCE_FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    assert any(p.suffix in DEVICE_SUFFIXES for p in files)
    lengths = {p: len(p.read_text().splitlines()) for p in files}
    limits = {p: MAX_DEVICE_FILE_LINES if p.suffix in DEVICE_SUFFIXES else MAX_FILE_LINES for p in files}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > limits[p]} == {}


def test_functions_are_short() -> None:
    too_long = []
    for path in python_files():
        parts = path.relative_to(ROOT).parts
        is_kernel_or_test = parts[0] in ("kernels", "tests")
        limit = MAX_KERNEL_OR_TEST_LINES if is_kernel_or_test else MAX_FUNCTION_LINES
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.name} has {length} lines")
    assert not too_long


def test_cpp_functions_are_short() -> None:
    """A definition ends with a lone brace in column 0 and begins with the last text before it in column 0."""
    lengths = {}
    for path in (ROOT / "backend" / "triton").glob("*.cc"):
        begin, name = 0, ""
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line == "}":
                lengths[f"{path.name}:{begin} {name}"] = number - begin + 1
            elif re.match(r"[A-Za-z\[]", line):
                begin, name = number, line
    assert len(lengths) > 100
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def test_docstrings_of_dataclasses_name_fields_that_exist() -> None:
    """What a line or a sentence describes as `name: ` or `name, name: ` are fields, methods or their arguments."""
    described, strangers = 0, []
    for path in (path for path in python_files() if "@dataclass" in path.read_text()):
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        for node in (c for c in classes if any("dataclass" in ast.unparse(d) for d in c.decorator_list)):
            lists = re.findall(r"(?:^|\. )([a-z_]\w*(?:, [a-z_]\w*)*):(?= |$)", ast.get_docstring(node) or "", re.M)
            named = {name for names in lists for name in names.split(", ")}
            inside = [part for statement in node.body for part in ast.walk(statement)]
            own = {part.name for part in inside if isinstance(part, ast.FunctionDef)}
            own |= {part.arg for part in inside if isinstance(part, ast.arg)}
            own |= {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
            described += len(named)
            strangers += [f"{path.relative_to(ROOT)}: {node.name} has no {name}" for name in sorted(named - own)]
    assert described > 150 and not strangers


def test_readme_names_only_paths_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"## The tree\n+```\n(.*?)```", readme, re.S)
    assert tree, "README has no '## The tree' block"
    missing = []
    for line in tree.group(1).splitlines():
        match = re.match(r"^([\w./-]+)", line)
        if match and not (ROOT / match.group(1)).exists():
            missing.append(match.group(1))
    folders = "backend|kernels|build|docs|model_repository|client_examples|models|tests"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", readme)
    missing += [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_readme_names_every_package_and_family_of_kernels() -> None:
    readme, package, kernels = (ROOT / "README.md").read_text(), ROOT / "backend/slipstream", ROOT / "kernels"
    folders = [path.parent.name for path in package.glob("*/*.py")] + ["processors.py", "tracing.py"]
    assert not {name for name in folders if f"\nbackend/slipstream/{name} " not in readme}
    line = re.search(r"^kernels/slipstream_kernels +by family: ([\w, ]+);", readme, re.M)
    families = {path.parents[1].name for path in (kernels / "slipstream_kernels").glob("*/*/*.py")} - {"csrc"}
    assert line and set(line.group(1).split(", ")) == families


def test_documents_name_only_paths_that_exist() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"docs/{page.name} links to {target}"
