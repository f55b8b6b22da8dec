"""The whole configuration: one typed tree, one docstring a field, and `check()`.

Every default is decided here and nowhere else. A part receives its own sub-config, never the root.
`check()` states the rules that join fields, and reports every broken one in one error.
The rules are in `config_rules.py`, the command line that fills the tree in `flags.py`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from telescope_jax.config_rules import rules, warnings

Algorithm = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "cispo", "gspo", "sapo"]
Advantages = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]
Objective = Literal["policy_gradient", "ppo", "cispo", "gspo", "sapo"]

ALGORITHMS: dict[str, tuple[Advantages, Objective]] = {
    "grpo": ("grpo", "policy_gradient"),
    "dr_grpo": ("dr_grpo", "policy_gradient"),
    "rloo": ("rloo", "policy_gradient"),
    "reinforce_pp": ("reinforce_pp", "policy_gradient"),
    "ppo": ("grpo", "ppo"),
    "cispo": ("grpo", "cispo"),
    "gspo": ("grpo", "gspo"),
    "sapo": ("grpo", "sapo"),
}
"""A name from the papers -> its advantages (scoring/) and its objective (learner/loss.py)."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, in one message."""


@dataclass(slots=True)
class EnvConfig:
    name: str = "sums"
    """`sums`, `gsm8k`, `reasoning_gym:DATASET`, or your own `package.module:Class`."""
    seed: int = 0
    """Seed of the procedural prompts; the run's `seed` shuffles, this one makes them."""
    terms: int = 4
    """sums: numbers in a sum, ≥ 2."""
    digits: int = 1
    """sums: decimal digits of each number, ≥ 1."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the environment's class, by name."""
    reward_workers: int = 1
    """Processes that grade what is not plain arithmetic; killed and replaced on a deadline."""
    reward_timeout_s: float = 10.0
    """Deadline of one grading, seconds."""
    reward_memory_mb: int = 2_048
    """Address-space limit of a grading process, MiB."""
    reward_confined: bool = True
    """Keep graders from other files, the network and signals (Linux 5.13; else a warning). False is
    for an environment's tools that need one of these."""


@dataclass(slots=True)
class SamplingConfig:
    temperature: float = 1.0
    """Of training rollouts, > 0. The trainer divides its logits by it too."""
    max_tokens: int = 16
    """Most sampled tokens in one completion."""
    max_prompt_tokens: int = 32
    """A longer prompt is dropped as prompt_too_long."""
    max_episode_tokens: int = 0
    """Most tokens of a whole episode, all turns; 0 = max_prompt_tokens + max_tokens."""
    top_p: float = 1.0
    """Must be 1: the trainer scores the whole vocabulary."""
    top_k: int = 0
    """Must be 0, for the same reason."""


@dataclass(slots=True)
class PolicyConfig:
    checkpoint: str = ""
    """Hugging Face folder or hub name to start from, which decides all sizes; "" is random weights
    of the sizes below."""
    chat_template: str = ""
    """With `checkpoint`: a Jinja file for prompts; "" = the checkpoint's own, none = raw text."""
    family: Literal["llama", "qwen2", "qwen3"] = "qwen2"
    """llama: no bias; qwen2: bias on q, k, v; qwen3: RMSNorm on q and k."""
    vocab_size: int = 0
    """V; 0 takes the tokenizer's."""
    width: int = 128
    """D, the residual stream."""
    layers: int = 2
    """Decoder blocks."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key/value heads; divides `heads`."""
    head_dim: int = 32
    """Width of one head; not always width / heads (Qwen3)."""
    mlp_width: int = 512
    """Hidden width of the gated MLP."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Their stretch in Hugging Face's words: rope_type (llama3, yarn) and its settings."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    tied_embeddings: bool = True
    """Unembed with the transposed embedding."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Activations and matmuls; logits stay float32, and optimizer.master_dtype is another field."""
    remat: Literal["none", "block", "dots"] = "none"
    """What backward recomputes: nothing, each block, or all but matmul results."""
    scan_layers: bool = False
    """The trainer runs its layers as one loop: compiling costs the same at any depth, and so does
    the memory that weights gathered over fsdp take. False writes them out one after another."""
    attention: Literal["auto", "reference", "chunked", "cudnn", "splash"] = "auto"
    """Implementation of attention, kernels/attention."""
    logprob: Literal["auto", "reference", "chunked", "pallas_tpu", "pallas_gpu"] = "auto"
    """Implementation of the per-token log-probs, kernels/logprob."""


