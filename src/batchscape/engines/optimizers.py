"""From a configuration to an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from batchscape.config import AdamW as AdamWConfig
from batchscape.config import Muon as MuonConfig
from batchscape.config import Optimizer as OptimizerConfig
from batchscape.config import Sgd as SgdConfig
from batchscape.engines.distributed import full_tensor
from batchscape.errors import ConfigError


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> Optimizer:
    """Build the optimizer of a run; only matrices decay.

    SGD and AdamW are PyTorch's fused kernels. Muon is PyTorch's too: its orthogonalisation is in
    bfloat16 whatever the precision of the run.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    built: Optimizer
    if isinstance(config, SgdConfig):
        built = SGD(
            _groups(parameters), momentum=config.momentum, nesterov=config.nesterov, fused=True
        )
        built.register_step_pre_hook(_begin_momentum)
    elif isinstance(config, AdamWConfig):
        built = _adamw(config, parameters)
    else:
        built = _muon_and_adamw(config, module, parameters)
    set_hyperparameters(built, config, 1.0)
    return built


def set_hyperparameters(optimizer: Optimizer, settings: OptimizerConfig, factor: float) -> None:
    """Give an optimizer the settings of a step, its learning rates times a factor."""
    for group in optimizer.param_groups:
        rate = settings.learning_rate
        if isinstance(settings, MuonConfig) and not group["is_muon"]:
            rate = settings.adamw_learning_rate
        group["lr"] = rate * factor
        group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        if "betas" in group and not isinstance(settings, SgdConfig):
            group["betas"] = (settings.beta1, settings.beta2)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of hidden layers, which Muon is for.

    These are the parameters of two dimensions, but

    * those of an `nn.Embedding`, hence also a last layer that is tied to it;
    * those of the last layer: the last module to be registered that has a matrix of its own,
      unless it lies within an `nn.ModuleList`, as the blocks of a transformer do.

    Convolutions have more dimensions and are left to AdamW, as are vectors. Source: K. Jordan,
    "Muon: an optimizer for hidden layers in neural networks", 2024.
    """
    block_module_ids = {
        id(inner)
        for blocks in module.modules()
        if isinstance(blocks, nn.ModuleList)
        for inner in blocks.modules()
    }
    embedding_ids = {
        id(p)
        for owner in module.modules()
        if isinstance(owner, nn.Embedding)
        for p in owner.parameters()
    }
    owners_and_matrices = [
        (owner, matrices)
        for owner in module.modules()
        if not isinstance(owner, nn.Embedding)
        and (matrices := [p for p in owner.parameters(recurse=False) if p.ndim == 2])
    ]
    if owners_and_matrices and id(owners_and_matrices[-1][0]) not in block_module_ids:
        owners_and_matrices.pop()
    trained = {id(p): p for _, matrices in owners_and_matrices for p in matrices if p.requires_grad}
    return [p for key, p in trained.items() if key not in embedding_ids]


def clip_gradients(module: nn.Module, largest_norm: float | None) -> torch.Tensor:
    """Scale the gradient down to `largest_norm` where it is longer; return its norm before."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    # Of gradients that are cut over ranks, this is the norm of the whole ones.
    norm = full_tensor(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if largest_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, largest_norm, norm)
    return norm


def _muon_and_adamw(
    config: MuonConfig, module: nn.Module, parameters: list[nn.Parameter]
) -> Optimizer:
    hidden = hidden_matrices(module)
    if not hidden:
        raise ConfigError(
            "optimizer=muon is for matrices of hidden layers, and this model has none (embeddings "
            "and the last layer are trained by AdamW); use optimizer=adamw"
        )
    hidden_ids = {id(p) for p in hidden}
    rest = [p for p in parameters if id(p) not in hidden_ids]
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ConfigError(
            "optimizer=muon needs torch.optim.Muon, which PyTorch ships since 2.9; this is "
            f"{torch.__version__}. Use a newer one, or optimizer=adamw"
        )
    muon_part = muon(
        [{"params": hidden, "decays": True, "is_muon": True}],
        momentum=config.momentum,
        nesterov=True,
        ns_steps=config.newton_schulz_steps,
    )
    return _MuonAndAdamW(muon_part, _adamw(config, rest))


class _MuonAndAdamW(Optimizer):
    """Two optimizers that share the parameters of a model, as one.

    With a scaled loss it is told on the device whether a gradient overflowed, as fused kernels are
    (`found_inf`, after the scale was taken out of the gradients): PyTorch's Muon knows nothing of
    that, and the host would have to wait for the device to leave its update out.
    """

    _step_supports_amp_scaling = True
    """Asked for by torch's `GradScaler`."""
    found_inf: torch.Tensor
    """Above 0 where a gradient overflowed; there during a step, given by a `GradScaler`."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._parts = {"muon": muon, "adamw": adamw}
        super().__init__([group for part in self._each() for group in part.param_groups], {})
        self._share_groups()

    # No closure, which torch's signature allows: two optimizers would call it twice.
    def step(  # type: ignore[override]
        self,
        closure: None = None,  # noqa: ARG002  (a wrapper of the optimizer, as of accelerate, passes it)
    ) -> None:
        """Update the parameters of both; none where a gradient overflowed."""
        muon, adamw = self._each()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            muon.step()
            adamw.step()
            return
        self._step_unless(found_inf > 0)
        adamw.grad_scale, adamw.found_inf = None, found_inf  # type: ignore[attr-defined]
        adamw.step()
        del adamw.grad_scale, adamw.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def _step_unless(self, overflow: torch.Tensor) -> None:
        """Update by Muon, and undo the update where there is an overflow.

        One matrix after the other, so that only one and its momentum are in memory twice.
        """
        muon = self._parts["muon"]
        groups = muon.param_groups
        for group in groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                matrix_before = matrix.clone()
                momentum = muon.state[matrix].get("momentum_buffer")
                momentum = None if momentum is None else momentum.clone()
                muon.param_groups = [{**group, "params": [matrix]}]
                muon.step()
                after = muon.state[matrix]["momentum_buffer"]
                matrix.copy_(torch.where(overflow, matrix_before, matrix))
                momentum_before = torch.zeros_like(after) if momentum is None else momentum
                after.copy_(torch.where(overflow, momentum_before, after))
        muon.param_groups = groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()

    def _each(self) -> Iterator[Optimizer]:
        yield from self._parts.values()

    def _share_groups(self) -> None:
        """Set `param_groups` to the groups that both optimizers read their settings from."""
        self.param_groups = [group for part in self._each() for group in part.param_groups]


def _begin_momentum(optimizer: Optimizer, *_: object) -> None:
    """Write a momentum of zeros before the first update, which a scaled loss may skip.

    A skipped update writes no momentum, and the next one of PyTorch (2.13) needs one.
    """
    if getattr(optimizer, "found_inf", None) is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if not optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Group the parameters: matrices decay, vectors do not."""
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "decays": True, "is_muon": False},
        {"params": [p for p in parameters if p.ndim < 2], "decays": False, "is_muon": False},
    ]


def _adamw(config: AdamWConfig | MuonConfig, parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(
        _groups(parameters),
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
