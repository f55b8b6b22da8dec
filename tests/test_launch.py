"""What the launchers start: commands, the Slurm script, restarts; and servers by role."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.launch.roles import (
    Launch,
    check,
    free_ports,
    parser,
    points_of,
    run_role,
    until_done,
)
from experiments.launch.slurm_launch import batch_script
from telescope_jax import flags, serve
from telescope_jax.config import Config
from telescope_jax.interfaces import EngineError
from telescope_jax.main import OWN_FLAGS
from telescope_jax.workdir import Workdir

ROOT = Path(__file__).resolve().parents[1]
STUDY = f"--config={ROOT / 'experiments' / 'math.py'}"
LEAD = f"{ROOT / 'experiments' / 'sweeps' / 'lead.py'}:tiny"


def launch(workdir: Path, trainers: int = 1, servers: int = 0, **changes) -> Launch:
    values = {"flags": (STUDY, "--config.seed=3"), "max_restarts": 2, "python": "python"}
    return Launch(workdir, trainers, servers, **(values | changes))


def read(command: tuple[str, ...]) -> tuple[Config, dict]:
    """What main makes of a role's command line."""
    arguments = flags.read(["", *command[3:]], OWN_FLAGS)[0]
    return arguments.config, {**arguments.extra, "workdir": arguments.workdir}


def test_every_role_is_a_command_line_that_main_takes(tmp_path: Path):
    made = launch(tmp_path, trainers=2, servers=2)
    urls = ["http://n3:8000", "http://n4:8000"]
    trainers = [read(role.command) for role in made.trainer_roles(99, ["n1", "n2"], urls)]
    for index, (config, extra) in enumerate(trainers):
        assert config.seed == 3 and config.engine.urls == tuple(urls)
        assert (extra["role"], extra["coordinator"]) == ("trainer", "n1:99")
        assert (extra["processes"], extra["process"]) == ("2", str(index))
        assert extra["workdir"] == str(tmp_path)
    servers = [read(role.command) for role in made.server_roles(8000, "0.0.0.0")]
    for index, (config, extra) in enumerate(servers):
        assert config.engine.kind == "vllm" and config.engine.servers == 1
        assert (extra["role"], extra["host"], extra["port"]) == (
            "inference",
            "0.0.0.0",
            8000 + index,
        )


def test_one_trainer_process_is_started_as_by_hand(tmp_path: Path):
    (role,) = launch(tmp_path).trainer_roles(99, ["n1"], [])
    config, extra = read(role.command)
    assert extra["coordinator"] == "" and config.engine.kind == "jax"


def test_the_slurm_script_allocates_both_kinds_of_nodes_and_joins_them(tmp_path: Path):
    """Run by a shell in which the cluster's commands are stubs that write down what they get."""
    script = batch_script(
        launch(tmp_path, trainers=2, servers=2), name="study", gpus_per_node=8, partition="gpu"
    )
    head = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    first, second = head[: head.index("hetjob")], head[head.index("hetjob") + 1 :]
    assert {"--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--requeue"} <= set(first)
    assert {"--nodes=2", "--gpus-per-node=8", "--partition=gpu"} <= set(second)

    stubs = tmp_path / "stubs"
    stubs.mkdir()
    log = tmp_path / "calls"
    write_stub(stubs / "scontrol", f'echo "scontrol $*" >>{log}; [ "$1" = show ] && echo -e "$3"')
    # A trainer that is preempted once the servers are there; they run until they are ended.
    srun = f"""
    env | grep ^TELESCOPE_ | sed 's/KEY=.*/KEY=secret/' | sort >>{log}.env
    case "$1" in
      --het-group=1) printf '%s\\n' "$@" >{log}.servers; exec sleep 60 ;;
      *) printf '%s\\n' "$@" >{log}.trainers
         until [ -s {log}.servers ]; do sleep 0.01; done
         exit 143 ;;
    esac"""
    write_stub(stubs / "srun", srun)
    environment = os.environ | {
        "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "t1\\nt2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "s1\\ns2",
        "SLURM_JOB_ID": "17",
    }
    done = subprocess.run(["bash"], input=script, env=environment, text=True, timeout=60)
    assert done.returncode == 143
    assert "scontrol requeue 17" in log.read_text()
    trainers = Path(f"{log}.trainers").read_text().splitlines()
    assert "--config.engine.urls=('http://s1:8000','http://s2:8000',)" in trainers
    known = Path(f"{log}.env").read_text()
    assert "TELESCOPE_COORDINATOR=t1:8476" in known and "TELESCOPE_PROCESSES=2" in known
    assert known.count("TELESCOPE_ENGINE_KEY=secret") == 2 and "KEY" not in script.split("cd ")[0]
    main = trainers[trainers.index("trainer") + 1 :]
    config, extra = read(tuple(main))  # what bash -c executes
    assert config.engine.urls == ("http://s1:8000", "http://s2:8000")
    servers = Path(f"{log}.servers").read_text().splitlines()
    at = servers.index("python")
    assert read(tuple(servers[at:]))[1]["role"] == "inference"


