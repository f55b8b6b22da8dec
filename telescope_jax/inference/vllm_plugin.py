"""What runs inside vLLM's processes: the weight-transfer engine `orbax`, and the key at the door.

vLLM loads `register` from the entry point `vllm.general_plugins` in its API server, its engine core
and every worker. A version is loaded in two strides, so that what can be refused is refused while
the old weights go on serving:

    orbax_stage(version)     reads and checks everything in a thread; decoding goes on meanwhile
    orbax_staged()           done? refused, and why?
    /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume
    orbax_loaded()           version and fingerprint of what was handed to the model

vLLM 0.32 does not survive an error between start and finish, so nothing that can be known earlier
is found out there. The three methods answer through vLLM's `/collective_rpc`, once a worker.
JAX stays on the CPU in these processes: the accelerator is vLLM's.
"""

import hmac
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

log = logging.getLogger(__name__)

BACKEND = "orbax"
NAME_HEADER = "x-telescope-server"
LIFELINE = "TELESCOPE_LIFELINE"
NAME = "TELESCOPE_SERVER_NAME"
KEY = "VLLM_API_KEY"

# PyTorch has no view of ml_dtypes' bfloat16: the bits travel as integers.
_AS_BITS = {"bfloat16": (np.uint16, torch.bfloat16)}


def register() -> None:
    """The entry point; may be called many times in a process."""
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, OrbaxWeights)
    # Popped: in a child the number would mean some other file.
    if lifeline := os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_die_with, args=[int(lifeline)], daemon=True).start()


def _die_with(lifeline: int) -> None:
    """Waits until whoever started the server is gone, however it ended, then ends the group."""
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


@dataclass
class NoInit(WeightTransferInitInfo):
    """The engine needs no rendezvous: a version is a path."""


@dataclass
class StagedVersion(WeightTransferUpdateInfo):
    """Which of the staged versions to load."""

    version: int
    fingerprint: str


@dataclass(frozen=True)
class Staged:
    """A version in memory, checked; or the reason why it was refused."""

    version: int
    fingerprint: str
    tensors: Mapping[str, torch.Tensor]
    error: str = ""


