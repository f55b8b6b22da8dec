"""Everything that a user or a file can hand in wrong: id -> what happens then.

Command lines are in golden/bad_command_lines.tsv; here is what has to be made first, and in
bad_answers.py what comes back from servers and environments. Each case is
called with an empty folder and raises; the exact line is in golden/bad_inputs.json.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from telescope_jax import setup
from telescope_jax.config import Config
from telescope_jax.learner.checkpoint import Checkpoints
from telescope_jax.learner.learner import describe
from telescope_jax.types import WeightsRef
from telescope_jax.weights.store import OrbaxStore
from telescope_jax.workdir import Workdir

Case = Callable[[Path], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


def task(**fields: Any) -> Config:
    """A small config; `env__name="x"` sets env.name."""
    config = Config()
    config.eval.items = 8
    for path, value in fields.items():
        *parents, name = path.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def build(**fields: Any) -> None:
    setup.build_task(task(**fields))


# Environments and data


@case
def environment_that_is_not_there(tmp: Path) -> None:
    build(env__name="sum")


@case
def environment_of_a_module_that_is_not_there(tmp: Path) -> None:
    build(env__name="no_such_module:Env")


@case
def environment_of_a_package_that_is_misspelt(tmp: Path) -> None:
    build(env__name="reasoning_gim:chain_sum")


@case
def environment_of_a_module_that_is_misspelt(tmp: Path) -> None:
    build(env__name="tests.faults.wrlds:Digits")


@case
def environment_of_a_module_that_is_no_package(tmp: Path) -> None:
    build(env__name="json.decodr.x:Env")


@case
def environment_that_its_module_lacks(tmp: Path) -> None:
    build(env__name="tests.faults.worlds:Digit")


@case
def environment_option_that_is_unknown(tmp: Path) -> None:
    build(env__options={"held_ot": 0.5})


@case
def environment_option_out_of_range(tmp: Path) -> None:
    build(env__options={"held_out": 2.0})


@case
def environment_that_cannot_make_a_prompt(tmp: Path) -> None:
    build(env__name="tests.faults.worlds:Broken")


@case
def environment_without_prompts(tmp: Path) -> None:
    build(env__name="tests.faults.worlds:Empty")


@case
def prompts_that_are_all_too_long(tmp: Path) -> None:
    build(sampling__max_prompt_tokens=4)


@case
def more_eval_items_than_there_are(tmp: Path) -> None:
    build(eval__items=100_000)


@case
def warm_start_without_solutions(tmp: Path) -> None:
    build(env__name="tests.faults.worlds:Plain", warm_start__steps=5)


@case
def data_file_that_is_not_there(tmp: Path) -> None:
    build(env__name="gsm8k", env__options={"train_file": str(tmp / "train.jsonl")})


@case
def data_file_with_a_line_that_is_not_json(tmp: Path) -> None:
    problems(tmp, '{"question": "1+1?", "answer": "#### 2"}\n{"question": \n')


@case
def data_file_with_an_answer_that_is_no_number(tmp: Path) -> None:
    problems(tmp, '{"question": "1+1?", "answer": "two"}\n')


@case
def data_file_that_is_empty(tmp: Path) -> None:
    problems(tmp, "")


def problems(tmp: Path, text: str) -> None:
    (tmp / "train.jsonl").write_text(text)
    options = {"train_file": str(tmp / "train.jsonl")}
    build(env__name="gsm8k", env__options=options, sampling__max_prompt_tokens=200)


@case
def dataset_that_is_misspelt(tmp: Path) -> None:
    build(env__name="reasoning_gym:chain_sun")


@case
def more_devices_than_there_are(tmp: Path) -> None:
    build(mesh__data=1024, batch__rows_per_microbatch=1024)


# The start


@case
def pretrained_folder_that_is_not_there(tmp: Path) -> None:
    build(policy__checkpoint=str(tmp / "model"))


@case
def pretrained_folder_without_a_config(tmp: Path) -> None:
    (tmp / "model").mkdir()
    build(policy__checkpoint=str(tmp / "model"))


@case
def pretrained_config_that_is_not_json(tmp: Path) -> None:
    (tmp / "model").mkdir()
    (tmp / "model" / "config.json").write_text("{")
    build(policy__checkpoint=str(tmp / "model"))


@case
def pretrained_model_of_another_family(tmp: Path) -> None:
    (tmp / "model").mkdir()
    (tmp / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    build(policy__checkpoint=str(tmp / "model"))


# Workdirs


def opened(tmp: Path, **fields: Any) -> Workdir:
    return Workdir.open(tmp / "run", task(**fields), "study.py")


@case
def workdir_that_holds_something_else(tmp: Path) -> None:
    (tmp / "run").mkdir()
    (tmp / "run" / "thesis.tex").touch()
    opened(tmp)


@case
def workdir_in_use(tmp: Path) -> None:
    first = opened(tmp)
    try:
        opened(tmp)
    finally:
        first.close()


@case
def workdir_of_another_configuration(tmp: Path) -> None:
    opened(tmp).close()
    opened(tmp, policy__width=64, seed=3)


@case
def workdir_whose_config_is_damaged(tmp: Path) -> None:
    opened(tmp).close()
    (tmp / "run" / "config.json").write_text("{")
    opened(tmp)


@case
def workdir_whose_notes_are_damaged(tmp: Path) -> None:
    opened(tmp).close()
    (tmp / "run" / "run.json").write_text("{")
    opened(tmp)


@case
def workdir_that_is_a_file(tmp: Path) -> None:
    (tmp / "run").touch()
    opened(tmp)


# Checkpoints


def state(step: int, width: int = 4) -> dict[str, Any]:
    params = {"kernel": jnp.ones((width, 4))}
    return {"params": params, "opt_state": {"mu": params}, "step": jnp.int32(step)}


def saved(tmp: Path, values: dict[str, Any]) -> Checkpoints:
    checkpoints = Checkpoints(tmp / "checkpoints", keep_last=2)
    checkpoints.save(values)
    checkpoints.wait()
    return checkpoints


@case
def checkpoint_of_another_model(tmp: Path) -> None:
    saved(tmp, state(1)).restore(describe(state(0, width=8)))


@case
def checkpoint_of_another_optimizer(tmp: Path) -> None:
    wanted = describe(state(0))
    wanted["opt_state"] = {"nu": wanted["opt_state"]["mu"]}
    saved(tmp, state(1)).restore(wanted)


@case
def checkpoint_of_weights_only(tmp: Path) -> None:
    values = state(1)
    del values["opt_state"]
    saved(tmp, values).restore(describe(state(0)))


@case
def checkpoint_of_a_step_that_is_not_there(tmp: Path) -> None:
    saved(tmp, state(1)).restore(describe(state(0)), step=7)


@case
def checkpoint_of_a_newer_format_and_no_other(tmp: Path) -> None:
    checkpoints = saved(tmp, state(1))
    (file,) = (tmp / "checkpoints").rglob("host/metadata")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    checkpoints.restore(describe(state(0)), step=1)


@case
def checkpoints_of_which_none_can_be_read(tmp: Path) -> None:
    config = task(policy__width=16, policy__head_dim=4, policy__mlp_width=16)
    parts = setup.build_task(config)
    checkpoints = saved(tmp, state(1))
    for file in (tmp / "checkpoints").rglob("host/metadata"):
        file.write_text("{}")
    setup.build_or_restore(config, parts.env, parts.tokenizer, 103, parts.mesh, checkpoints, None)


# Weights


def published(tmp: Path) -> tuple[OrbaxStore, WeightsRef]:
    store = OrbaxStore(tmp / "weights")
    return store, asyncio.run(store.publish(3, {"layer": {"kernel": jnp.ones((4, 4))}}))


@case
def weights_that_are_gone(tmp: Path) -> None:
    store, ref = published(tmp)
    asyncio.run(store.prune([]))
    store.read(ref)


@case
def weights_that_were_replaced(tmp: Path) -> None:
    store, ref = published(tmp)
    asyncio.run(store.publish(3, {"layer": {"kernel": jnp.zeros((4, 4))}}))
    store.read(ref)


@case
def weights_that_are_damaged(tmp: Path) -> None:
    store, ref = published(tmp)
    (file,) = (tmp / "weights").rglob("metadata/metadata")
    written = json.loads(file.read_text())
    written["tensors"]["layer.kernel"] = "0" * 64  # as after a flipped bit of the tensor
    file.write_text(json.dumps(written))
    store.read(ref)


@case
def parameters_whose_name_holds_a_dot(tmp: Path) -> None:
    asyncio.run(OrbaxStore(tmp / "weights").publish(0, {"a.b": jnp.ones(2)}))
