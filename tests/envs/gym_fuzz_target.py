"""What the workers of test_gym_fuzz run."""

from telescope_jax.envs.gym_scorer import dataset, digest, score

__all__ = ["score_each", "score_one", "sources"]


def sources(names):
    """One small dataset of each name, made in the worker."""
    return {name: dataset(name, {}, 1, 4) for name in names}


def score_each(made, name, answers):
    """Many verdicts in one process, since a process for each would take hours."""
    return [score_one(made, name, answer) for answer in answers]


def score_one(made, name, answer):
    """The item is the worker's own: some depend on its hash seed."""
    return score(made[name], 0, digest(made[name][0]["question"]), answer)
