"""The trainer: owns parameters, optimizer state and step, and trains one batch a call.

An update runs in one thread of its own, joined by `close`, so the event loop never waits for it.
A step always completes: when the gradient is not finite the parameters stay, the version still
counts, and `max_skipped_updates` of these in a row end the run.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from telescope_jax.config import OptimizerConfig, PolicyConfig
from telescope_jax.learner.loss import Denominators, LossSettings, finish
from telescope_jax.learner.lowering import abstract_batch, lower_update
from telescope_jax.learner.optimizer import learning_rate
from telescope_jax.learner.step import Step, UpdateReport
from telescope_jax.model.decoder import Decoder
from telescope_jax.sharding import bytes_per_device, path_name, place_rows, put, put_tree
from telescope_jax.types import LossStats, PackedBatch, Params, TrainState

_log = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class Learner:
    """interfaces.Trainer on one mesh."""

    def __init__(
        self,
        policy: PolicyConfig,
        vocab_size: int,
        mesh: Mesh,
        *,
        loss: LossSettings,
        optimizer: OptimizerConfig,
        number_of_steps: int,
        rows_per_microbatch: int,
        temperature: float = 1.0,
        minibatches: int = 1,
        old_logprobs: bool = False,
        params: Params | None = None,
        seed: int = 0,
    ):
        """
        Args:
          number_of_steps: over which the learning rate decays.
          rows_per_microbatch: rows of the one shape that is compiled.
          minibatches: updates a step; with 1, π_old is π without gradient and costs nothing.
          old_logprobs: let u be π/π_old, π_old being the parameters when the batch arrives;
            without it u is π/μ.
          params: version 0, on the host or on devices; None draws it from `seed`. float32 is
            rounded to the nearest of the master dtype. It is also the reference policy, kept only
            if the loss looks at it.
          seed: also of the stochastic rounding, if optimizer.master_dtype is bfloat16.

        Raises:
          ValueError: a parameter without a sharding rule, or `params` of another structure.
        """
        self.mesh = mesh
        self.decoder = Decoder(policy, vocab_size, mesh=mesh)
        self._everywhere = NamedSharding(mesh, P())
        self._optimizer, self._number_of_steps, self._seed = optimizer, number_of_steps, seed
        self._rows = rows_per_microbatch
        self._needs_old = needs_old_logprobs(old_logprobs, minibatches)
        self._step = Step(
            self.decoder,
            mesh,
            loss,
            optimizer,
            temperature=temperature,
            stable_old=old_logprobs and minibatches == 1,
        )
        if params is None:
            params = self._step.init_params(jax.random.key(seed))
        else:
            if self._step.rounds:
                params = jax.tree.map(_narrow, params)
            check_structure(params, self._step.params, "the given parameters")
            params = put_tree(params, self._step.params_shardings)
        opt_state = self._step.init_opt_state(params)
        self._state = TrainState(params, opt_state, self._scalar(np.int32(0)))
        self._reference = params if loss.needs_reference_logprobs else None
        self._skipped_in_a_row = 0
        self._compilations = _Compilations()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    @property
    def step(self) -> int:
        """Completed steps, which is also the version of `params`."""
        return int(jax.device_get(self._state.step))

    @property
    def params(self) -> Params:
        """The current version; a later update makes new arrays and leaves these alone."""
        return self._state.params

    async def update(self, batch: Sequence[PackedBatch]) -> LossStats:
        """Trains one step on a batch, given as one PackedBatch a minibatch.

        Raises:
          RuntimeError: too many updates in a row had a gradient that is not finite; the step is
            complete nevertheless.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.update_now, batch)

    def update_now(self, batch: Sequence[PackedBatch]) -> LossStats:
        """`update`, in the calling thread."""
        compiled_before = self._compilations.of_this_thread()
        with jax.transfer_guard("disallow"):
            stats, reports = self._train(batch)
        return self._conclude(stats, reports, self._compilations.of_this_thread() - compiled_before)

    def save(self) -> Mapping[str, Any]:
        """Parameters, optimizer state, step, and the reference policy if the loss has one.

        The arrays stay valid whatever is trained later: parameters are never donated, and the
        optimizer state is a copy.
        """
        state = {
            "params": self._state.params,
            "opt_state": self._step.copy_opt_state(self._state.opt_state),
            "step": self._state.step,
        }
        return state if self._reference is None else {**state, "reference": self._reference}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `save` gave, of any mesh, on the host or on devices.

        Raises:
          ValueError: lists what is missing, unexpected, or of another shape or dtype.
        """
        check_structure(state, self.save_structure(), "the saved state")
        self._state = TrainState(
            put_tree(state["params"], self._step.params_shardings),
            # Copied, since the next update donates it and the caller may still hold the arrays.
            self._step.copy_opt_state(put_tree(state["opt_state"], self._step.opt_shardings)),
            self._scalar(state["step"]),
        )
        if self._reference is not None:
            self._reference = put_tree(state["reference"], self._step.params_shardings)

    def save_structure(self) -> Mapping[str, Any]:
        """Shapes, dtypes and shardings of what `save` returns, for reading it onto this mesh."""
        state = {
            "params": self.params,
            "opt_state": self._state.opt_state,
            "step": self._state.step,
        }
        return describe(
            state if self._reference is None else {**state, "reference": self._reference}
        )

    def lowered(self, seq_len: int) -> Mapping[str, jax.stages.Lowered]:
        """The functions of an update, before they are compiled; see lowering.py."""
        batch = abstract_batch(
            self.mesh,
            self._rows,
            seq_len,
            old=self._needs_old,
            reference=self._reference is not None,
        )
        return lower_update(self._step, self.mesh, batch)

    def memory(self) -> str:
        """What one device holds between updates, and what a gradient adds to it."""
        mib = 1 << 20
        params, moments = (
            bytes_per_device(tree) / mib for tree in (self.params, self._state.opt_state)
        )
        gradient = 4 / jnp.dtype(self._optimizer.master_dtype).itemsize * params
        reference = params if self._reference is not None else 0.0
        total = params + moments + gradient + reference
        return (
            f"{total:,.1f} MiB a device before activations: parameters {params:,.1f}, optimizer "
            f"state {moments:,.1f}, gradient {gradient:,.1f}"
            + (f", reference policy {reference:,.1f}" if reference else "")
        )

    def close(self) -> None:
        """Waits for a running update and ends the thread; the parameters stay readable."""
        self._thread.shutdown(wait=True)
        self._compilations.stop()

    def _scalar(self, value: Any) -> jax.Array:
        return put(value, self._everywhere)

    def _train(
        self, batch: Sequence[PackedBatch]
    ) -> tuple[list[dict[str, float]], list[UpdateReport]]:
        run, state = self._step, self._state
        rate = learning_rate(self._optimizer, self.step, self._number_of_steps)
        rate = self._scalar(np.float32(rate))
        # Every minibatch is scored before the first update: π_old is the policy at arrival.
        minibatches = [list(self._microbatches(minibatch)) for minibatch in batch]
        params, opt_state, reports = state.params, state.opt_state, []
        for update, microbatches in enumerate(minibatches):
            totals = Denominators(*(self._scalar(np.float32(0)) for _ in Denominators._fields))
            for microbatch in microbatches:
                totals = run.count(microbatch, totals)
            sums = run.zeros()
            for microbatch in microbatches:
                sums = run.accumulate(params, sums, microbatch, totals)
            draw = [self._seed, self.step, update]
            draw = self._scalar(np.array(draw, np.uint32)) if run.rounds else None
            params, opt_state, report = run.apply(params, opt_state, sums, rate, draw)
            del sums  # before the next zeros are made; where it is not donated it would stay
            reports.append(report)
        reports = jax.device_get(reports)
        self._state = TrainState(params, opt_state, self._scalar(np.int32(self.step + 1)))
        return [finish(report.loss) for report in reports], reports

    def _microbatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        rows = batch.tokens.shape[0]
        if rows % self._rows or not rows:
            raise ValueError(
                f"a minibatch of {rows} rows is not a multiple of "
                f"rows_per_microbatch={self._rows}; pack it with that number"
            )
        for start in range(0, rows, self._rows):
            part = jax.tree.map(lambda x, at=start: np.asarray(x)[at : at + self._rows], batch)
            arrived = part = place_rows(part, self.mesh)
            if self._needs_old:
                part = part._replace(old_logprobs=self._step.score(self.params, arrived))
            if self._reference is not None:
                scores = self._step.score(self._reference, arrived)
                part = part._replace(reference_logprobs=scores)
            yield part

    def _conclude(
        self, stats: list[dict[str, float]], reports: list[UpdateReport], compilations: int
    ) -> LossStats:
        for report in reports:
            self._skipped_in_a_row = 0 if report.finite else self._skipped_in_a_row + 1
        skipped = sum(not report.finite for report in reports)
        if skipped:
            _log.warning(
                "step %d: %d of %d updates skipped, gradient not finite",
                self.step - 1,
                skipped,
                len(reports),
            )
        if unscored := sum(one["unscored_tokens"] for one in stats):
            _log.warning("step %d: %d tokens without a sampler log-prob", self.step - 1, unscored)
        limit = self._optimizer.max_skipped_updates
        if self._skipped_in_a_row >= limit:
            raise RuntimeError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row "
                f"(optimizer.max_skipped_updates={limit}); the last one was step {self.step - 1}, "
                f"loss {stats[-1]['loss']}, gradient norm {reports[-1].grad_norm}; lower "
                "optimizer.learning_rate, or start from an earlier checkpoint"
            )

        def mean(name: str) -> float:
            # Weighed by tokens, so that two minibatches say what one batch would have said.
            weights = [one["token_count"] for one in stats]
            pairs = [(w, one[name]) for w, one in zip(weights, stats, strict=True) if w]
            total = sum(w for w, _ in pairs)
            return sum(w * value for w, value in pairs) / total if total else float("nan")

        return LossStats(
            loss=float(np.mean([one["loss"] for one in stats])),
            ratio_mean=mean("ratio_mean"),
            ess=mean("ess"),
            truncated_fraction=mean("truncated_fraction"),
            kl=mean("kl"),
            entropy=mean("entropy"),
            grad_norm=float(np.mean([report.grad_norm for report in reports])),
            learning_rate=learning_rate(self._optimizer, self.step - 1, self._number_of_steps),
            token_count=sum(one["token_count"] for one in stats),
            rejected_fraction=mean("rejected_fraction"),
            unscored_tokens=sum(one["unscored_tokens"] for one in stats),
            clipped_fraction=mean("clipped_fraction"),
            skipped_updates=skipped,
            compilations=compilations,
        )


class _Compilations:
    """Counts XLA compilations a thread: an engine that compiles next door is not this step's."""

    def __init__(self):
        self._of_thread: dict[int, int] = {}
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def of_this_thread(self) -> int:
        return self._of_thread.get(threading.get_ident(), 0)

    def stop(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == _COMPILE_EVENT:
            thread = threading.get_ident()
            self._of_thread[thread] = self._of_thread.get(thread, 0) + 1


def needs_old_logprobs(old_logprobs: bool, minibatches: int) -> bool:
    """Whether a batch is scored when it arrives; with one update π_old is π, without gradient."""
    return old_logprobs and minibatches > 1


def _narrow(leaf: Any) -> Any:
    return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf


def describe(tree: Any) -> Any:
    """The shape, dtype and sharding of every leaf, without its values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def check_structure(found: Any, expected: Any, what: str) -> None:
    """Compares two trees leaf by leaf.

    Raises:
      ValueError: lists every path that is missing, unexpected, or of another shape or dtype.
    """

    def leaves(tree: Any) -> dict[str, tuple]:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        return {path_name(path): (tuple(x.shape), jnp.dtype(x.dtype)) for path, x in flat}

    has, wants = leaves(found), leaves(expected)
    problems = [f"missing {name}" for name in wants.keys() - has.keys()]
    problems += [f"unexpected {name}" for name in has.keys() - wants.keys()]
    problems += [
        f"{name} is {has[name][1]}{list(has[name][0])}, not {wants[name][1]}{list(wants[name][0])}"
        for name in wants.keys() & has.keys()
        if has[name] != wants[name]
    ]
    if problems:
        raise ValueError(f"{what} does not fit this model: {'; '.join(sorted(problems))}")