def write_stub(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def test_what_was_preempted_is_started_again_and_what_was_refused_is_not(tmp_path: Path):
    def run(*ends: list[int]) -> tuple[int, int]:
        given = iter(ends)
        attempts: list[int] = []

        def run_trainers(attempt: int) -> list[int]:
            attempts.append(attempt)
            return next(given)

        return until_done(launch(tmp_path, 2), run_trainers), len(attempts)

    assert run([143, 143], [5, -9], [0, 0]) == (0, 3)
    assert run([2, 2]) == (2, 1)
    assert run([1, 5], [5, 1], [5, 1], [0, 0]) == (1, 3)  # max_restarts=2
    # One refuses, and the others only see that it is gone.
    assert run([5, 2], [5, 2]) == (2, 1)


def test_a_role_passes_signals_on_and_tells_its_code(tmp_path: Path):
    script = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', "
    script += "flush=True); time.sleep(60)"
    code = "import sys; from experiments.launch.roles import run_role; "
    code += f"sys.exit(run_role([sys.executable, '-c', {script!r}]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline() != "up\n":
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 7
    assert run_role([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_a_sweep_is_one_launch_for_each_point_that_has_not_finished(tmp_path: Path):
    sweep = f"--sweep={ROOT / 'experiments' / 'sweeps' / 'lead.py'}:tiny"
    given, rest = parser("").parse_known_args([sweep, f"--out={tmp_path}", STUDY + ":tiny"])
    finished = tmp_path / "runs" / "max_async_rollout=2,seed=0"
    finished.mkdir(parents=True)
    (finished / "run.json").write_text('{"state": "finished"}')
    (tmp_path / "points").mkdir()
    launches = points_of(given, rest)
    assert [one.workdir.name for one in launches] == [
        "max_async_rollout=0,seed=0",
        "max_async_rollout=0,seed=1",
        "max_async_rollout=2,seed=1",
    ]
    (role,) = launches[1].trainer_roles(1, ["n"], [])
    assert read(role.command)[0].seed == 1


def test_a_sweep_hands_its_points_to_a_launcher(tmp_path: Path):
    command = [sys.executable, "-m", "telescope_jax.sweep", f"--out={tmp_path}", "--launcher=slurm"]
    command += ["--sweep=experiments/sweeps/lead.py:tiny", f"{STUDY}:tiny", "--config.tis_cap=3.0"]
    command += ["--launcher_flags=--cluster=slurm --dry_run --partition=gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("#SBATCH --partition=gpu") == 4
    assert done.stdout.count("--config.tis_cap=3.0") == 4
    assert "max_async_rollout=2" in done.stdout


def test_what_slurm_still_has_is_not_submitted_again(tmp_path: Path):
    """The same command given twice submitted every point that had not finished twice."""
    stubs, out = tmp_path / "stubs", tmp_path / "out"
    stubs.mkdir()
    write_stub(stubs / "sbatch", f"echo x >>{tmp_path}/submitted; wc -l <{tmp_path}/submitted")
    # Of the four jobs the second has ended.
    write_stub(stubs / "squeue", '[ "$3" = 2 ] || echo "$3 RUNNING"')
    command = [sys.executable, "-m", "experiments.launch.slurm_launch", f"{STUDY}:tiny"]
    command += ["--sweep=experiments/sweeps/lead.py:tiny", f"--out={out}"]
    environment = os.environ | {"PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}"}

    def submit(*flags: str) -> str:
        done = subprocess.run(
            [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    submit("--dry_run")
    assert not (out / "points").exists()
    assert submit().count("is job") == 4 and len(list((out / "points").iterdir())) == 4
    again = submit()
    assert again.count("already, which has not ended") == 3 and again.count("is job 5\n") == 1
    assert (tmp_path / "submitted").read_text().count("x") == 5


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "--workdir is missing"),
        (["--workdir=run", "--trainers=0"], "--trainers=0 must be at least 1"),
        (["--workdir=run", "--servers=-1"], "--servers=-1 must be at least 0"),
        (["--workdir=run", "--max_restarts=-1"], "--max_restarts=-1 must be at least 0"),
        (["--workdir=a_file"], "a_file is no folder"),
        (["--sweep=x.py", "--config.seed", "3"], "--config.seed 3: a sweep takes"),
        (["--sweep=x.py"], "no such Python file"),
        ([f"--sweep={LEAD}", f"{STUDY}:tiny", "--out=a_file"], "a_file cannot be written: "),
        (
            [f"--sweep={LEAD}", f"{STUDY}:tiny", "--out=o", "--python=/no/python"],
            "/no/python cannot be",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused(typed, words, tmp_path: Path, monkeypatch, capsys):
    """Without a trainer process it was told to have finished."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SystemExit) as ended:
        points_of(*parser("").parse_known_args(typed))
    assert ended.value.code == 2 and words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_flags_are_read_before_anything_is_started(tmp_path: Path, capsys):
    check(launch(tmp_path, python=sys.executable))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"flags": (STUDY, "--config.sed=3"), "python": sys.executable}, "--config.sed=3 is unkn"),
        ({"python": str(tmp_path / "python")}, "cannot be run: No such file"),
    ]
    for changes, words in wrong:
        with pytest.raises(SystemExit) as ended:
            check(launch(tmp_path, **changes))
        assert ended.value.code == 2 and words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_local_launch_that_is_asked_to_stop_ends_its_trainers_by_a_checkpoint(
    tmp_path: Path, number: int
):
    """SIGTERM left them behind; a terminal's Ctrl-C reached them twice, and ended them at once."""
    command = [sys.executable, "-m", "experiments.launch.slurm_launch", "--cluster=local"]
    command += [f"--workdir={tmp_path / 'run'}", f"{STUDY}:tiny", "--config.number_of_steps=99999"]
    launcher = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    note = tmp_path / "run" / "metrics" / "metrics.jsonl"
    while launcher.poll() is None and not (note.exists() and note.stat().st_size):
        time.sleep(0.1)
    os.killpg(launcher.pid, number)  # as a terminal does
    assert launcher.wait(timeout=60) == 143
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["state"] == "stopped" and run["exit_code"] == 143
    assert any((tmp_path / "run" / "checkpoints").iterdir())


# --role=inference -------------------------------------------------------------------------------

STUB = [sys.executable, str(ROOT / "tests" / "inference" / "stub_vllm.py")]


def vllm_config() -> Config:
    config = flags.read(["", f"{STUDY}:tiny"])[0].config
    config.engine.kind = "vllm"
    config.engine.own_process = True
    config.policy.head_dim, config.policy.heads, config.policy.width = 32, 1, 32
    config.policy.kv_heads = 1
    return config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config.engine, "kind", "jax"), "set engine.kind=vllm"),
        (lambda config: None, "TELESCOPE_ENGINE_KEY"),
    ],
)
def test_a_role_that_cannot_serve_is_refused(change, words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.delenv("TELESCOPE_ENGINE_KEY", raising=False)
    config = vllm_config()
    change(config)
    (port,) = free_ports(1)
    assert serve.serve(config, str(tmp_path), host="127.0.0.1", port=port) == 2
    assert words in capsys.readouterr().err


def test_an_address_where_nobody_can_listen_is_refused(capsys):
    """A server died of it max_restarts times."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        for host, port, words in (
            ("127.0.0.1", taken, f"127.0.0.1:{taken}: Address already in use"),
            ("127.0.0.1", 65536, "--port=65536 with engine.servers=1"),
            ("203.0.113.1", 8000, "203.0.113.1:8000: Cannot assign"),
        ):
            assert serve.serve(vllm_config(), "run", host=host, port=port) == 2
            assert words in capsys.readouterr().err


def test_a_server_that_dies_is_started_again_until_it_has_died_too_often(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setenv("TELESCOPE_ENGINE_KEY", "secret")
    monkeypatch.setattr(serve.vllm_pools, "check_can_start", lambda *_: None)
    config = vllm_config()
    config.eval.max_tokens = config.sampling.max_tokens + 40
    shape = serve.server_shape(config, tmp_path, "0.0.0.0")
    # Room for an eval's longer answers; and no parts of prompts, of which vLLM on a CPU dies.
    assert shape.arguments[:2] == ("--host", "0.0.0.0") and shape.context == 24 + 40
    assert (
        json.loads((Path(shape.model) / "config.json").read_text())["max_position_embeddings"] == 64
    )
    assert shape.chunked_prefill != serve.vllm_pools._is_for_cpu()
    assert (Path(shape.model) / "config.json").exists()
    # docs/launch.md starts the servers first; the trainer then makes its run in the same folder.
    Workdir.open(tmp_path, vllm_config(), STUDY).close()

    def dies(shape, *, name: str, port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('out of memory')"]

    with pytest.raises(EngineError, match="died 3 times"):
        asyncio.run(serve._keep_up(shape, tmp_path, 8000, 2, dies))
    assert capsys.readouterr().err.count("out of memory") == 3
