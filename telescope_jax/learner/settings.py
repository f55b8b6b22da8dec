"""From the configuration to the loss: the one place that reads both."""

from telescope_jax.config import Config
from telescope_jax.learner.loss import LossSettings


def loss_settings(config: Config) -> LossSettings:
    """The settings of the loss that `config` asks for; `config.check()` has passed."""
    loss = config.loss
    masked = loss.sequence_mask_low > 0 or loss.sequence_mask_high > 0
    objective = config.objective()
    return LossSettings(
        objective="pg" if objective == "policy_gradient" else objective,
        use_tis=config.use_tis,
        tis_cap=config.tis_cap,
        tis_mode=loss.tis_mode,
        tis_floor=loss.tis_floor,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        sapo_tau_positive=loss.sapo_tau_positive,
        sapo_tau_negative=loss.sapo_tau_negative,
        sequence_mask=(
            (loss.sequence_mask_low, loss.sequence_mask_high or float("inf")) if masked else None
        ),
        kl_coef=loss.kl_coef,
        kl_estimator=loss.kl_estimator,
        reference_kl_coef=loss.reference_kl_coef,
        entropy_coef=loss.entropy_coef,
        normalizer=loss.normalizer,
        constant_length=loss.normalizer_constant or float(config.sampling.max_tokens),
    )
