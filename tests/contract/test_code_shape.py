"""The shape of the code: one thing per class name, short functions and files, few parameters.

Each list of exceptions below states its reason. An exception that is no longer needed fails its test: remove it.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import turnwise
from turnwise.config.files import option_paths
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.runtime.exit_codes import ExitCode

SOURCE = Path(turnwise.__file__).parent
TESTS = Path(__file__).parents[1]
LISTINGS = "contract/listings/"  # other people's programs, as they wrote them
TASK_DATA = "envs/library/swe_repos/"  # repositories that the policy repairs; they are data, not our code
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500
MAX_PARAMETERS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef

SHARED_CLASS_NAMES = {
    "Options": "each method declares its own, inside its class",
}

KERNELS = "kernels get each pointer, stride and size as a parameter of its own"
TINKERS_SIGNATURE = "Tinker's public signature"
WORLD_OPTIONS = "each parameter is an option of the world (`env.options.NAME`) and has a default"
MANY_PARAMETERS = {
    "engine/ops/": KERNELS,
    "client/local.py:create_lora_training_client": TINKERS_SIGNATURE,
    "client/remote.py:create_lora_training_client": TINKERS_SIGNATURE,
    "client/remote.py:__init__": TINKERS_SIGNATURE,
    "envs/adapters/": WORLD_OPTIONS,
    "envs/adapters/verifiers_harness.py": "the signature of the peer's interface",
    "judges/world.py:judged_by_model": WORLD_OPTIONS,
    "training/run.py:train": "the front door: each keyword is an option of a run",
}

MIN_BLOCK_LINES = 6
OF_AN_SDK = "the checks of each SDK are a program that runs in the SDK's own environment"
TO_COPY = "recipes are programs to read and copy; each shows all that it does"
REPEATED_BLOCKS = {
    "src/turnwise/__init__.py ~ tests/contract/test_public_names.py": "the test freezes the list of public names",
    "src/turnwise/methods/grpo.py ~ src/turnwise/methods/gspo.py": "each method's file shows all that the method uses",
    "src/turnwise/recipes/code.py ~ src/turnwise/recipes/": TO_COPY,
    "src/turnwise/recipes/swe.py ~ src/turnwise/recipes/": TO_COPY,
    "src/turnwise/service/wire/schemas.py ~ src/turnwise/types.py": "the protocol's defaults, and our own",
    "tests/backends/in_process_claims.py ~ tests/backends/": "a program in vLLM's own environment, without pytest",
    "tests/contract/sdk/mint_checks.py ~ tests/contract/sdk/tinker_checks.py": OF_AN_SDK,
}

MIN_EQUAL_STATEMENTS = 2
SHOWS_ITS_PLAY = "a world's file shows all of its play"
EQUAL_FUNCTIONS = {
    "bench/step.py:cpu_seconds ~ bench/trl_step.py:cpu_seconds": "a program that runs in TRL's own environment",
    "envs/library/": SHOWS_ITS_PLAY,
}

SPLATS: dict[str, str] = {}

DEVICE_CHECKS = {
    "bench/": "a figure says on which device it was measured",
    "engine/device_info.py": "finds out which device there is, and what memory a GPU has, with torch's names",
}

FILES_OF_OTHERS = {
    "backends/__init__.py turnwise/backends/NAME.py": "NAME stands for the name of a backend",
    "backends/servers/vllm_transfer.py vllm/distributed/weight_transfer/ipc_engine.py": "a file of vLLM",
    "envs/library/swe_patch.py dir/file.py": "a file of the repository that is mended",
}

RIDDLES = (
    *("Of ", "That ", "As ", "Is ", "Where ", "Whose ", "On whose "),
    *("At which ", "In which ", "For which ", "To which "),
)
"""Words with which no docstring begins."""
BLANK = re.compile(r"\bso (?:many|much|few|often)\b(?! that)")
"""Stands in a sentence for a number that the reader has to find: "after so many steps"."""

ENDS_A_PROCESS = "os._exit is Python's name"
PRIVATE_NAMES_IN_TESTS = {
    "contract/sdk/load_client.py": ENDS_A_PROCESS,
    "contract/sdk/runner.py": ENDS_A_PROCESS,
    "warm_zygote.py": ENDS_A_PROCESS,
    "unit/service/test_walk.py": "sys._getframe is Python's name",
}


@cache
def modules() -> dict[str, ast.Module]:
    files = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in files.items() if not name.startswith(TASK_DATA)}


def functions() -> Iterator[tuple[str, Function]]:
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield name, node


def check(offenders: dict[str, str], excused: dict[str, str], rule: str) -> None:
    """Every offender has an excuse, and every excuse an offender. An excuse is the start of an offender's name."""
    unexcused = [f"{name}: {what}" for name, what in offenders.items() if not name.startswith(tuple(excused))]
    assert not unexcused, f"{rule}:\n" + "\n".join(unexcused)
    unused = [excuse for excuse in excused if not any(name.startswith(excuse) for name in offenders)]
    assert not unused, f"nothing needs these exceptions any more, remove them: {unused}"


