"""The command line: everything wrong at once, exit code 2, before jax is imported."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_jax import config_tree, flags
from telescope_jax.config import Config, ConfigError
from tests.toy_config import Toy

ROOT = Path(__file__).resolve().parents[1]
MATH = f"--config={ROOT / 'experiments/math.py'}"


def parse(*argv: str) -> flags.Arguments:
    return flags.parse(["main", *argv])


def config_of(*argv: str) -> Config:
    return parse(MATH, *argv).config


def refused(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        flags.read(["main", *argv])
    return str(caught.value).splitlines()


def study(path: Path, body: str) -> str:
    lines = ["from telescope_jax.config import Config", "def get_config(arg=''):"]
    path.write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]))
    return f"--config={path}"


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--config.seed=7"], "seed", 7),
        (["--config.seed", "7"], "seed", 7),
        (["-config.seed=7"], "seed", 7),
        (["--config.number_of_steps=1e3"], "number_of_steps", 1000),
        (["--config.max_off_policy_steps", "-1"], "max_off_policy_steps", -1),
        (["--config.optimizer.learning_rate=1"], "optimizer.learning_rate", 1.0),
        (["--config.optimizer.learning_rate=1e-6"], "optimizer.learning_rate", 1e-6),
        (["--config.tis_cap=inf"], "tis_cap", float("inf")),
        (["--config.use_tis=no"], "use_tis", False),
        (["--config.use_tis", "false"], "use_tis", False),
        (["--noconfig.use_tis"], "use_tis", False),
        (["--config.loss.mask_truncated"], "loss.mask_truncated", True),
        (["--config.loss.mask_truncated", "--workdir=x"], "loss.mask_truncated", True),
        (["--config.algorithm=rloo"], "algorithm", "rloo"),
        (["--config.env.name=reasoning_gym:chain_sum"], "env.name", "reasoning_gym:chain_sum"),
    ],
)
def test_an_override_reaches_its_field_with_its_type(argv: list[str], path: str, value: object):
    found = config_tree.get_value(config_of(*argv), path)
    assert found == value and type(found) is type(value)


def test_what_is_not_overridden_is_the_studys():
    config = config_of("--config.seed=7")
    config.seed = 0
    from experiments.math import get_config

    assert config == get_config()


def test_a_variant_reaches_get_config(tmp_path: Path):
    given = study(tmp_path / "s.py", "return Config(seed=int(arg))")
    arguments = parse(f"{given}:41")
    assert arguments.config.seed == 41 and arguments.config_file.endswith("s.py:41")


def test_flags_of_the_command_come_back_typed():
    extra = {"version": flags.Flag(-1, "Version to export."), "dry": flags.Flag(False, "")}
    arguments = flags.parse(["export", MATH, "--workdir", "runs/a", "--version=3", "--dry"], extra)
    assert arguments.workdir == "runs/a"
    assert arguments.extra == {"version": 3, "dry": True}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        # CF-01: a misspelt key must not train with the default.
        ("--config.learing_rate=1e-3", "did you mean --config.optimizer.learning_rate"),
        ("--config.optimizer.learing_rate=1e-3", "did you mean --config.optimizer.learning_rate"),
        ("--config.max_async=1", "--config.max_async_rollout"),
        ("--wrokdir=x", "did you mean --workdir"),
        ("--seed=1", "did you mean --config.seed"),
        ("config.seed=1", "did you mean --config.seed=1"),
        ("--confg=x.py", "did you mean --config"),
        # CF-06
        ("--config.number_of_steps=1.5", "--config.number_of_steps=1.5 is not a whole number"),
        ("--config.sampling.temperature=hot", "is not a number"),
        ("--config.tis_cap=nan", "is not a number"),
        ("--config.use_tis=maybe", "is not true or false"),
        # CF-08
        ("--config.algorithm=grop", "one of grpo, dr_grpo, rloo"),
        ("--config.algorithm=grop", "did you mean grpo"),
        ("--config.policy.compute_dtype=bf61", "one of float32, bfloat16"),
        ("--config.batch=8", "group of fields, set one of them: --config.batch.seq_len"),
        ("--config.seed.x=8", "--config.seed is a whole number"),
        ("--config.seed", "needs a value"),
        ("--config.seed --config.group_size=4", "--config.seed needs a value"),
        ("--config.seed=1 --config.seed=2", "already given as --config.seed=1"),
        ("--config.seed=1 --config.seed 1", "already given"),
        ("--workdir=a --workdir=b", "already given as --workdir=a"),
        ("--config.group_size=1", "set group_size to 2 or more"),
        ("stray", "'stray' is not a flag"),
    ],
)
def test_a_wrong_command_line_names_the_flag_and_the_remedy(argv: str, words: str):
    (line,) = refused(MATH, *argv.split())
    assert words in line


def test_all_problems_are_in_one_message():
    lines = refused(
        MATH,
        "--config.learing_rate=1",
        "--config.algorithm=grop",
        "--config.seed=x",
        "--wrokdir=y",
        "--config.group_size=1",
        "--config.mesh.data=3",
    )
    expected = ["learing_rate", "grop", "seed=x", "wrokdir", "group_size=1", "multiple of 3"]
    assert len(lines) == len(expected)
    assert all(words in line for words, line in zip(expected, lines, strict=True))


def test_a_missing_config_is_a_problem_beside_the_others():
    lines = refused("--config.seed=x")
    assert len(lines) == 2 and "--config is missing" in lines[1]
    assert "needs a value" in refused("--config")[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("config = Config()\nconfig.max_asinc = 1\nreturn config", "line 4: AttributeError"),
        ("config = Config()\nconfig.max_asinc = 1\nreturn config", "mean max_async_rollout"),
        ("return Config(max_asinc=1)", "line 3: TypeError"),
        ("return 1 / 0", "line 3: ZeroDivisionError"),
        ("raise ValueError('one\\ntwo')", "line 3: ValueError: one two"),
        ("open('/nonexistent/file')", "line 3: FileNotFoundError"),
        ("import nonexistent_module", "line 3: ModuleNotFoundError"),
        ("return (", "SyntaxError"),
        ("Config()", "does it end in `return config`?"),
        ("return {'seed': 1}", "returned a builtins.dict, not a Config"),
        ("c = Config()\nc.seed = 1.5\nreturn c", "seed is 1.5 (float), not a whole number"),
        ("c = Config()\nc.sampling.temperature = '0.7'\nreturn c", "is '0.7' (str), not a number"),
        ("c = Config()\nc.use_tis = 1\nreturn c", "use_tis is 1 (int), not true or false"),
        ("c = Config()\nc.algorithm = 'grop'\nreturn c", "one of grpo"),
        ("c = Config()\nc.batch = 8\nreturn c", "batch is 8, not a BatchConfig"),
        ("c = Config()\nc.group_size = 1\nreturn c", "set group_size to 2 or more"),
    ],
)
def test_a_broken_study_is_one_line_without_a_traceback(tmp_path: Path, body: str, words: str):
    (line,) = refused(study(tmp_path / "s.py", body))
    assert words in line and "Traceback" not in line


def test_a_whole_number_in_a_study_becomes_a_float_where_one_is_asked(tmp_path: Path):
    given = study(tmp_path / "s.py", "c = Config()\nc.tis_cap = 3\nreturn c")
    assert type(parse(given).config.tis_cap) is float


def test_an_unreadable_study_is_a_problem(tmp_path: Path):
    (tmp_path / "math.py").touch()
    (line,) = refused(f"--config={tmp_path / 'mth.py'}")
    assert "No such file" in line and f"did you mean {tmp_path / 'math.py'}" in line
    (line,) = refused(f"--config={tmp_path}")
    assert "Is a directory" in line
    (line,) = refused(f"--config={tmp_path / 'math.py'}")
    assert "get_config" in line


def test_print_config_reads_back_to_an_equal_tree(capsys: pytest.CaptureFixture[str]):
    """CF-03: the printed tree is a command line that gives the same tree."""
    odd = ["--config.tis_cap=inf", "--config.seed=3", "--config.env.name=a 'b' \"c\" $d"]
    with pytest.raises(SystemExit) as ended:
        parse(MATH, *odd, "--print_config")
    assert ended.value.code == 0
    printed = shlex.split(capsys.readouterr().out)
    assert parse(*printed).config == config_of(*odd)
    assert len(printed) == 1 + len(config_tree.leaves(Config))


def test_containers_and_none_go_through_the_command_line(tmp_path: Path):
    """CF-03, CF-04: empty tuples and lists, None, nested and integer-keyed dicts."""
    path = tmp_path / "toy.py"
    path.write_text("from tests.toy_config import Toy\ndef get_config():\n    return Toy(a=(9,))\n")
    for toy in (Toy(), Toy(a=(1, 2), b=[3], c=["x y"], d=("q",), name="n", mode="off", flag=True)):
        argv = ["main", f"--config={path}", *map(shlex.split, config_tree.overrides(toy))]
        flat = [arg if isinstance(arg, str) else arg[0] for arg in argv]
        arguments, _ = flags.read(flat, root=Toy)
        assert arguments.config == toy


def test_help_lists_every_field_with_its_default_and_docstring(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for path, leaf in config_tree.leaves(Config).items():
        text = config_tree.format_value(leaf.default, leaf.hint) or '""'
        doc = " ".join(config_tree.docstrings(leaf.owner)[path.rpartition(".")[2]].split())
        assert f"--config.{path}={text} {doc}" in shown
    assert "--workdir" in shown and "--print_config" in shown


def test_a_refusal_exits_2_without_traceback_and_without_jax():
    """CF-01: before devices are touched."""
    code = (
        "import sys; from telescope_jax import flags\n"
        "try: flags.parse(sys.argv)\n"
        "finally: assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, MATH, "--config.learing_rate=1e-3", "--config.seed=x"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.startswith("telescope_jax: 2 problems before any work:\n")
