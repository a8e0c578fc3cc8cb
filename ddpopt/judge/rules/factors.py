r"""How many times larger than a few errors that were seen one more error of the same kind may be.

Invariant: a right number exceeds the factor with at most the given chance, if errors are normal.
"""

import functools
import math

import mpmath

FALSE_ALARM = 1e-6
"""Probability that a right gradient is called wrong at L2, if it has a single element and normal errors."""


@functools.cache
def tail_factor(samples: int, chance: float = FALSE_ALARM) -> float:
    r"""The bound for one more error of the same kind, as a multiple of the samples' root mean square.

    For n errors drawn from a normal distribution around zero, the ratio of one more error to their root mean
    square follows Student's t distribution with n degrees of freedom. This is its two-sided quantile. An
    error that is the norm of many elements varies less, so for it the chance is smaller still.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).

    Args:
        samples: n.
        chance: the probability of exceeding the bound.

    Returns:
        The factor.

    >>> round(tail_factor(8), 1)
    13.3
    """

    def exceeded(log_t: mpmath.mpf) -> mpmath.mpf:
        x = samples / (samples + mpmath.exp(2 * log_t))
        return mpmath.log(mpmath.betainc(samples / 2, 0.5, 0, x, regularized=True) / chance)

    return math.exp(mpmath.findroot(exceeded, (0, 20), solver="anderson"))


def centered_factor(samples: int, chance: float = FALSE_ALARM) -> float:
    r"""The same factor for errors relative to the samples' own mean, if the truth is not known.

    The mean of n samples follows them: their deviations from it have a mean square of only
    :math:`(n - 1) / n` times the variance, with n - 1 degrees of freedom, and one more sample's deviation has
    a variance of :math:`(n + 1) / n` times it. Hence Student's quantile with n - 1 degrees of freedom, times
    :math:`\sqrt{(n + 1) / (n - 1)}`, as in the prediction interval for one more observation. Infinite for a
    single sample, which has no spread.

    >>> round(centered_factor(8), 1)
    17.9
    """
    if samples < 2:
        return math.inf
    return tail_factor(samples - 1, chance) * math.sqrt((samples + 1) / (samples - 1))