def offending_functions(describe: Callable[[Function], str | None]) -> dict[str, str]:
    found = {f"{name}:{function.name}": describe(function) for name, function in functions()}
    return {name: what for name, what in found.items() if what is not None}


def num_parameters(function: Function) -> int:
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def private_names(node: ast.AST) -> list[str]:
    """Names with an underscore that a test takes from an object or a module that is not its own."""
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [node.attr] if is_private(node.attr) and not is_own else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turnwise"):
        return [one.name for one in node.names if is_private(one.name)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr"):
        words = [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        return [word for word in words if is_private(word.rpartition(".")[2])]
    return []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_splat(node: ast.AST) -> bool:
    """`f(*(a, b))`, which is `f(a, b)` in a costume."""
    return isinstance(node, ast.Call) and any(
        isinstance(one, ast.Starred) and isinstance(one.value, ast.Tuple | ast.List) for one in node.args
    )


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    repeated = {name: ", ".join(files) for name, files in places.items() if len(files) > 1}
    unexcused = {name: files for name, files in repeated.items() if name not in SHARED_CLASS_NAMES}
    assert not unexcused, f"class names that stand for two things: {unexcused}"
    unused = SHARED_CLASS_NAMES.keys() - repeated.keys()
    assert not unused, f"nothing needs these exceptions any more, remove them: {sorted(unused)}"


def code_lines(path: Path) -> list[str]:
    """The statements of a file, line by line: no imports, signatures, docstrings, comments or lone brackets."""
    text = path.read_text()
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            left_out.update(range(first, node.body[0].lineno))
        is_action = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) and not is_action:
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    kept = [line for number, line in enumerate(lines, start=1) if number not in left_out]
    return [line for line in kept if any(map(str.isalnum, line)) and not line.startswith("#")]


def test_a_block_of_six_lines_stands_once() -> None:
    found: dict[tuple[str, ...], list[str]] = defaultdict(list)
    data = (str(SOURCE / TASK_DATA), str(TESTS / LISTINGS))
    for path in sorted([*SOURCE.rglob("*.py"), *TESTS.rglob("*.py")]):
        if not str(path).startswith(data):
            lines = code_lines(path)
            for first in range(len(lines) - MIN_BLOCK_LINES + 1):
                block = tuple(lines[first : first + MIN_BLOCK_LINES])
                found[block].append(str(path.relative_to(TESTS.parent)))
    repeated = {
        f"{one} ~ {other}": block[0]
        for block, places in found.items()
        for one, other in itertools.combinations(places, 2)
    }
    check(repeated, REPEATED_BLOCKS, f"blocks of {MIN_BLOCK_LINES} equal lines that stand in two places")


def body_with_plain_names(function: Function) -> tuple[str, int]:
    """The body without its docstring, with arguments and local variables numbered, and the number of its statements."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    own = dict.fromkeys([*(one.arg for one in arguments), *(node.id for node in stored)])
    numbered = {name: f"v{number}" for number, name in enumerate(own)}
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    copied = ast.parse("\n".join(ast.unparse(node) for node in body))
    for node in ast.walk(copied):
        if isinstance(node, ast.Name):
            node.id = numbered.get(node.id, node.id)
    return ast.unparse(copied), len(body)


def test_a_function_stands_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, function in functions():
        body, num_statements = body_with_plain_names(function)
        if num_statements >= MIN_EQUAL_STATEMENTS:
            places[body].append(f"{name}:{function.name}")
    equal = {
        f"{one} ~ {other}": body.splitlines()[0]
        for body, found in places.items()
        for one, other in itertools.combinations(found, 2)
        if one.partition(":")[0] != other.partition(":")[0]
    }
    check(equal, EQUAL_FUNCTIONS, "functions of several statements that are equal but for the names of their variables")


def imported_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """What a module imports when it is loaded; imports for annotations and inside functions do not count."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Try):
            yield from imported_names(node.body)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported_names([*node.body, *node.orelse])


def test_no_module_imports_itself_through_others() -> None:
    dotted = {name: f"turnwise.{name[:-3].replace('/', '.')}".removesuffix(".__init__") for name in modules()}
    known = set(dotted.values()) - {"turnwise"}  # the package itself holds names that are looked up later
    graph: dict[str, set[str]] = {}
    for name, module in modules().items():
        imported = {one if one in known else one.rpartition(".")[0] for one in imported_names(module.body)}
        graph[dotted[name]] = imported & known
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the modules
    assert len(order) >= len(known)


def test_a_function_fits_on_a_screen() -> None:
    def describe(function: Function) -> str | None:
        length = (function.end_lineno or 0) - function.lineno + 1
        return f"{length} lines" if length > MAX_FUNCTION_LINES else None

    check(offending_functions(describe), {}, f"functions of more than {MAX_FUNCTION_LINES} lines")


def test_a_file_is_short_enough_to_read() -> None:
    lengths = {name: len((SOURCE / name).read_text().splitlines()) for name in modules()}
    too_long = {name: f"{count} lines" for name, count in lengths.items() if count > MAX_FILE_LINES}
    check(too_long, {}, f"files of more than {MAX_FILE_LINES} lines")


def test_a_function_takes_few_parameters() -> None:
    def describe(function: Function) -> str | None:
        count = num_parameters(function)
        return f"{count} parameters; group them in a value object" if count > MAX_PARAMETERS else None

    check(offending_functions(describe), MANY_PARAMETERS, f"functions with more than {MAX_PARAMETERS} parameters")


def asks_for_device(node: ast.AST, *, is_in_engine: bool) -> bool:
    """Reads `device.type` or `is_cuda`, calls `torch.cuda`, or compares something with a device's name."""
    if isinstance(node, ast.Attribute):
        is_of_device = isinstance(node.value, ast.Name | ast.Attribute) and ast.unparse(node.value).endswith("device")
        is_type = node.attr in ("type", "kind") and is_of_device
        is_read = is_type and is_in_engine  # elsewhere a plan or a message may name the device
        return is_read or node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) == "torch.cuda"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        names = {one.value for one in sides if isinstance(one, ast.Constant)}
        is_of_device = any(isinstance(one, ast.Attribute) and one.attr in ("type", "kind") for one in sides)
        return "cuda" in names or ("cpu" in names and is_of_device)  # `engine.device` may be compared with cpu
    return False