class OrbaxWeights(WeightTransferEngine[NoInit, StagedVersion]):
    """Loads versions that an `OrbaxStore` published under Hugging Face names.

    Every worker reads whole tensors and the model takes its shard of each; a staged version costs
    its size in host memory, once a worker, until it is loaded.
    """

    init_info_cls = NoInit
    update_info_cls = StagedVersion

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staging: threading.Thread | None = None
        self._staged: Staged | None = None
        self._expected: Mapping[str, tuple[int, ...]] | None = None
        self.loaded: tuple[int, str] | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def stage(self, version: int, path: str, fingerprint: str) -> None:
        """Begins to read and check a version; `staged` tells the end."""
        if self._staging is not None:
            self._staging.join()  # one at a time: memory for one version is set aside
        self._staged = None
        self._staging = threading.Thread(
            target=self._stage, args=[version, path, fingerprint], daemon=True
        )
        self._staging.start()

    def staged(self) -> Staged | None:
        """The staged version; None while it is being read."""
        return self._staged

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedVersion) -> None:
        """Hands the staged tensors to the model.

        Raises:
          RuntimeError: another version is staged, or the model did not take all of its parameters.
        """
        staged = self._staged
        if staged is None or staged.error or staged.fingerprint != update_info.fingerprint:
            raise RuntimeError(f"version {update_info.version} is not staged: {staged}")
        self.loaded = None
        taken = self.model.load_weights(iter(staged.tensors.items()))  # type: ignore[operator]
        forgotten = {name for name, _ in self.model.named_parameters()} - set(taken or ())
        if self.model_config.hf_config.tie_word_embeddings:
            forgotten.discard("lm_head.weight")  # the embedding, under its other name
        if taken is not None and forgotten:
            raise RuntimeError(f"parameters without weights: {sorted(forgotten)}")
        self.loaded = (staged.version, staged.fingerprint)
        self._staged = None

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()

    def shutdown(self) -> None:
        """Nothing is held open."""

    def _refresh_tied_head(self) -> None:
        """A tied head has no weights of its own to reload, so vLLM 0.32 leaves alone the packed
        copy that its CPU backend multiplies by: logits would be those of the first version."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if self.model_config.hf_config.tie_word_embeddings and method is not None:
            method.process_weights_after_loading(head)

    def _stage(self, version: int, path: str, fingerprint: str) -> None:
        try:
            flat = _read(version, path, fingerprint)
            if self._expected is None:
                self._expected = expected_shapes(self.model_config.hf_config)
            found = {name: tuple(array.shape) for name, array in flat.items()}
            if wrong := "; ".join(differences(found, self._expected)):
                raise ValueError(
                    f"version {version} does not fit the model that is served: {wrong}"
                )
            tensors = {name: as_torch(array) for name, array in flat.items()}
        except Exception as error:
            log.warning("version %d is refused: %s", version, error)
            self._staged = Staged(version, fingerprint, {}, f"{type(error).__name__}: {error}")
        else:
            self._staged = Staged(version, fingerprint, tensors)


class OrbaxWorker:
    """Methods that vLLM adds to its worker (`--worker-extension-cls`), called by name.

    They never raise: what escapes from a worker may end the engine.
    """

    weight_transfer_engine: OrbaxWeights

    def orbax_stage(self, request: str) -> dict[str, Any]:
        """Begins to stage; `request` is JSON {version, path, fingerprint}."""
        try:
            self.weight_transfer_engine.stage(**json.loads(request))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": ""}

    def orbax_staged(self) -> dict[str, Any]:
        """Whether staging is done, and why the version was refused if it was."""
        staged = self.weight_transfer_engine.staged()
        if staged is None:
            return {"done": False, "error": ""}
        return {"done": True, "version": staged.version, "error": staged.error}

    def orbax_loaded(self) -> dict[str, Any]:
        """What this worker serves; {} before the first version."""
        loaded = self.weight_transfer_engine.loaded
        return {} if loaded is None else {"version": loaded[0], "fingerprint": loaded[1]}


class RequireKey:
    """Middleware: answers /health with the server's name, and nothing else without the key.

    vLLM's own check leaves out everything beside /v1 and /inference, such as /pause.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._name = os.environ.get(NAME, "").encode()
        self._authorization = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (NAME_HEADER.encode(), self._name),
                ]
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["path"] == "/health" or hmac.compare_digest(given, self._authorization):
            return await self._app(scope, receive, named)
        await named({"type": "http.response.start", "status": 401, "headers": []})
        await named({"type": "http.response.body", "body": b"the key is missing or wrong"})


def expected_shapes(hf_config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint that belongs to a Hugging Face config."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if hf_config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def differences(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """All that is missing, extra or misshapen, in words."""
    if missing := sorted(expected.keys() - found.keys()):
        yield f"{len(missing)} of {len(expected)} tensors are missing: {', '.join(missing)}"
    if extra := sorted(found.keys() - expected.keys()):
        yield f"{len(extra)} tensors have no place: {', '.join(extra)}"
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            yield f"{name} has shape {found[name]}, the model has {expected[name]}"


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The same bits as a torch tensor. Raises ValueError for a dtype that no model is served in."""
    if (name := str(array.dtype)) in _AS_BITS:
        bits, dtype = _AS_BITS[name]
        return torch.from_numpy(_writable(array.view(bits))).view(dtype)
    if name not in ("float32", "float16"):
        raise ValueError(f"dtype {name} is none of bfloat16, float16, float32")
    return torch.from_numpy(_writable(array))


def _writable(array: np.ndarray) -> np.ndarray:
    # torch warns of every read-only array; nobody writes to these.
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _read(version: int, path: str, fingerprint: str) -> Mapping[str, np.ndarray]:
    """The tensors of a version, checked against the fingerprint that its publisher named."""
    # Imported late: jax reads JAX_PLATFORMS once, and only workers need it at all.
    from telescope_jax.types import WeightsRef
    from telescope_jax.weights.store import OrbaxStore

    store = OrbaxStore(os.path.dirname(path.rstrip("/")), from_served=lambda flat: dict(flat))
    try:
        return store.read(WeightsRef(version, path, fingerprint))
    finally:
        store.close()
