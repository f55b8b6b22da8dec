"""A small server with vLLM's interface and scripted answers: delays, errors, half messages, deaths.

Its model is a formula of version, previous token and token, so a test can compute what it should
have said. Runs inside a test (`serving`), or as a program, as the command of a pool's server:

    python stub_vllm.py --port=P --name=N --child PIDFILE KEY=VALUE …
"""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

VOCAB = 16


def log_probs(
    version: float, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> np.ndarray:
    """log p of each token of `completion` under the stub's model of `version`."""
    found, before = [], prompt[-1]
    for token in completion:
        logits = 2 * np.sin(1.7 * version + 0.9 * np.arange(VOCAB) + 2.3 * before) / temperature
        found.append(logits[token] - math.log(np.exp(logits).sum()))
        before = token
    return np.asarray(found, np.float32)


@dataclass
class Script:
    """What a stub does wrong, and what it has seen."""

    name: str = "stub"
    key: str = "secret"
    answer_s: float = 0.0
    ready_s: float = 0.0  # health answers only after this many seconds
    failures: list[int] = field(default_factory=list)  # statuses of the next generates
    half: int = 0  # generates that break off in the middle
    logprobs: str = "processed"  # raw, shifted, stale, other, noisy
    drop_logprob: bool = False
    stage_error: str = ""
    update_fails: int = 0  # /update_weights that answer 500 and leave the engine dead
    dead_from: int = 1 << 30  # the update to this version, and later ones, does the same
    finish: str = "length"
    too_long: bool = False
    release: str = "0.32.0+cpu"
    fingerprint: str = ""  # what orbax_loaded says; "" is the truth

    version: int = -1
    staged: dict[str, Any] | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    paused: bool = False
    dead: bool = False
    running: int = 0
    aborted: int = 0
    disconnected: int = 0
    seen: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    kept: int = 0  # requests whose connection their client would use again
    strangers: int = 0  # requests without the key, beside /health


class Stub:
    def __init__(self, script: Script) -> None:
        self.script = script
        self._born = asyncio.get_running_loop().time()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.app = web.Application(middlewares=[self._door])
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_get("/version", self._version)
        self.app.router.add_get("/weight_info", self._weight_info)
        self.app.router.add_post("/collective_rpc", self._rpc)
        self.app.router.add_post("/inference/v1/generate", self._generate)
        for step in ("pause", "start_weight_update", "finish_weight_update", "resume"):
            self.app.router.add_post(f"/{step}", self._step)
        self.app.router.add_post("/update_weights", self._update)

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> web.StreamResponse:
        script = self.script
        script.kept += request.keep_alive
        if request.path != "/health":
            script.seen.append(request.path)
            if request.headers.get("Authorization") != f"Bearer {script.key}":
                script.strangers += 1
                return web.Response(status=401)
        response = await handler(request)
        if not response.prepared:
            response.headers["x-telescope-server"] = script.name
        return response

    async def _health(self, request: web.Request) -> web.Response:
        age = asyncio.get_running_loop().time() - self._born
        ready = age >= self.script.ready_s and not self.script.dead
        return web.Response(status=200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'vllm:num_requests_running{{engine="0"}} {self.script.running}.0')

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.script.release})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.script.version)})

    async def _rpc(self, request: web.Request) -> web.Response:
        body, script = await request.json(), self.script
        if body["method"] == "orbax_stage":
            script.staged = json.loads(body["args"][0])
            answer: dict[str, Any] = {"error": ""}
        elif body["method"] == "orbax_staged":
            answer = {"done": True, "version": 0, "error": script.stage_error}
        else:
            answer = dict(script.loaded)
            if script.fingerprint:
                answer["fingerprint"] = script.fingerprint
        return web.json_response({"results": [answer]})

    async def _step(self, request: web.Request) -> web.Response:
        script, step = self.script, request.path[1:]
        if step == "pause":
            script.paused = True
            self._resumed.clear()
            # vLLM's own default: whoever forgets the mode loses every request.
            if request.query.get("mode", "abort") == "abort":
                script.aborted += script.running
        elif step == "resume":
            script.paused = False
            self._resumed.set()
        elif step == "finish_weight_update":
            script.version = int((await request.json())["weight_version"])
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        script = self.script
        info = (await request.json())["update_info"]
        if script.update_fails or info["version"] >= script.dead_from:
            script.update_fails -= bool(script.update_fails)
            script.dead = True
            return web.Response(status=500, text="EngineDeadError")
        script.loaded = info
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        body = await request.json()
        script.bodies.append(body)
        if script.failures:
            return web.Response(status=script.failures.pop(0), text="scripted")
        if script.too_long:
            text = "This model's maximum context length is 256 tokens"
            return web.Response(status=400, text=text)
        started = script.version
        script.running += 1
        try:
            await self._resumed.wait()
            await asyncio.sleep(script.answer_s / 2)
            await self._resumed.wait()
            await asyncio.sleep(script.answer_s / 2)
        except asyncio.CancelledError:
            script.disconnected += 1
            raise
        finally:
            script.running -= 1
        answer = self._answer(body, started)
        if script.half:
            script.half -= 1
            return web.Response(text=json.dumps(answer)[:40])
        return web.json_response(answer)

    def _answer(self, body: dict[str, Any], started: int) -> dict[str, Any]:
        script, sampling = self.script, body["sampling_params"]
        rng = np.random.default_rng(sampling["seed"])
        count = 0 if script.finish == "abort" else sampling["max_tokens"]
        tokens = rng.integers(2, VOCAB, count).tolist()
        temperature = 1.0 if script.logprobs == "raw" else sampling["temperature"] or 1.0
        version = {"stale": script.version - 1.0, "other": 77.5}.get(
            script.logprobs, float(script.version)
        )
        values = log_probs(version, body["token_ids"], tokens, temperature)
        if script.logprobs == "shifted":
            values = np.roll(values, -1)
        if script.logprobs == "noisy":
            values = values + rng.normal(0, 0.04, len(values))
        content = [
            {"token_id": token, "logprob": float(value)}
            for token, value in zip(tokens, values, strict=True)
        ]
        middle = count // 2 if started != script.version else 0
        spans = [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in ((started, 0, middle), (script.version, middle, count))
            if end > start
        ]
        choice = {
            "finish_reason": script.finish,
            "stop_reason": tokens[-1] if script.finish == "stop" else None,
            "token_ids": tokens,
            "logprobs": {"content": content[:-1] if script.drop_logprob else content},
            "weight_versions": spans,
        }
        return {"choices": [choice]}


@asynccontextmanager
async def serving(script: Script, port: int = 0) -> AsyncIterator[str]:
    """Serves in this event loop; gives the address."""
    runner = web.AppRunner(Stub(script).app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _main(arguments: Sequence[str]) -> None:
    values = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    port = int(values.pop("port"))
    script = Script(name=values.pop("name"), key=os.environ["VLLM_API_KEY"])
    if code := values.pop("exit", ""):
        print("Traceback: the last word of a server", flush=True)
        sys.exit(int(code))
    if pid_file := values.pop("child", ""):
        # A child that outlives its parent, as vLLM's engine core does.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(pid_file, "a") as out:
            out.write(f"{child.pid}\n")
    for name, text in values.items():
        setattr(script, name, json.loads(text))
    async with serving(script, port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
