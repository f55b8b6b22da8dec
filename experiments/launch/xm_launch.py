"""Starts a run with XManager: on this machine, or on Kubernetes or Vertex by flag.

    python -m venv xm && xm/bin/pip install xmanager==0.8.5.post1      (an environment of its own)
    xm/bin/python -m experiments.launch.xm_launch --executor=local --python=.venv/bin/python \\
        --trainers=2 --workdir=runs/two --config=experiments/math.py --config.mesh.fsdp=2
    … --executor=kubernetes|vertex --image=REGISTRY/telescope_jax:TAG --config=…

The local executor starts every role as a process. Kubernetes and Vertex take one trainer process
with its embedded engine, in an image that holds this repository; several, and vLLM servers, need
addresses that XManager does not tell (use Slurm, or start the roles by hand: docs/launch.md).
"""

import asyncio
import os
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from telescope_jax import extras

if absent := extras.missing("a launch by XManager", "xmanager"):
    raise SystemExit(f"{absent}, in an environment of its own")
from xmanager import xm, xm_local  # pyright: ignore[reportMissingImports]: the extra `xm`

from experiments.launch.roles import (
    FINAL,
    ROOT,
    Launch,
    Role,
    free_ports,
    parser,
    points_of,
    refuse,
    share_key,
)


async def run_locally(experiment: xm.Experiment, launch: Launch) -> bool:
    """All roles on this machine; returns whether the run finished."""
    os.chdir(ROOT)
    ports = free_ports(launch.servers + 1)
    urls = [f"http://127.0.0.1:{port}" for port in ports[1:]]

    def job(role: Role) -> xm.Job:
        [executable] = experiment.package(
            [
                xm.Packageable(
                    executable_spec=xm.Binary(path=role.command[0]),
                    executor_spec=xm_local.Local.Spec(),
                )
            ]
        )
        # One argument each, escaped by XManager.
        return xm.Job(executable, xm_local.Local(), name=role.name, args=list(role.command[1:]))

    for role in launch.server_roles(ports[1]) if launch.servers else []:
        await experiment.add(job(role))
    for attempt in range(launch.max_restarts + 1):
        port = ports[0] if attempt == 0 else free_ports(1)[0]
        roles = launch.trainer_roles(port, ["127.0.0.1"], urls)
        group = xm.JobGroup(**{role.name.replace("-", "_"): job(role) for role in roles})
        unit = await experiment.add(group)
        try:
            await unit.wait_until_complete()
            return True
        except xm.ExperimentUnitError as error:
            # XManager knows no exit codes; the run's own notes tell whether to go on.
            if exit_code(launch) in FINAL:
                print(f"launch: not started again: {error}")
                return False
            print(f"launch: starting again after: {error}")
    return False


def exit_code(launch: Launch) -> int | None:
    """What run.json says of the last end; None if there is none."""
    import json

    try:
        return json.loads((launch.workdir / "run.json").read_text()).get("exit_code")
    except (OSError, ValueError):
        return None


def container_job(experiment: xm.Experiment, launch: Launch, executor: str, image: str) -> xm.Job:
    """One trainer process in an image, on Kubernetes or Vertex."""
    kinds = {"kubernetes": xm_local.Kubernetes, "vertex": xm_local.Vertex}
    [executable] = experiment.package(
        [
            xm.Packageable(
                executable_spec=xm.Container(image_path=image),
                executor_spec=kinds[executor].Spec(),
            )
        ]
    )
    [role] = launch.trainer_roles(0, ["127.0.0.1"], [])
    return xm.Job(executable, kinds[executor](), name=role.name, args=list(role.command[1:]))


async def start(launches: Sequence[Launch], executor: str, image: str) -> int:
    """One experiment for all launches; returns the exit code."""
    finished = []
    async with xm_local.create_experiment(experiment_title="telescope_jax") as experiment:
        for launch in launches:
            if executor == "local":
                finished.append(await run_locally(experiment, launch))
            else:
                await experiment.add(container_job(experiment, launch, executor, image))
    return 0 if all(finished) else 1


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    flags = parser(__doc__ or "")
    flags.add_argument("--executor", choices=["local", "kubernetes", "vertex"], default="local")
    flags.add_argument("--image", default="", help="kubernetes, vertex: with this repository")
    given, rest = flags.parse_known_args(argv)
    launches = points_of(given, rest, here=given.executor == "local")
    if given.executor != "local" and (given.trainers > 1 or given.servers or not given.image):
        refuse(
            f"--executor={given.executor} takes one trainer process without servers, and --image; "
            f"got --trainers={given.trainers} --servers={given.servers} --image={given.image!r}"
        )
    share_key()
    absl_flags.FLAGS(["xm_launch"])  # XManager reads its own flags from there
    return asyncio.run(start(launches, given.executor, given.image))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