def test_only_ops_know_which_device_they_run_on() -> None:
    found = {
        f"{name}:{node.lineno}": ast.unparse(node)[:80]
        for name, module in modules().items()
        if not name.startswith("engine/ops/")
        for node in ast.walk(module)
        if isinstance(node, ast.expr) and asks_for_device(node, is_in_engine=name.startswith("engine/"))
    }
    check(found, DEVICE_CHECKS, "ask `ops.for_device(device)`, or its facts, in place of the device's type")


def test_arguments_are_written_out() -> None:
    found = {
        f"{name}:{node.lineno}": ast.unparse(node)[:80]
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and is_splat(node)
    }
    check(found, SPLATS, "calls that unpack a tuple which they have just written")


def test_a_docstring_says_what_it_describes() -> None:
    # "Of the MLP." is a riddle; "Width of the MLP's hidden layer." is not.
    riddles = {
        f"{name}:{node.lineno}": node.value.value[:60]
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.startswith(RIDDLES) or BLANK.search(node.value.value)
    }
    check(riddles, {}, f"docstrings that begin with {', '.join(RIDDLES)}, or leave a number out ({BLANK.pattern})")


def test_a_file_or_a_module_that_the_code_names_is_there() -> None:
    is_option = set(option_paths()).__contains__
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    stale: dict[str, str] = {}
    for name in modules():
        text = (SOURCE / name).read_text(encoding="utf-8")
        for file in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            if not any((place / file).is_file() for place in (SOURCE / name).parents):
                stale[f"{name} {file}"] = "no such file"
        for room, module in re.findall(r"`(?:turnwise\.)?([a-z_]+)\.([a-z_]+)`", text):
            is_there = (SOURCE / room / f"{module}.py").is_file() or (SOURCE / room / module).is_dir()
            is_file_name = module in ("py", "json")
            if room in rooms - {"config"} and not (is_there or is_file_name or is_option(f"{room}.{module}")):
                stale[f"{name} {room}.{module}"] = "no such module or option"
    check(stale, FILES_OF_OTHERS, "names of files and modules that are not there")


def test_the_names_of_an_adapters_files_are_written_once() -> None:
    found = {
        f"{name}:{node.lineno}": node.value
        for name, module in modules().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and node.value in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    }
    check(found, {"models/directories.py": "their home"}, "file names of PEFT's; `models.directories` has them")


def test_a_command_ends_with_an_exit_code_that_has_a_name() -> None:
    found = {
        f"{name}:{node.lineno}": ast.unparse(node)
        for name, module in modules().items()
        if name == "cli.py" or name.startswith("commands/")
        for node in ast.walk(module)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and type(node.value.value) is int
        if node.value.value != ExitCode.OK
    }
    check(found, {}, "commands that return a bare number; `runtime/exit_codes.py` has the names")


def test_tests_use_public_names() -> None:
    found: dict[str, str] = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if not name.startswith(LISTINGS):
            for node in ast.walk(ast.parse(path.read_text())):
                found |= {f"{name}:{getattr(node, 'lineno', 0)}": private for private in private_names(node)}
    check(found, PRIVATE_NAMES_IN_TESTS, "tests that reach into private names")