@dataclass(slots=True)
class OptimizerConfig:
    learning_rate: float = 1e-5
    """Peak of the schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, over `number_of_steps`."""
    warmup_steps: int = 0
    """Linear from 0 to the peak."""
    final_fraction: float = 0.0
    """Last learning rate over the peak, for linear and cosine."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.98
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are kept in; bfloat16 is rounded stochastically, and updates stay float32."""
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """What Adam's first moment is kept in; the second one stays float32 (README says why)."""
    weight_decay: float = 0.0
    """AdamW's, on matrices only."""
    clip_norm: float = 1.0
    """Global gradient norm limit; 0 = off."""
    max_skipped_updates: int = 5
    """Non-finite gradients in a row that end the run."""


@dataclass(slots=True)
class LossConfig:
    advantages: Literal["auto", "grpo", "dr_grpo", "rloo", "reinforce_pp"] = "auto"
    """`auto`: what `algorithm` says."""
    objective: Literal["auto", "policy_gradient", "ppo", "cispo", "gspo", "sapo"] = "auto"
    """`auto`: what `algorithm` says."""
    normalizer: Literal["tokens", "sequences", "constant"] = "tokens"
    """What the summed loss is divided by, over the global batch."""
    normalizer_constant: float = 0.0
    """Tokens a sequence for `constant` (Dr. GRPO); 0 takes sampling.max_tokens."""
    old_logprobs: bool = False
    """Recompute π_old when the batch arrives; needed by ratio objectives beside TIS."""
    tis_mode: Literal["truncate", "icepop"] = "truncate"
    """truncate: min(ρ, cap); icepop: ρ where floor ≤ ρ ≤ cap, else 0."""
    tis_floor: float = 0.0
    """icepop's lower bound of ρ."""
    clip_low: float = 0.2
    """Ratio objectives: 1 − clip_low is the lower bound of u."""
    clip_high: float = 0.2
    """Ratio objectives: 1 + clip_high is the upper bound of u."""
    dual_clip: float = 0.0
    """ppo, A < 0 only: loss at most −c·A, c > 1; 0 = off."""
    sapo_tau_positive: float = 1.0
    """sapo: temperature where A > 0."""
    sapo_tau_negative: float = 1.05
    """sapo: temperature where A ≤ 0."""
    sequence_mask_low: float = 0.0
    """A sequence whose exp(mean log-ratio) is lower contributes nothing; 0 = off."""
    sequence_mask_high: float = 0.0
    """The same, higher; 0 = off."""
    kl_coef: float = 0.0
    """KL to the sampler μ, added after the TIS weight; 0 = off."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """k2 = d²/2, k3 = exp(d) − 1 − d."""
    reference_kl_coef: float = 0.0
    """KL to the frozen first policy (GRPO's β); 0 keeps no reference in memory."""
    entropy_coef: float = 0.0
    """Entropy bonus; 0 = off."""
    drop_zero_advantage: bool = True
    """A group whose rewards are all equal is dropped before N is counted, and replaced."""
    mask_truncated: bool = False
    """Rollouts cut by max_tokens lend their reward to the group but train no token (DAPO)."""


@dataclass(slots=True)
class BatchConfig:
    seq_len: int = 256
    """T, tokens of a packed row; at least the longest rollout."""
    rows_per_microbatch: int = 4
    """B of one microbatch, the unit that is compiled; a multiple of data × fsdp devices."""
    minibatches: int = 1
    """Optimizer updates a step."""


@dataclass(slots=True)
class MeshConfig:
    data: int = 1
    """Copies of the parameters; rows are split over data × fsdp."""
    fsdp: int = 1
    """Parts that the parameters and the optimizer state are split into."""
    tensor: int = 1
    """Parts that heads, MLP and vocabulary are split into."""
    context: int = 1
    """Parts that each row's tokens are split into, for rollouts too long for one device; parameters
    and optimizer state are split over fsdp × context."""


@dataclass(slots=True)
class EngineConfig:
    kind: Literal["jax", "vllm"] = "jax"
    """jax: the embedded engine; vllm: a pool of servers."""
    own_process: bool = True
    """jax: run in a process of its own, with weights through the store; False: in this one."""
    slots: int = 64
    """jax: rollouts decoded at once."""
    tokens_per_call: int = 8
    """jax: decode steps in one jitted call; a cancel or new weights wait for at most one call."""
    prefill_rows: int = 16
    """jax: prompts prefilled in one call; a fixed shape, so that results do not depend on load."""
    distort_temperature: float = 1.0
    """jax, for studies: training answers are sampled at this times sampling.temperature, which the
    trainer goes on scoring at: a sampler that differs on purpose. Its log-probs are those of what
    it sampled from. 1 = off; evals are never distorted."""
    distort_int8: bool = False
    """jax, for studies: the training engine rounds its weight matrices to 8 bits. False = off."""
    start_timeout_s: float = 300.0
    """Longest wait for an engine to come up, seconds."""
    request_timeout_s: float = 600.0
    """Longest wait for one completion, seconds."""
    max_restarts: int = 3
    """Deaths of an engine process, or of one server, that are put up with before the run ends."""
    servers: int = 1
    """vllm: servers that are started on this machine."""
    urls: tuple[str, ...] = ()
    """vllm: addresses of servers that run already, instead of `servers`; they were started with our
    plugin, and their key is in TELESCOPE_ENGINE_KEY."""
    tensor_parallel: int = 1
    """vllm: accelerators of one server."""
    deploy_at_once: bool = False
    """vllm: new weights go to all servers at the same time, not to one after another."""
    handshake_tol: float = 0.0
    """vllm: most that 19 of 20 log-probs differ by, nats; 0 decides by policy.compute_dtype."""
    server_arguments: tuple[str, ...] = ()
    """vllm: further arguments of each server's command line."""


@dataclass(slots=True)
class PlacementConfig:
    trainer_devices: str = ""
    """GPUs of the trainer by number, as in "0,1"; "" is all that JAX sees."""
    trainer_memory_fraction: float = 0.0
    """Share of a GPU's memory that the trainer's JAX takes; 0 is JAX's own default. One GPU for
    trainer and vLLM: 0.45 for each."""
    engine_devices: tuple[str, ...] = ()
    """vllm: accelerators of each server, as in ("0,1", "2,3"), evals' servers last; () leaves it to
    vLLM."""
    engine_memory_fraction: float = 0.0
    """vllm: share of an accelerator's memory that a server takes; 0 is vLLM's own default."""


@dataclass(slots=True)
class EvalConfig:
    items: int = 1_024
    """Held-out prompts; each is answered once greedily and, if `sampled`, once more."""
    sampled: bool = True
    """Answer each prompt a second time, at the training temperature."""
    at_start: bool = True
    """Evaluate version 0."""
    max_tokens: int = 0
    """Most sampled tokens of a held-out answer; 0 = sampling.max_tokens. With more of them,
    `brief_accuracy` is what it would be with those of training."""
    timeout_s: float = 600.0
    """Longest wait for one eval, seconds."""
    servers: int = 0
    """vllm: servers that only play evals, so that training rollouts never wait for one; 0 plays
    them on the training servers, which then stay at the version of the eval until it is done."""


@dataclass(slots=True)
class WarmStartConfig:
    steps: int = 0
    """Supervised steps on the environment's own solutions before RL, at most; 0 = off."""
    until_probability: float = 0.0
    """End early, once further training solutions have this mean probability, the accuracy of
    sampling; tested every 2 steps on 256 of them; 0 = never. A number of steps is no ability:
    seeds and packings learn at different times."""
    batch_size: int = 64
    """Solutions a step."""
    learning_rate: float = 2e-3
    """Constant; the optimizer is a fresh one, and so is RL's after it."""
    cache: bool = True
    """Keep the result under the cache folder by a hash of all that decides it."""


@dataclass(slots=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0 = only at the end and on a signal."""
    keep_last: int = 2
    """Newest checkpoints that stay."""
    keep_every: int = 0
    """Checkpoints of the multiples of it stay too, whatever their age; 0 = none."""
    save_training_state: bool = True
    """False keeps weights only: a run cannot go on from them, an export and an eval can."""
    max_failures: int = 0
    """Saves in a row that may fail (a full disk) before the run ends; each is a warning and counts
    in checkpoint/failures."""
    grace_s: float = 30.0
    """Longest time from a signal, or a failure, to the end of the process, seconds: the running
    update, the checkpoint, and closing. Past it the last checkpoint has to do."""
    resume_exit_code: int = 0
    """Exit code after a SIGTERM's checkpoint; 0 = 143."""


@dataclass(slots=True)
class LogConfig:
    rollouts_every: int = 10
    """Steps between tables of trained rollouts, rollouts/step_*.parquet; 0 = none."""


@dataclass(slots=True)
class Config:
    seed: int = 0
    """Decides initial weights, prompt order and every sample."""
    number_of_steps: int = 100
    """Batches to train."""
    groups_per_batch: int = 16
    """Prompts in a batch."""
    group_size: int = 8
    """G, rollouts of one prompt."""
    algorithm: Algorithm = "grpo"
    """A name from the papers; sets advantages and objective."""
    eval_every: int = 20
    """Steps between evals of held-out prompts; 0 = only at the start and the end."""
    max_async_rollout: int = 2
    """Steps that inference may run ahead of training; 0 = synchronous."""
    max_off_policy_steps: int = 8
    """Weight updates that a trained token may be behind; −1 = no limit."""
    use_tis: bool = True
    """Weigh each token by its truncated importance ratio."""
    tis_cap: float = 2.0
    """Upper bound of that ratio, > 0; inf is plain importance sampling."""
    max_attempts: int = 3
    """Tries at one prompt before it is given up."""
    max_untrainable_groups: int = 1_000
    """Groups in a row that end untrainable (equal rewards, failures) before the run ends."""
    watchdog_s: float = 300.0
    """Longest time without a trainable group, seconds; the third time in a row ends the run. Until
    the first step is trained it is at least engine.start_timeout_s: that time is compilation."""
    env: EnvConfig = field(default_factory=EnvConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def advantages(self) -> str:
        """The advantage estimator in force."""
        chosen = self.loss.advantages
        return ALGORITHMS[self.algorithm][0] if chosen == "auto" else chosen

    def objective(self) -> str:
        """The policy objective in force."""
        chosen = self.loss.objective
        return ALGORITHMS[self.algorithm][1] if chosen == "auto" else chosen

    def context(self) -> int:
        """Most tokens of an episode, prompt included."""
        one_turn = self.sampling.max_prompt_tokens + self.sampling.max_tokens
        return self.sampling.max_episode_tokens or one_turn

    def eval_context(self) -> int:
        """The same of an episode of an eval."""
        more = self.eval.max_tokens and self.eval.max_tokens - self.sampling.max_tokens
        return self.context() + more

    def engine_context(self) -> int:
        """The longer of the two: what every engine must have room for."""
        return max(self.context(), self.eval_context())

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant, for the start of the log."""
        return warnings(self)

    def check(self) -> None:
        """Every rule that joins fields, or bounds one.

        Raises:
          ConfigError: lists all that is broken, each with its numbers and the remedy.
        """
        if broken := [message for holds, message in rules(self) if not holds]:
            raise ConfigError("\n".join(broken))
