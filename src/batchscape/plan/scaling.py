"""How the optimizer's settings follow the global batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from batchscape.config import Optimizer, Scaling, Sgd
from batchscape.errors import ConfigError

__all__ = ["scaled"]


def scaled(optimizer: Optimizer, scaling: Scaling, global_batch_size: int) -> Optimizer:
    """Return the optimizer's settings for a global batch.

    Parameters
    ----------
    optimizer : AdamW, Sgd or Muon
        Settings for the reference batch B0.
    scaling : Scaling
        The rules, and B0.
    global_batch_size : int
        The global batch B, in samples.

    Returns
    -------
    Optimizer
        Of the same kind; the very same settings where B is B0, or no rule is given.

    Raises
    ------
    ConfigError
        If a rule has nothing to apply to, or its outcome leaves the range of the setting.

    Notes
    -----
    With k = B / B0:

    * Learning rate: `linear` k (Goyal et al. 2017, arXiv 1706.02677, section 2.1), `sqrt` root of k
      (for Adam: Malladi et al. 2022, arXiv 2205.10287). Both of Muon's learning rates follow.
    * Betas of Adam, `half_life`: beta to the power k. A step then forgets as much as k steps of the
      reference batch did, and half-lives in tokens are held (Marek et al. 2025, arXiv 2507.07101,
      for the second moment; as in Malladi et al., both moments follow). The momenta of SGD and of
      Muon are not Adam's betas and stay as given: no such rule is established for them.
    * Weight decay, `timescale`: times k x old / new learning rate, so that B / (learning rate x
      weight decay), the tokens over which weights are averaged, is held (Wang and Aitchison 2024,
      arXiv 2405.13698; in tokens Bergsma et al. 2025, arXiv 2505.13738). The penalty of
      SGD shrinks the weights by the same product in each step, and follows the same rule.
    """
    if scaling.betas != "none" and isinstance(optimizer, Sgd):
        msg = (
            "scaling.betas=half_life is a rule for Adam's betas, and optimizer=sgd has none; use "
            "scaling.betas=none, or optimizer=adamw or muon"
        )
        raise ConfigError(msg)
    reference = scaling.reference_global_batch_size
    if reference is None or reference == global_batch_size:
        return optimizer
    k = global_batch_size / reference
    rate = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[scaling.learning_rate]
    changed: dict[str, Any] = {"learning_rate": optimizer.learning_rate * rate}
    if not isinstance(optimizer, Sgd):
        if optimizer.name == "muon":
            changed["adamw_learning_rate"] = optimizer.adamw_learning_rate * rate
        if scaling.betas == "half_life":
            changed |= {"beta1": optimizer.beta1**k, "beta2": optimizer.beta2**k}
    if scaling.weight_decay == "timescale":
        changed["weight_decay"] = optimizer.weight_decay * k / rate
    try:
        return replace(optimizer, **changed)
    except ValidationError as error:
        field = error.errors()[0]
        msg = (
            f"scaling from a global batch of {reference} to {global_batch_size} makes "
            f"optimizer.{field['loc'][0]} {field['input']}, which no optimizer can use; choose a "
            "nearer scaling.reference_global_batch_size"
        )
        raise ConfigError(msg) from None
