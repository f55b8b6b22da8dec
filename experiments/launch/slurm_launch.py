"""Starts a run with submitit on this machine, or as one Slurm job of trainer and inference nodes.

    pip install -e '.[slurm]'
    python -m experiments.launch.slurm_launch --cluster=local --trainers=2 --workdir=runs/two \\
        --config=experiments/math.py --config.mesh.fsdp=2
    python -m experiments.launch.slurm_launch --cluster=slurm --trainers=2 --servers=4 \\
        --workdir=/shared/run1 --partition=gpu --gpus_per_node=8 --config=… [--dry_run]

On Slurm it is a heterogeneous job: both kinds of nodes are allocated together and end together.
The batch script is left in the workdir; a preempted job is put back into the queue and resumes.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.launch.roles import (
    ROOT,
    Launch,
    Role,
    free_ports,
    parser,
    points_of,
    refuse,
    run_role,
    share_key,
    until_done,
)
from telescope_jax import extras

COORDINATOR_PORT, SERVER_PORT = 8_476, 8_000


def run_locally(launch: Launch) -> int:
    """All roles on this machine, as submitit's local jobs; returns the exit code of the run."""
    if absent := extras.missing("--cluster=local", "submitit"):
        refuse(absent)
    import submitit
    from submitit.core.utils import UncompletedJobError

    share_key()
    executor = submitit.LocalExecutor(folder=launch.workdir.parent / f"{launch.workdir.name}-jobs")
    executor.update_parameters(timeout_min=60 * 24 * 7, stderr_to_stdout=True)
    ports = free_ports(launch.servers + 1)
    urls = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    over = threading.Event()
    logs: list[threading.Thread] = []
    submitted: list[submitit.Job[int]] = []
    stopping = False

    def end(jobs: Sequence["submitit.Job[int]"]) -> None:
        # A local job is named by the pid of its controller, which passes SIGTERM on. Its own
        # `cancel` kills after a second, when no checkpoint is written yet.
        for job in jobs:
            if not job.done():
                os.kill(int(job.job_id), signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        end(submitted)

    def submit(roles: Sequence[Role]) -> list["submitit.Job[int]"]:
        # Whoever ignores a signal has children that do: a terminal's Ctrl-C is for us alone.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        jobs = [executor.submit(run_role, role.command) for role in roles]
        signal.signal(signal.SIGINT, before)
        submitted.extend(jobs)
        if stopping:
            end(jobs)
        for role, job in zip(roles, jobs, strict=True):
            thread = threading.Thread(target=forward, args=[job.paths.stdout, role.name, over])
            thread.start()
            logs.append(thread)
        return jobs

    def run_trainers(attempt: int) -> list[int]:
        port = ports[0] if attempt == 0 else free_ports(1)[0]
        jobs = submit(launch.trainer_roles(port, ["127.0.0.1"], urls))
        return [code_of(job) for job in jobs]

    def code_of(job: "submitit.Job[int]") -> int:
        try:
            return job.result()
        except UncompletedJobError:  # its own process was killed
            return 1

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if launch.servers:
        submit(launch.server_roles(ports[1]))
    try:
        return until_done(launch, run_trainers, lambda: stopping)
    finally:
        end(submitted)
        over.set()
        for thread in logs:
            thread.join()


def forward(path: Path, name: str, over: threading.Event) -> None:
    """Prints a job's log as it grows, each line with the name of its role."""
    position = 0
    while True:
        last = over.is_set()
        if path.exists():
            with path.open(errors="replace") as file:
                file.seek(position)
                for line in file.read().splitlines():
                    print(f"[{name}] {line}", flush=True)
                position = file.tell()
        if last:
            return
        time.sleep(0.5)


def batch_script(
    launch: Launch,
    *,
    name: str,
    gpus_per_node: int = 0,
    partition: str = "",
    time_limit: str = "24:00:00",
    extra: Sequence[str] = (),
) -> str:
    """The text that sbatch is given."""
    shared = [f"--time={time_limit}"]
    shared += [f"--partition={partition}"] if partition else []
    shared += [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    shared += list(extra)
    job = [f"--job-name={name}", "--requeue", "--open-mode=append", "--signal=B:TERM@120"]
    job += [f"--output={launch.workdir}/logs/slurm-%j.log"]
    job += [f"--nodes={launch.trainers}", "--ntasks-per-node=1", *shared]
    header = [f"#SBATCH {option}" for option in job]
    if launch.servers:
        nodes = [f"--nodes={launch.servers}", "--ntasks-per-node=1", *shared]
        header += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in nodes)]
    main = shlex.join([launch.python, "-m", "telescope_jax.main", *launch.flags])
    workdir = shlex.quote(f"--workdir={launch.workdir}")
    trainer_group = "--het-group=0 " if launch.servers else ""
    lines = ["#!/bin/bash", *header, "set -u", f"cd {shlex.quote(str(ROOT))}", "umask 077"]
    # Made in the job, so that it stands in no file and in no list of processes.
    lines += [
        'TELESCOPE_ENGINE_KEY="$(head -c 32 /dev/urandom | base64 | tr -d /+=)"',
        "export TELESCOPE_ENGINE_KEY",
    ]
    trainer_flags = ""
    if launch.servers:
        lines += [
            'trainers=($(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0"))',
            'servers=($(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"))',
            'urls=""',
            f'for node in "${{servers[@]}}"; do urls+="\'http://$node:{SERVER_PORT}\',"; done',
            f"srun --het-group=1 --kill-on-bad-exit=0 {main} {workdir} \\",
            "  --config.engine.kind=vllm --config.engine.servers=1 --role=inference \\",
            f"  --host=0.0.0.0 --port={SERVER_PORT} &",
            "inference=$!",
        ]
        trainer_flags = ' --config.engine.kind=vllm "--config.engine.urls=($urls)"'
    else:
        lines += ['trainers=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))', 'inference=""']
    if launch.trainers > 1:
        lines += [
            f'export TELESCOPE_COORDINATOR="${{trainers[0]}}:{COORDINATOR_PORT}"',
            f"export TELESCOPE_PROCESSES={launch.trainers}",
        ]
    process = "TELESCOPE_PROCESS=$SLURM_PROCID " if launch.trainers > 1 else ""
    lines += [
        f"srun {trainer_group}--kill-on-bad-exit=0 bash -c '{process}exec \"$@\"' trainer \\",
        f"  {main} {workdir}{trainer_flags} &",
        "trainer=$!",
        # The batch shell alone is signalled (B:): it passes on, and waits for the checkpoint.
        "trap 'kill -TERM $trainer' TERM",
        "wait $trainer; code=$?",
        "while kill -0 $trainer 2>/dev/null; do wait $trainer; code=$?; done",
        '[ -z "$inference" ] || kill -TERM $inference 2>/dev/null',
        # What the trainer says by its code: finished, refused, no signal, Ctrl-C; else go on.
        "case $code in",
        "  0 | 2 | 3 | 130) exit $code ;;",
        f"  *) [ ${{SLURM_RESTART_COUNT:-0}} -lt {launch.max_restarts} ] &&",
        '       scontrol requeue "$SLURM_JOB_ID" ;;',
        "esac",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def submit_to_slurm(launch: Launch, script: str, *, dry_run: bool) -> int:
    """Leaves the script in the workdir and gives it to sbatch, unless its last job is not over."""
    if not dry_run and not shutil.which("sbatch"):
        refuse("sbatch is not here; submit where Slurm is, or take --cluster=local or --dry_run")
    path = launch.workdir / "logs" / "slurm.sh"
    job = path.with_name("slurm.job")
    if not dry_run and job.exists() and _is_queued(number := job.read_text().strip()):
        print(f"launch: {launch.workdir.name} is job {number} already, which has not ended")
        return 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    except OSError as error:
        refuse(f"--workdir={launch.workdir} cannot be written: {error}")
    if dry_run:
        print(script, end="")
        return 0
    done = subprocess.run(["sbatch", "--parsable", str(path)], stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        number = done.stdout.strip().partition(";")[0]  # JOB;CLUSTER where there are several
        job.write_text(number + "\n")
        print(f"launch: {launch.workdir.name} is job {number}")
    return done.returncode


def _is_queued(job: str) -> bool:
    """Whether Slurm has it waiting or running; it knows no job that has long ended."""
    known = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
    return bool(known.stdout.strip())


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    flags = parser(__doc__ or "")
    flags.add_argument("--cluster", choices=["local", "slurm"], default="slurm")
    flags.add_argument("--partition", default="")
    flags.add_argument("--gpus_per_node", type=int, default=0)
    flags.add_argument("--time", default="24:00:00")
    flags.add_argument("--sbatch", action="append", default=[], help="a further #SBATCH option")
    flags.add_argument("--dry_run", action="store_true", help="print the script, submit nothing")
    given, rest = flags.parse_known_args(argv)
    if given.gpus_per_node < 0:
        refuse(f"--gpus_per_node={given.gpus_per_node} must be at least 0")
    worst = 0
    for launch in points_of(given, rest):
        if given.cluster == "local":
            code = run_locally(launch)
        else:
            script = batch_script(
                launch,
                name=f"telescope-{launch.workdir.name}",
                gpus_per_node=given.gpus_per_node,
                partition=given.partition,
                time_limit=given.time,
                extra=given.sbatch,
            )
            code = submit_to_slurm(launch, script, dry_run=given.dry_run)
        worst = worst or code
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
