"""What must hold of a configuration: (whether it holds, what to say if it does not).

A message names the fields with their values and the remedy. `Config.check` reports all that fail.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telescope_jax.config import Config

Rule = tuple[bool, str]

RATIO_OBJECTIVES = ("ppo", "cispo", "gspo", "sapo")
"""Objectives with a ratio u of their own; beside TIS they need π_old, since both ratios
against μ would count the step from μ to π twice."""


def rules(config: "Config") -> list[Rule]:
    """Every rule that applies to `config`."""
    found = bounds(config) + joint_rules(config) + engine_rules(config)
    if not config.policy.checkpoint or config.policy.vocab_size:
        # Otherwise the sizes come from the checkpoint's config.json; setup.py checks again then.
        found += size_rules(config)
    return found


def bounds(config: "Config") -> list[Rule]:
    """Bounds of single fields."""
    at_least = {
        "seed": (config.seed, 0),
        "env.seed": (config.env.seed, 0),
        "checkpoint.resume_exit_code": (config.checkpoint.resume_exit_code, 0),
        "number_of_steps": (config.number_of_steps, 1),
        "groups_per_batch": (config.groups_per_batch, 1),
        "group_size": (config.group_size, 1),
        "eval_every": (config.eval_every, 0),
        "max_async_rollout": (config.max_async_rollout, 0),
        "max_off_policy_steps": (config.max_off_policy_steps, -1),
        "max_attempts": (config.max_attempts, 1),
        "max_untrainable_groups": (config.max_untrainable_groups, 1),
        "env.terms": (config.env.terms, 2),
        "env.digits": (config.env.digits, 1),
        "env.reward_workers": (config.env.reward_workers, 1),
        "env.reward_memory_mb": (config.env.reward_memory_mb, 256),
        "sampling.max_tokens": (config.sampling.max_tokens, 1),
        "sampling.max_prompt_tokens": (config.sampling.max_prompt_tokens, 1),
        "sampling.max_episode_tokens": (config.sampling.max_episode_tokens, 0),
        "policy.vocab_size": (config.policy.vocab_size, 0),
        "policy.width": (config.policy.width, 1),
        "policy.layers": (config.policy.layers, 1),
        "policy.heads": (config.policy.heads, 1),
        "policy.kv_heads": (config.policy.kv_heads, 1),
        "policy.head_dim": (config.policy.head_dim, 2),
        "policy.mlp_width": (config.policy.mlp_width, 1),
        "optimizer.warmup_steps": (config.optimizer.warmup_steps, 0),
        "optimizer.max_skipped_updates": (config.optimizer.max_skipped_updates, 1),
        "batch.rows_per_microbatch": (config.batch.rows_per_microbatch, 1),
        "batch.minibatches": (config.batch.minibatches, 1),
        "mesh.data": (config.mesh.data, 1),
        "mesh.fsdp": (config.mesh.fsdp, 1),
        "mesh.tensor": (config.mesh.tensor, 1),
        "mesh.context": (config.mesh.context, 1),
        "engine.slots": (config.engine.slots, 1),
        "engine.tokens_per_call": (config.engine.tokens_per_call, 1),
        "engine.prefill_rows": (config.engine.prefill_rows, 1),
        "engine.max_restarts": (config.engine.max_restarts, 0),
        "engine.servers": (config.engine.servers, 1),
        "engine.tensor_parallel": (config.engine.tensor_parallel, 1),
        "eval.servers": (config.eval.servers, 0),
        "eval.items": (config.eval.items, 1),
        "eval.max_tokens": (config.eval.max_tokens, 0),
        "warm_start.steps": (config.warm_start.steps, 0),
        "warm_start.batch_size": (config.warm_start.batch_size, 1),
        "log.rollouts_every": (config.log.rollouts_every, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep_last": (config.checkpoint.keep_last, 1),
        "checkpoint.keep_every": (config.checkpoint.keep_every, 0),
        "checkpoint.max_failures": (config.checkpoint.max_failures, 0),
    }
    positive = {
        "tis_cap": config.tis_cap,
        "watchdog_s": config.watchdog_s,
        "env.reward_timeout_s": config.env.reward_timeout_s,
        "sampling.temperature": config.sampling.temperature,
        "policy.rope_theta": config.policy.rope_theta,
        "policy.norm_eps": config.policy.norm_eps,
        "loss.sapo_tau_positive": config.loss.sapo_tau_positive,
        "loss.sapo_tau_negative": config.loss.sapo_tau_negative,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.eps": config.optimizer.eps,
        "engine.distort_temperature": config.engine.distort_temperature,
        "engine.start_timeout_s": config.engine.start_timeout_s,
        "engine.request_timeout_s": config.engine.request_timeout_s,
        "eval.timeout_s": config.eval.timeout_s,
        "warm_start.learning_rate": config.warm_start.learning_rate,
        "checkpoint.grace_s": config.checkpoint.grace_s,
    }
    not_negative = {
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip_norm": config.optimizer.clip_norm,
        "optimizer.final_fraction": config.optimizer.final_fraction,
        "engine.handshake_tol": config.engine.handshake_tol,
        "warm_start.until_probability": config.warm_start.until_probability,
        "placement.engine_memory_fraction": config.placement.engine_memory_fraction,
        "placement.trainer_memory_fraction": config.placement.trainer_memory_fraction,
        "loss.tis_floor": config.loss.tis_floor,
        "loss.clip_low": config.loss.clip_low,
        "loss.clip_high": config.loss.clip_high,
        "loss.normalizer_constant": config.loss.normalizer_constant,
        "loss.kl_coef": config.loss.kl_coef,
        "loss.reference_kl_coef": config.loss.reference_kl_coef,
        "loss.sequence_mask_low": config.loss.sequence_mask_low,
        "loss.sequence_mask_high": config.loss.sequence_mask_high,
    }
    at_most = {
        "seed": (config.seed, 2**32 - 1),
        "number_of_steps": (config.number_of_steps, 10**9),
        "groups_per_batch": (config.groups_per_batch, 10**6),
        "group_size": (config.group_size, 10**6),
        "eval.items": (config.eval.items, 10**7),
        "engine.slots": (config.engine.slots, 10**6),
        "warm_start.steps": (config.warm_start.steps, 10**9),
        "warm_start.until_probability": (config.warm_start.until_probability, 1),
        "checkpoint.resume_exit_code": (config.checkpoint.resume_exit_code, 255),
    }
    finite = {
        "sampling.temperature": config.sampling.temperature,
        "engine.distort_temperature": config.engine.distort_temperature,
        "policy.norm_eps": config.policy.norm_eps,
        "policy.rope_theta": config.policy.rope_theta,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "warm_start.learning_rate": config.warm_start.learning_rate,
        "loss.kl_coef": config.loss.kl_coef,
        "loss.reference_kl_coef": config.loss.reference_kl_coef,
        "loss.entropy_coef": config.loss.entropy_coef,
        "loss.sequence_mask_low": config.loss.sequence_mask_low,
    }
    rules = [(v >= low, f"{k}={v} must be at least {low}") for k, (v, low) in at_least.items()]
    rules += [(v > 0, f"{k}={v} must be positive") for k, v in positive.items()]
    rules += [(v >= 0, f"{k}={v} must not be negative") for k, v in not_negative.items()]
    rules += [(v <= high, f"{k}={v} must be at most {high}") for k, (v, high) in at_most.items()]
    rules += [(math.isfinite(v), f"{k}={v} must be finite") for k, v in finite.items()]
    return rules


def size_rules(config: "Config") -> list[Rule]:
    """What joins the sizes of the policy with the mesh."""
    policy, mesh = config.policy, config.mesh
    heads, kv_heads, tensor = policy.heads, max(1, policy.kv_heads), max(1, mesh.tensor)
    return [
        (
            heads % kv_heads == 0,
            f"policy.heads={heads} is not a multiple of policy.kv_heads={policy.kv_heads}",
        ),
        (
            kv_heads % tensor == 0,
            f"policy.kv_heads={policy.kv_heads} does not divide over mesh.tensor={mesh.tensor}",
        ),
        (
            policy.mlp_width % tensor == 0,
            f"policy.mlp_width={policy.mlp_width} does not divide over mesh.tensor={mesh.tensor}",
        ),
        (
            policy.head_dim % 2 == 0,
            f"policy.head_dim={policy.head_dim} must be even for rotary positions",
        ),
    ]


def joint_rules(config: "Config") -> list[Rule]:
    """What joins fields of sampling, loss, batch and optimizer."""
    rows, devices = config.batch.rows_per_microbatch, max(1, config.mesh.data * config.mesh.fsdp)
    longest = config.context()
    policy, loss = config.policy, config.loss
    mask_low, mask_high = loss.sequence_mask_low, loss.sequence_mask_high
    needs_old = config.objective() in RATIO_OBJECTIVES and config.use_tis
    return [
        (
            config.sampling.top_p == 1.0 and config.sampling.top_k == 0,
            f"sampling.top_p={config.sampling.top_p}, sampling.top_k={config.sampling.top_k} would "
            "train on a renormalised distribution that the trainer does not score; set them "
            "to 1.0 and 0",
        ),
        (
            not needs_old or loss.old_logprobs,
            f"objective {config.objective()} and use_tis both take their ratio against the "
            "sampler; set loss.old_logprobs=True (π/π_old and π_old/μ) or use_tis=False",
        ),
        (
            config.group_size > 1 or config.advantages() == "reinforce_pp",
            f"group_size={config.group_size} gives every rollout of {config.advantages()} the "
            "advantage 0; set group_size to 2 or more",
        ),
        (
            rows % devices == 0,
            f"batch.rows_per_microbatch={rows} does not divide over data × fsdp = {devices} "
            f"devices; set it to a multiple of {devices}",
        ),
        (
            config.batch.seq_len % max(1, config.mesh.context) == 0,
            f"batch.seq_len={config.batch.seq_len} does not divide over mesh.context="
            f"{config.mesh.context}; set it to a multiple of {config.mesh.context}",
        ),
        (
            config.batch.seq_len >= longest,
            f"batch.seq_len={config.batch.seq_len} cannot hold an episode of {longest} tokens; "
            f"set it to {longest} or more",
        ),
        (
            longest > config.sampling.max_prompt_tokens,
            f"sampling.max_episode_tokens={longest} leaves no room for an answer to a prompt "
            f"of max_prompt_tokens={config.sampling.max_prompt_tokens}",
        ),
        (
            config.groups_per_batch * config.group_size >= config.batch.minibatches,
            f"batch.minibatches={config.batch.minibatches} is more than the "
            f"{config.groups_per_batch * config.group_size} rollouts of a batch",
        ),
        (
            loss.dual_clip == 0 or loss.dual_clip > 1,
            f"loss.dual_clip={loss.dual_clip} must be above 1, or 0 for off",
        ),
        (
            loss.tis_mode != "icepop" or loss.tis_floor < config.tis_cap,
            f"loss.tis_floor={loss.tis_floor} is not below tis_cap={config.tis_cap}",
        ),
        (
            mask_high == 0 or mask_low < mask_high,
            f"loss.sequence_mask_low={mask_low} is not below sequence_mask_high={mask_high}",
        ),
        (
            config.optimizer.warmup_steps <= config.number_of_steps
            or config.optimizer.schedule == "constant",
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} is more than "
            f"number_of_steps={config.number_of_steps}",
        ),
        (
            0 <= config.optimizer.beta1 < 1 and 0 <= config.optimizer.beta2 < 1,
            f"optimizer.beta1={config.optimizer.beta1}, beta2={config.optimizer.beta2} must lie "
            "in [0, 1)",
        ),
        (
            not policy.checkpoint or config.warm_start.steps == 0,
            f"warm_start.steps={config.warm_start.steps} starts from random weights and "
            f"policy.checkpoint={policy.checkpoint} from trained ones; set one of them to "
            "0 or nothing",
        ),
        (
            bool(policy.checkpoint) or not policy.chat_template,
            f"policy.chat_template={policy.chat_template} needs policy.checkpoint: the "
            "character tokenizer has no chat template",
        ),
    ]


def engine_rules(config: "Config") -> list[Rule]:
    """What joins fields of engines and placement."""
    devices_of_servers = config.placement.engine_devices
    servers = config.engine.servers + config.eval.servers
    placement = config.placement
    trainers = set(filter(None, placement.trainer_devices.split(",")))
    shared = sorted(trainers & {gpu for gpus in devices_of_servers for gpu in gpus.split(",")})
    fractions = placement.trainer_memory_fraction, placement.engine_memory_fraction
    apart = bool(trainers and devices_of_servers and not shared)
    return [
        (
            all(gpu.isdigit() for gpu in trainers),
            f"placement.trainer_devices={placement.trainer_devices} is no list of numbers such as "
            "0,1",
        ),
        (
            not shared or all(fractions),
            f"placement.trainer_devices and placement.engine_devices share {', '.join(shared)}; "
            "set trainer_memory_fraction and engine_memory_fraction, as 0.45 and 0.45",
        ),
        (
            config.engine.kind != "vllm" or apart or sum(fractions) < 1,
            f"placement.trainer_memory_fraction={fractions[0]} and engine_memory_fraction="
            f"{fractions[1]} are more than one GPU has; lower them, or place trainer and engines "
            "on different devices",
        ),
        (
            not config.engine.urls or config.engine.kind == "vllm",
            f"engine.urls={list(config.engine.urls)} are vLLM servers; set engine.kind=vllm",
        ),
        (
            config.engine.kind == "jax" or config.engine.own_process,
            "engine.own_process=False keeps weights in this process's memory, where no vLLM "
            "server can read them; leave it at True",
        ),
        (
            config.engine.kind == "jax"
            or (config.engine.distort_temperature == 1 and not config.engine.distort_int8),
            f"engine.distort_temperature={config.engine.distort_temperature}, engine.distort_int8="
            f"{config.engine.distort_int8} distort the embedded engine alone, and the handshake "
            "would refuse such a server; set them to 1.0 and False, or engine.kind=jax",
        ),
        (
            not config.engine.urls or not config.eval.servers,
            f"eval.servers={config.eval.servers} are started here, beside engine.urls that are "
            "not; set eval.servers=0",
        ),
        (
            not devices_of_servers or len(devices_of_servers) == servers,
            f"placement.engine_devices names devices for {len(devices_of_servers)} servers; "
            f"engine.servers + eval.servers = {servers}",
        ),
        (
            max(fractions) < 1,
            f"placement.trainer_memory_fraction={fractions[0]}, engine_memory_fraction="
            f"{fractions[1]}: nothing is left for anybody else; set both below 1",
        ),
    ]


def warnings(config: "Config") -> list[str]:
    """What is allowed and probably not meant; see `Config.warnings`."""
    ahead, off_policy = config.max_async_rollout, config.max_off_policy_steps
    found = []
    if 0 <= off_policy < ahead:
        found.append(
            f"max_off_policy_steps={off_policy} is below max_async_rollout={ahead}: inference "
            f"runs {off_policy} steps ahead, since what starts earlier would be dropped"
        )
    if 1 < config.group_size < 4:
        found.append(
            f"group_size={config.group_size}: at a binary reward of mean p, a share of "
            f"p^{config.group_size} + (1 − p)^{config.group_size} of the groups has no signal "
            "(rollout/no_signal_fraction); a flat curve may mean only that"
        )
    if config.engine.distort_temperature != 1 or config.engine.distort_int8:
        found.append(
            f"engine.distort_temperature={config.engine.distort_temperature:g}, "
            f"engine.distort_int8={config.engine.distort_int8}: the sampler differs from the "
            "trainer on purpose"
        )
    return found
